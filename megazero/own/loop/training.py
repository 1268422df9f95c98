"""`training`: a run whose steps a program takes, of a family of megazero's or of a model of its own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint.agreement import attempt_on_all_ranks
from megazero.checkpoint.manager import find_on_all_ranks
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.data.own import Rows, named_as_given, too_short
from megazero.data.tokenizer import Tokenizer
from megazero.mpu.meeting import Environment
from megazero.own.engine import Engine
from megazero.own.loop.model_run import OwnBatches, OwnJob, own_job
from megazero.own.loop.model_steps import Beginning, ModelLoop
from megazero.own.loop.samples import Collate, OwnSource, SampleContents, SampleSource
from megazero.own.named_groups import GivenGroups
from megazero.own.opening import Opening, TimeUnits, opening_of
from megazero.own.planned_memory import MeasuredStep
from megazero.own.settings import LoopSettings
from megazero.own.torch_rule import MakeOptimizer
from megazero.own.unit_times import unit_seconds
from megazero.own.units.model import BatchTensors, Model
from megazero.own.units.refusals import require_alike
from megazero.system.extensions import why_not_called
from megazero.system.given import kind
from megazero.telemetry.record import StepRecord
from megazero.telemetry.watchdog import StopSignals
from megazero.train import api
from megazero.train.embedded import settings_of_torch
from megazero.train.logs import Callbacks


class ModelTraining(api.Training):
    """A run of a program's own model.

    engine  which has the model: `export`, `state_dict`, `parameters_whole`. Its steps are those of the run
    """

    def __init__(self, job: OwnJob, signals: StopSignals) -> None:
        super().__init__(job, signals)
        self.engine = job.trainer.model


def training(
    run: api.Given,
    *,
    model: Model | None = None,
    data: SampleSource | None = None,
    optimizer: str | MakeOptimizer = "adamw",
    collate: Collate | None = None,
    shuffle: bool = False,
    timed: bool = False,
    groups: GivenGroups | None = None,
    train_data: Rows | None = None,
    valid_data: Any = None,
    tokenizer: Tokenizer | None = None,
    on_step: Callable[[StepRecord], object] | None = None,
    on_evaluation: Callable[[int, dict[str, float]], object] | None = None,
    on_checkpoint: Callable[[Path, int], object] | None = None,
    handle_signals: bool = False,
) -> AbstractContextManager[Any]:
    """A run whose steps are taken by the caller:

        with megazero.training({"train_iters": 100}) as run:
            for step in run.steps():
                ...
        print(run.result)

    The arguments and errors are those of `pretrain`. When the block is left, also after a `break`, the run makes its
    last save and, if it has finished, its final evaluations. If an exception leaves the block, nothing is saved.

    With `model` it trains a model of the program's own, and has its engine:

        with megazero.training(model=model, data=data, run={"train_iters": 100, "save": "runs/first"}) as run:
            for step in run.steps():
                ...
            run.engine.export("model.safetensors")

    model       of `megazero.Model`, `from_sequential` or `from_transformers`
    data        samples to train on: an object with a length whose item i is a mapping from names to tensors, the same
                on every rank. Sample i of the run is item i modulo the length, in every layout
    valid_data  the same for validation, or several by name
    collate     a function from a list of samples to a micro-batch. None: they are stacked by name
    shuffle     whether each pass over `data` has an order of its own, which depends on `seed` and the pass
    timed       whether rank 0 measures with the first samples how long each unit takes, and units are divided among
                stages by these times
    optimizer   as of `engine`, and so is `groups`. The rate of each step is that of the run: `lr`, warm-up and decay
    """
    callbacks = Callbacks(on_step, on_evaluation, on_checkpoint)
    if model is None:
        own_rule = None if optimizer == "adamw" else optimizer
        _require_unset(data=data, optimizer=own_rule, collate=collate, shuffle=shuffle, timed=timed, groups=groups)
        return api.training(
            run,
            train_data=train_data,
            valid_data=valid_data,
            tokenizer=tokenizer,
            on_step=on_step,
            on_evaluation=on_evaluation,
            on_checkpoint=on_checkpoint,
            handle_signals=handle_signals,
        )
    if not isinstance(model, Model):
        raise TypeError(f"model is {type(model).__name__}: a megazero.Model is needed")
    arguments = ModelArguments(
        api.Arguments(data, valid_data, None, callbacks, handle_signals, named="data"),
        collate,
        shuffle,
        timed,
        {"train_data": train_data, "tokenizer": tokenizer},
        groups,
    )
    return api.NotBegun(_training(run, model, optimizer, arguments))


def _require_unset(**of_models: Any) -> None:
    """Raise ConfigError where an argument of a model is set, and there is none."""
    for name, given in of_models.items():
        if given is not None and given is not False:
            raise ConfigError([f"{name} is of a model of your own, and there is none: say model=, or train_data="])


@dataclass(frozen=True)
class ModelArguments:
    """The arguments beside a model as the caller gave them. They may have any type until `problems` has found nothing.

    given        data, functions and signals
    of_families  arguments of megazero's families, by name
    groups       of parameters
    """

    given: api.Arguments
    collate: Any
    shuffle: Any
    timed: Any
    of_families: Mapping[str, Any]
    groups: GivenGroups | None

    def problems(self) -> list[str]:
        """One sentence for each argument that cannot be used."""
        problems = self.given.problems()
        if self.given.train_data is None:
            problems.append("data is needed with model: an object with a length whose items are samples")
        problems += [
            f"{name} is of megazero's families: a model has data=, of samples"
            for name, given in self.of_families.items()
            if given is not None
        ]
        reason = None if self.collate is None else why_not_called(self.collate, "samples")
        if reason is not None:
            problems.append(f"collate: a function of a list of samples is needed; {reason}")
        for name, switch in (("shuffle", self.shuffle), ("timed", self.timed)):
            if not isinstance(switch, bool):
                problems.append(f"{name} is {kind(switch)}: it is True or False")
        return problems

    def loop(self) -> LoopSettings:
        """What the settings of the run are checked with."""
        problems = self.problems()
        return LoopSettings(None if problems else len(self.given.train_data), problems)

    def train(self, run: Run) -> OwnSource:
        """The samples to train on."""
        return OwnSource(self.given.train_data, "data", self.collate, run.data.seed, shuffle=self.shuffle)

    def seconds_of(self, model: Model) -> TimeUnits | None:
        """What measures the units of a model with the first samples; None if nobody asks for it."""

        def measured(run: Run, device: torch.device) -> list[float]:
            first = self.train(run).batch(range(run.schedule.micro_batch_size), seeded=True)
            return unit_seconds(model, first, run, device)

        return measured if self.timed else None

    def measured(self, model: Model) -> MeasuredStep:
        """What measures the units of a model with the first samples, where the run has budgets."""

        def first(run: Run) -> BatchTensors:
            return self.train(run).batch(range(run.schedule.micro_batch_size), seeded=True)

        return MeasuredStep(model, first, always=False)

    def valid(self, run: Run) -> dict[str, OwnSource]:
        """The validation sets by metric. Raises ConfigError where one is too short."""
        given = self.given.own_data().valid
        if problems := too_short(run, given):
            raise ConfigError(problems)
        return {
            metric: OwnSource(samples, named_as_given(metric), self.collate, run.data.seed)
            for metric, samples in given.items()
        }


@contextmanager
def _training(
    run: api.Given, model: Model, optimizer: str | MakeOptimizer, arguments: ModelArguments
) -> Iterator[ModelTraining]:
    """The run of `training` with a model."""
    handles = arguments.given.handle_signals is True
    with (
        settings_of_torch(Environment.read()),
        StopSignals() if handles else nullcontext(StopSignals()) as signals,
        opening_of(
            model,
            optimizer,
            None,
            run,
            arguments.loop(),
            signals,
            arguments.seconds_of(model),
            measure=arguments.measured(model),
            named=arguments.groups,
        ) as opening,
    ):
        data, beginning = _data_of(opening, arguments)
        loop = ModelLoop(beginning)
        with api.naming_fields():
            engine = Engine(model, opening, loop)
        with engine:
            with api.naming_fields():
                job = own_job(engine, loop, data, signals, arguments.given.callbacks)
            under_way = ModelTraining(job, signals)
            try:
                yield under_way
                under_way.finish()
            finally:
                under_way.release()


def _data_of(opening: Opening, arguments: ModelArguments) -> tuple[OwnBatches, Beginning]:
    """The data of a run, and from what it begins. A collective of all ranks, which raises ConfigError where ranks have
    other data.
    """
    run, grid, load = opening.run, opening.grid, opening.run.checkpoint.load

    def sources() -> tuple[OwnSource, SampleContents, dict[str, OwnSource]]:
        train = arguments.train(run)
        contents = train.contents(run.schedule.micro_batch_size)
        if contents.checksum is None and run.parallel.pp > 1:
            raise ConfigError(
                [
                    "data[0] is not the same when it is read twice, with the generators of torch, NumPy and Python "
                    "seeded alike: the stages of a pipeline, which read it each, would have different samples"
                ]
            )
        return train, contents, arguments.valid(run)

    train, contents, valid = attempt_on_all_ranks(grid.world, grid.device, sources)
    same = {"have other data: item i is the same on every rank": zlib.crc32(repr(contents).encode())}
    require_alike(same, grid)
    checkpoint = find_on_all_ranks(Path(load), grid) if load else None
    return OwnBatches(train, valid), Beginning(checkpoint, contents)
