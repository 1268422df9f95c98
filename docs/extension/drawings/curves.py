"""Curves: the loss of a recorded run, and the learning rate of each style."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from docs.extension.svg import COLOURS, Picture
from megazero.config.lengths import Length, Measure
from megazero.config.schema import ScheduleConfig
from megazero.optim.lr_schedule import STYLES, LearningRate

RECORDED = Path(__file__).resolve().parents[2] / "pictures" / "loss.json"
"""The losses of a run of `make pretrain`, taken from its metrics file, with the machine that it ran on."""
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 700, 270, 48, 16, 44


class _Axes:
    """A frame with numbers at its sides; `at` gives the place of a point."""

    def __init__(self, picture: Picture, last: float, low: float, high: float) -> None:
        self.picture, self.last, self.low, self.high = picture, last, low, high

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (_WIDTH - _LEFT - 16) * x / self.last
        down = (_HEIGHT - _TOP - _BOTTOM) * (self.high - y) / (self.high - self.low)
        return _LEFT + across, _TOP + down

    def number_y(self, value: float, words: str) -> None:
        x, y = self.at(0, value)
        self.picture.line(x, y, *self.at(self.last, value), dashed=value != self.low)
        self.picture.text(x - 8, y + 4, words, at="end", size=11)

    def number_x(self, value: float, words: str) -> None:
        x, y = self.at(value, self.low)
        self.picture.line(x, y, x, y + 4)
        self.picture.text(x, y + 17, words, size=11)

    def curve(self, ys: Sequence[float], colour: str, *, width: float = 1.6) -> None:
        self.picture.curve([self.at(x, y) for x, y in enumerate(ys, 1)], colour, width=width)


def loss(mean_of: int = 10) -> str:
    """The loss of every step, its mean over the last steps, and the loss on held-out text at the end."""
    run = json.loads(RECORDED.read_text())
    losses = run["loss"]
    means = [sum(losses[max(0, at - mean_of) : at]) / min(at, mean_of) for at in range(1, len(losses) + 1)]
    picture = Picture(_WIDTH, _HEIGHT, f"Loss of {run['command']} by iteration")
    axes = _Axes(picture, len(losses), 3, 9)
    for value in range(3, 10):
        axes.number_y(value, str(value))
    for value in range(0, len(losses) + 1, 40):
        axes.number_x(value, str(value))
    axes.curve(losses, COLOURS[7], width=1)
    axes.curve(means, COLOURS[0], width=2.4)
    for iteration, value in run["valid_loss"].items():
        x, y = axes.at(int(iteration), value)
        picture.box(x - 4, y - 4, 8, 8, COLOURS[1])
    legend = (
        (COLOURS[7], "loss of each step, in nats per token"),
        (COLOURS[0], f"mean of the last {mean_of} steps"),
        (COLOURS[1], "held-out text"),
    )
    x = _LEFT + 80.0
    for colour, words in legend:
        picture.box(x, _HEIGHT - 13, 14, 12, colour)
        picture.text(x + 20, _HEIGHT - 3, words, at="start", size=11)
        x += 38 + 5.9 * len(words)
    picture.text(_LEFT, _HEIGHT - 3, "iteration", at="start", size=11)
    return picture.svg()


def learning_rates(steps: int = 200, warmup: int = 20) -> str:
    """Every style with one warm-up, as shares of the highest rate."""
    picture = Picture(_WIDTH, _HEIGHT, "Learning rate by iteration, for each style")
    axes = _Axes(picture, steps, 0, 1)
    for value in (0.0, 0.5, 1.0):
        axes.number_y(value, f"{value:g}")
    for value in range(0, steps + 1, steps // 4):
        axes.number_x(value, str(value))
    for row, style in enumerate(("constant", *STYLES)):
        rise, length = Length(warmup, Measure.ITERATIONS), Length(steps, Measure.ITERATIONS)
        config = ScheduleConfig(lr=1.0, lr_decay_style=style, lr_warmup=rise, train_length=length)
        rate = LearningRate(config)
        axes.curve([rate.at(done, 0) for done in range(steps)], COLOURS[row], width=2)
        picture.box(_LEFT + 95, 122 + 20 * row, 14, 12, COLOURS[row])
        picture.text(_LEFT + 117, 132.5 + 20 * row, style, at="start", size=11.5)
    picture.text(_LEFT, _HEIGHT - 2, "iteration", at="start", size=11)
    return picture.svg()
