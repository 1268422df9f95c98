"""A scatter plot of predicted step times beside measured ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

from docs.extension.svg import COLOURS, INK, Picture

RECORDED = Path(__file__).resolve().parents[2] / "pictures" / "plan.json"
"""Points by name, measured seconds and error, rounded: `python -m bench.fit_plan --record` writes them."""
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 700, 380, 56, 18, 46, 16
LEAST, MOST = 0.04, 130.0
"""Seconds at the ends of the horizontal axis, which is logarithmic."""
WORST = 0.45
"""The error at the ends of the vertical axis; what is beyond stands at the border."""


def _at(seconds: float, error: float) -> tuple[float, float]:
    across = math.log(seconds / LEAST) / math.log(MOST / LEAST)
    up = (max(-WORST, min(WORST, error)) + WORST) / (2 * WORST)
    return LEFT + (WIDTH - LEFT - RIGHT) * across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * up


def plan() -> str:
    """The error of each predicted step time, by the measured time."""
    groups: dict[str, list[tuple[float, float]]] = json.loads(RECORDED.read_text())
    count = sum(map(len, groups.values()))
    picture = Picture(WIDTH, HEIGHT, f"Errors of {count} predicted step times by the measured time")
    for error in (-0.4, -0.2, -0.1, 0.0, 0.1, 0.2, 0.4):
        x, y = _at(LEAST, error)
        picture.line(x, y, _at(MOST, error)[0], y, dashed=error != 0)
        picture.text(x - 8, y + 4, f"{error:+.0%}" if error else "0", at="end", size=11)
    for seconds in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100):
        x, y = _at(seconds, -WORST)
        picture.line(x, y, x, y + 4)
        picture.text(x, y + 17, f"{seconds:g} s", size=11)
    for (name, rows), colour, left in zip(groups.items(), COLOURS, (LEFT, 260, 460), strict=False):
        size = 3 if len(rows) > 100 else 5
        for measured, error in rows:
            x, y = _at(measured, error)
            picture.box(x - size / 2, y - size / 2, size, size, colour)
        picture.box(left, HEIGHT - 14, 9, 9, colour)
        picture.text(left + 14, HEIGHT - 6, name, at="start", size=11, fill=INK)
    return picture.svg()
