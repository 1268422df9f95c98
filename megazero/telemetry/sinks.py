"""The sinks of a run in addition to its log lines: one for each flag that names a file or folder, and --sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megazero.config.extensions import SINKS, load
from megazero.config.schema import Run
from megazero.telemetry.metrics import MetricsFile
from megazero.telemetry.record import Sink


@dataclass(frozen=True)
class SinkContext:
    """The arguments of a sink's constructor. Sinks are made on rank 0 before the first step.

    run              the run
    first_iteration  number of the first step that the sink will get; more than 1 in a resumed run
    check            to be called before each write: raises if another job has taken over the run
    tell             prints a sentence to the user
    """

    run: Run
    first_iteration: int
    check: Callable[[], None] | None
    tell: Callable[[str], None]


def _metrics_file(of: SinkContext) -> Sink:
    return MetricsFile(of.run.trainer.metrics_file or "", of.check, of.tell)


def _tensorboard(of: SinkContext) -> Sink:
    from megazero.telemetry.tensorboard import TensorBoard

    return TensorBoard(of.run.trainer.tensorboard_dir or "", of.first_iteration, of.tell)


BY_FIELD: Mapping[str, Callable[[SinkContext], Sink]] = MappingProxyType(
    {"metrics_file": _metrics_file, "tensorboard_dir": _tensorboard}
)
"""Field of `TrainerConfig` that names a file or folder -> a function that makes its sink."""


def named_places(run: Run) -> dict[str, str]:
    """Flag -> its value, for all flags of sinks that the run has."""
    named = {field: getattr(run.trainer, field) for field in BY_FIELD}
    places = {f"--{field.replace('_', '-')}": place for field, place in named.items() if place}
    return places | ({"--sinks": " ".join(run.trainer.sinks)} if run.trainer.sinks else {})


def open_sinks(of: SinkContext) -> list[Sink]:
    """The sinks of a run. Raises OSError where a file cannot be written, ValueError where a package is missing."""
    named = [make(of) for field, make in BY_FIELD.items() if getattr(of.run.trainer, field)]
    return [*named, *(load(SINKS, name)(of) for name in dict.fromkeys(of.run.trainer.sinks))]
