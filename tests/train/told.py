"""What a run tells and leaves, to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor


def digest(tensors: Iterator[Tensor]) -> list[str]:
    return [hashlib.sha256(tensor.detach().double().numpy().tobytes()).hexdigest() for tensor in tensors]


class Told(NamedTuple):
    """The numbers of a step or of an evaluation as text (NaN is NaN)."""

    numbers: str
    iteration: int


class Evaluations:
    """A sink that keeps every step and every evaluation."""

    def __init__(self) -> None:
        self.told: list[Told] = []

    def step(self, record: Any) -> None:
        numbers = repr((record.loss, record.grad_norm, record.lr, record.loss_scale))
        self.told.append(Told(numbers, record.iteration))

    def evaluation(self, iteration: int, losses: dict[str, float]) -> None:
        self.told.append(Told(repr(losses), iteration))

    def note(self, text: str) -> None: ...
    def flush(self, durable: bool) -> None: ...
    def close(self) -> None: ...
