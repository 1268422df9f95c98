"""Where a run's numbers go beside its log lines: a row for each flag that names such a place, and what packages add."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megazero.config.extensions import SINKS, load
from megazero.config.schema import Run
from megazero.telemetry.metrics import MetricsFile
from megazero.telemetry.record import Sink


@dataclass(frozen=True)
class Opening:
    """What a sink is made from, on rank 0 before the first step.

    run              whose numbers it will get
    first_iteration  the first one that it will get; more than 1 where the run has been resumed
    check            to be called before each writing: raises where another job has taken the run over
    tell             says a sentence to the person who reads along
    """

    run: Run
    first_iteration: int
    check: Callable[[], None] | None
    tell: Callable[[str], None]


def _metrics_file(of: Opening) -> Sink:
    return MetricsFile(of.run.trainer.metrics_file or "", of.check, of.tell)


def _tensorboard(of: Opening) -> Sink:
    from megazero.telemetry.tensorboard import TensorBoard

    return TensorBoard(of.run.trainer.tensorboard_dir or "", of.first_iteration, of.tell)


BY_FIELD: Mapping[str, Callable[[Opening], Sink]] = MappingProxyType(
    {"metrics_file": _metrics_file, "tensorboard_dir": _tensorboard}
)
"""Field of the trainer's configuration that names a file or folder -> what writes there."""


def named_places(run: Run) -> dict[str, str]:
    """Flag -> what it names, of those that the run has."""
    named = {field: getattr(run.trainer, field) for field in BY_FIELD}
    places = {f"--{field.replace('_', '-')}": place for field, place in named.items() if place}
    return places | ({"--sinks": " ".join(run.trainer.sinks)} if run.trainer.sinks else {})


def open_sinks(of: Opening) -> list[Sink]:
    """All that the run asks for. Raises OSError for a place that cannot be written, ValueError for what is missing."""
    named = [make(of) for field, make in BY_FIELD.items() if getattr(of.run.trainer, field)]
    return [*named, *(load(SINKS, name)(of) for name in dict.fromkeys(of.run.trainer.sinks))]
