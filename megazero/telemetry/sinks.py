"""The sinks of a run in addition to its log lines: one for each flag that names a place, and --sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megazero.config.schema import Run
from megazero.system.extensions import SINKS, load
from megazero.telemetry.metrics import MetricsFile
from megazero.telemetry.record import NoSink, Sink
from megazero.telemetry.services import RunId, ServiceSink

METHODS = ("note", "step", "evaluation", "flush", "close")
"""Of a `Sink`."""


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


def _wandb(of: SinkContext) -> Sink:
    from megazero.telemetry.wandb import Wandb

    project = of.run.trainer.wandb or ""
    run_id = RunId.of("wandb", project, of.run, of.first_iteration, of.check)
    return ServiceSink(f"--wandb {project}", Wandb(of.run, run_id, of.tell), of.tell)


def _mlflow(of: SinkContext) -> Sink:
    from megazero.telemetry.mlflow import Mlflow

    experiment = of.run.trainer.mlflow or ""
    run_id = RunId.of("mlflow", experiment, of.run, of.first_iteration, of.check)
    return ServiceSink(f"--mlflow {experiment}", Mlflow(of.run, run_id, of.tell), of.tell)


BY_FIELD: Mapping[str, Callable[[SinkContext], Sink]] = MappingProxyType(
    {"metrics_file": _metrics_file, "tensorboard_dir": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
)
"""Field of `TrainerConfig` that names a file, folder, project or experiment -> a function that makes its sink."""


def named_places(run: Run) -> dict[str, str]:
    """Flag -> its value, for all flags of sinks that the run has."""
    named = {field: getattr(run.trainer, field) for field in BY_FIELD}
    places = {f"--{field.replace('_', '-')}": place for field, place in named.items() if place}
    return places | ({"--sinks": " ".join(run.trainer.sinks)} if run.trainer.sinks else {})


def open_sinks(of: SinkContext) -> list[Sink]:
    """The sinks of a run. Raises OSError where a file cannot be written, ValueError where a package is missing or what
    it makes is no sink.
    """
    named = [make(of) for field, make in BY_FIELD.items() if getattr(of.run.trainer, field)]
    for name in dict.fromkeys(of.run.trainer.sinks):
        made = sink_factory(name)(of)
        refuse_half(name, made)
        named.append(made)
    return named


def sink_factory(name: str) -> Callable[[SinkContext], Sink]:
    """What makes the sink of a package. Raises ValueError where it is not there, or is a class that lacks a method."""
    found: Callable[[SinkContext], Sink] = load(SINKS, name)
    if isinstance(found, type):
        refuse_half(name, found)
    return found


def refuse_half(name: str, sink: object) -> None:
    """Raises ValueError for a sink, or a class of sinks, that lacks a method."""
    lacking = [method for method in METHODS if not callable(getattr(sink, method, None))]
    if lacking:
        kind = sink.__name__ if isinstance(sink, type) else type(sink).__name__
        raise NoSink(f"{name} of {SINKS} is {kind}, which lacks {', '.join(lacking)}: a sink has {', '.join(METHODS)}")
