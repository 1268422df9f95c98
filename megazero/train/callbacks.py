"""Callbacks of the program that called a run, and how they stop it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megazero.telemetry.record import StepRecord
from megazero.telemetry.watchdog import StopSignals


@dataclass(frozen=True)
class Callbacks:
    """Functions of a program. Each is called on the ranks that give it; returning True requests a stop of the run.

    on_step        called with the record of each step, at the log interval for all steps since the last
    on_evaluation  called with the iteration and the losses by metric name
    on_checkpoint  called with the folder and the iteration of each complete checkpoint
    """

    on_step: Callable[[StepRecord], object] | None = None
    on_evaluation: Callable[[int, dict[str, float]], object] | None = None
    on_checkpoint: Callable[[Path, int], object] | None = None


class CallbackSink:
    """A sink that calls the program's callbacks, and requests a stop if one returns True."""

    def __init__(self, callbacks: Callbacks, signals: StopSignals) -> None:
        self._callbacks, self._signals = callbacks, signals

    def step(self, record: StepRecord) -> None:
        if self._callbacks.on_step is not None:
            self._hear("on_step", self._callbacks.on_step(record))

    def evaluation(self, iteration: int, losses: dict[str, float]) -> None:
        if self._callbacks.on_evaluation is not None:
            self._hear("on_evaluation", self._callbacks.on_evaluation(iteration, losses))

    def saved(self, folder: Path, iteration: int) -> None:
        """Call `on_checkpoint` for a complete checkpoint."""
        if self._callbacks.on_checkpoint is not None:
            self._hear("on_checkpoint", self._callbacks.on_checkpoint(folder, iteration))

    def _hear(self, name: str, answer: object) -> None:
        """Request a stop if the answer is True or numpy's True. Any other return value is ignored."""
        if isinstance(answer, bool | np.bool_) and answer:
            self._signals.ask(f"{name} asked for it")

    def note(self, text: str) -> None:
        """Ignored: notes are for the log."""

    def flush(self, durable: bool) -> None:
        """Nothing to do: callbacks are called at once."""

    def close(self) -> None:
        """Nothing to do: the program sees the end of its run."""
