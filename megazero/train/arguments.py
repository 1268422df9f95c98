"""The arguments of `megazero.pretrain` other than the run: checks of them, and callbacks that may stop the run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megazero.data.own import OwnData
from megazero.system.extensions import why_not_called
from megazero.system.given import is_whole, kind
from megazero.system.reading import shown
from megazero.telemetry.record import StepRecord
from megazero.telemetry.watchdog import StopSignals


class _Part(NamedTuple):
    needed: str
    fits: Callable[[Any], bool]


TOKENIZER = {
    "vocab_size": _Part("a number from 1 on", lambda value: is_whole(value) and value >= 1),
    "eod_id": _Part("a number, or None where no token ends a document", lambda value: value is None or is_whole(value)),
    "encode": _Part("a method: text -> list of ids", callable),
    "decode": _Part("a method: list of ids -> text", callable),
}
"""The attributes that a tokenizer must have: what each must be, and a check of it."""
CALLBACKS = {
    "on_step": ("record",),
    "on_evaluation": ("iteration", "losses"),
    "on_checkpoint": ("folder", "iteration"),
}
"""The arguments with which each callback is called."""


@dataclass(frozen=True)
class Arguments:
    """The arguments as the caller gave them. They may have any type until `problems` has found nothing."""

    train_data: Any
    valid_data: Any
    tokenizer: Any
    callbacks: Callbacks
    handle_signals: Any

    def problems(self) -> list[str]:
        """One sentence for each argument that cannot be used: its name, what it is, and what is needed."""
        problems = list[str]() if self.train_data is None else [*_rows_problems("train_data", self.train_data)]
        if isinstance(self.valid_data, Mapping):
            if not self.valid_data:
                problems.append("valid_data is an empty mapping, which names no validation set: None stands for none")
            for name, rows in self.valid_data.items():
                if not (isinstance(name, str) and name):
                    problems.append(f"valid_data has the key {shown(name)}: the name of a validation set is a word")
                problems += _rows_problems(f"valid_data[{name!r}]", rows)
        elif self.valid_data is not None:
            problems += _rows_problems("valid_data", self.valid_data)
        if self.tokenizer is not None:
            problems += _tokenizer_problems(self.tokenizer)
        for name, parameters in CALLBACKS.items():
            callback = getattr(self.callbacks, name)
            reason = None if callback is None else why_not_called(callback, *parameters)
            if reason is not None:
                problems.append(f"{name}: a function of {' and '.join(parameters)} is needed; {reason}")
        if not isinstance(self.handle_signals, bool):
            problems.append(f"handle_signals is {kind(self.handle_signals)}: it is True or False")
        elif self.handle_signals and threading.current_thread() is not threading.main_thread():
            problems.append("handle_signals: only the main thread of a program can handle signals, and this is another")
        return problems

    def own_data(self) -> OwnData:
        """The data and the tokenizer. Call it only if `problems` is empty."""
        valid = self.valid_data
        by_metric = {} if valid is None else {"valid_loss": valid}
        if isinstance(valid, Mapping):
            by_metric = {f"valid_loss/{name}": rows for name, rows in valid.items()}
        return OwnData(self.train_data, by_metric, self.tokenizer)


def _rows_problems(name: str, rows: object) -> Iterator[str]:
    needed = "a data set has a length and items by number (__len__ and __getitem__)"
    if isinstance(rows, str | bytes | os.PathLike):
        yield f"{name} is {kind(rows)}: {needed}; the run names files, by data.data_path"
    elif isinstance(rows, Mapping):
        yield f"{name} is {kind(rows)}, whose items have names: {needed}"
    elif lacking := [method for method in ("__len__", "__getitem__") if not hasattr(rows, method)]:
        yield f"{name} is {kind(rows)}: {needed}; it lacks {' and '.join(lacking)}"
    else:
        try:
            len(rows)  # type: ignore[arg-type]
        except TypeError as error:  # a class, an array without dimensions
            yield f"{name} is {kind(rows)}: {needed}; its length: {error}"


def _tokenizer_problems(tokenizer: object) -> Iterator[str]:
    lacking = []
    for name, part in TOKENIZER.items():
        if not hasattr(tokenizer, name):
            lacking.append(f"{name} ({part.needed})")
        elif not part.fits(value := getattr(tokenizer, name)):
            lacking.append(f"{name} ({part.needed}, not {kind(value)})")
    if isinstance(tokenizer, type):
        yield f"tokenizer is {kind(tokenizer)}: an object of it is needed"
    elif isinstance(tokenizer, str | os.PathLike):
        yield f"tokenizer is {kind(tokenizer)}: an object is needed; the run names one, by data.tokenizer"
    elif lacking:
        yield f"tokenizer is {kind(tokenizer)}, which lacks {', '.join(lacking)}"


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
        self._call("on_step", record)

    def evaluation(self, iteration: int, losses: dict[str, float]) -> None:
        self._call("on_evaluation", iteration, losses)

    def saved(self, folder: Path, iteration: int) -> None:
        """Call `on_checkpoint` for a complete checkpoint."""
        self._call("on_checkpoint", folder, iteration)

    def _call(self, name: str, *values: object) -> None:
        """Call a callback that there is. True, also numpy's, requests a stop; any other return value is ignored."""
        callback = getattr(self._callbacks, name)
        answer = None if callback is None else callback(*values)
        if isinstance(answer, bool | np.bool_) and answer:
            self._signals.ask(f"{name} asked for it")

    def note(self, text: str) -> None:
        """Ignored: notes are for the log."""

    def flush(self, durable: bool) -> None:
        """Nothing to do: callbacks are called at once."""

    def close(self) -> None:
        """Nothing to do: the program sees the end of its run."""
