"""What a program is told of its run while it goes on, and how it asks for the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megazero.telemetry.record import StepRecord
from megazero.telemetry.watchdog import StopSignals


@dataclass(frozen=True)
class Callbacks:
    """Functions of a program, each called on every rank that hands it in. One that returns True asks the run to stop.

    on_step        gets the record of a step, at the log interval those of all steps since the last
    on_evaluation  gets the iteration and the losses by metric name
    on_checkpoint  gets folder and iteration of a checkpoint that is complete
    """

    on_step: Callable[[StepRecord], object] | None = None
    on_evaluation: Callable[[int, dict[str, float]], object] | None = None
    on_checkpoint: Callable[[Path, int], object] | None = None


class CallbackSink:
    """A sink that tells a program, and asks the run to stop where the program says so."""

    def __init__(self, callbacks: Callbacks, signals: StopSignals) -> None:
        self._callbacks, self._signals = callbacks, signals

    def step(self, record: StepRecord) -> None:
        if self._callbacks.on_step is not None:
            self._hear("on_step", self._callbacks.on_step(record))

    def evaluation(self, iteration: int, losses: dict[str, float]) -> None:
        if self._callbacks.on_evaluation is not None:
            self._hear("on_evaluation", self._callbacks.on_evaluation(iteration, losses))

    def saved(self, folder: Path, iteration: int) -> None:
        """A checkpoint is complete."""
        if self._callbacks.on_checkpoint is not None:
            self._hear("on_checkpoint", self._callbacks.on_checkpoint(folder, iteration))

    def _hear(self, name: str, answer: object) -> None:
        """A comparison of numpy's numbers is numpy's bool. Other answers are no request: a function may return what
        it likes.
        """
        if isinstance(answer, bool | np.bool_) and answer:
            self._signals.ask(f"{name} asked for it")

    def note(self, text: str) -> None:
        """Remarks are for people."""

    def flush(self, durable: bool) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        """The program knows when its run has ended."""
