"""The house: rooms on floors, as the table of the architecture page has them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from docs.extension.svg import COLOURS, Picture

PAGE = Path(__file__).resolve().parents[2] / "architecture.md"
_ROW = re.compile(r"^\| +(?P<floor>\d*) +\| (?P<rooms>`[^|]*) \|", re.M)
_WIDTH, _LEFT, _ROOM, _STEP, _GAP = 760.0, 40.0, 32.0, 40.0, 8.0
_STOREYS: Mapping[range, tuple[str, str]] = MappingProxyType(
    {
        range(10, 99): ("commands", COLOURS[1]),
        range(7, 10): ("whole jobs: a training, a conversion, a generation", COLOURS[2]),
        range(3, 7): ("a step and its state", COLOURS[0]),
        range(3): ("what all rooms use", COLOURS[7]),
    }
)
"""Floors -> what they are about, and their colour."""


def rooms(text: str) -> dict[int, list[str]]:
    """Floor -> the rooms on it, by the names of their folders or files."""
    listed: dict[int, list[str]] = {}
    floor = 0
    for row in _ROW.finditer(text.split("## Floors")[1].split("\n## ")[0]):
        floor = int(row["floor"] or floor)
        listed.setdefault(floor, []).extend(_names(row["rooms"]))
    return listed


def _names(cell: str) -> list[str]:
    return [name.removeprefix("megazero/").rstrip("/") for name in re.findall(r"`([^`]+)`", cell)]


def house() -> str:
    """The floors, the highest one above; what a room imports is below it."""
    listed = rooms(PAGE.read_text())
    picture = Picture(_WIDTH, _STEP * len(listed) + 34, "The rooms of megazero on their floors")
    for row, floor in enumerate(sorted(listed, reverse=True)):
        y, names = row * _STEP, listed[floor]
        colour = next(colour for floors, (_, colour) in _STOREYS.items() if floor in floors)
        width = (_WIDTH - _LEFT - _GAP * (len(names) - 1)) / len(names)
        picture.text(_LEFT - 14, y + 21, str(floor), at="end")
        for place, name in enumerate(names):
            x = _LEFT + place * (width + _GAP)
            picture.box(x, y, width, _ROOM, colour)
            picture.text(x + width / 2, y + 21, name, fill="#fff", size=13)
    _legend(picture, _STEP * len(listed) + 12)
    return picture.svg()


def _legend(picture: Picture, y: float) -> None:
    x = _LEFT
    for words, colour in _STOREYS.values():
        picture.box(x, y, 14, 12, colour)
        picture.text(x + 20, y + 10, words, at="start", size=11)
        x += 48 + 5.6 * len(words)
