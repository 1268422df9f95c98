"""megazero's own loop over a user's model: the steps, evaluations, saves and stops of `train.trainer`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from megazero.checkpoint.manager import FoundCheckpoint, find_on_all_ranks
from megazero.config.derive import uses_files
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.data.loader import Batches
from megazero.mpu.grid import ProcessGrid
from megazero.optim.step_plan import StepPlan
from megazero.own.engine import Engine
from megazero.own.samples import OwnSource, SampleLoader
from megazero.own.stage import OwnBatch
from megazero.report.text_blocks import pairs
from megazero.telemetry.record import Rates
from megazero.telemetry.sinks import named_places
from megazero.telemetry.units import count
from megazero.telemetry.watchdog import StopSignals
from megazero.train.job import deadline_of, save_policy_of
from megazero.train.logs import Callbacks, CallbackSink, as_config_error, sinks_of, step_log
from megazero.train.run_memory import HostMemory
from megazero.train.state import TrainingPosition, TrainState
from megazero.train.swap_files import FileUse
from megazero.train.trainer import StepValues, Trainer
from megazero.train.whole_steps import WholeSteps

CONTENTS = "own_samples"
"""What `progress` of a run's checkpoint has besides, which `Engine.save` does not know."""


@dataclass
class OwnTrainer(Trainer):
    """The loop over a model of modules. A sample counts as one token.

    model  the engine whose stages and state it trains
    """

    model: Engine = field(kw_only=True)

    @property
    def positions_of_sample(self) -> int:
        return 1

    def count(self, batches: list[OwnBatch]) -> Tensor | float:
        """What the losses of this rank are a sum over: known once they are computed."""
        return self.model.steps_engine.counted

    def warm_up(self, batches: Sequence[OwnBatch], loss_factor: Tensor) -> float:
        self.model.steps_engine.warm_up(batches, loss_factor)
        return 0.0

    def train_step(self, *, stop: bool) -> StepValues:
        self.model.require_as_before()
        values = super().train_step(stop=stop)
        self.model.count_step(values.lr)
        return values


@dataclass(frozen=True)
class OwnJob:
    """The parts of a run of a user's model on this rank (`train.job.Job`)."""

    run: Run
    grid: ProcessGrid
    trainer: OwnTrainer
    disks: FileUse

    def report(self) -> None:
        """Close the log, and print the places of the outputs. A collective of all ranks."""
        self.trainer.log.close(self.trainer.ending)
        disks = self.disks.sentence(self.grid) if uses_files(self.run) else ""
        if self.grid.rank == 0:
            sinks = {
                flag[2:].removesuffix("-file").removesuffix("-dir"): at for flag, at in named_places(self.run).items()
            }
            places = {"offloaded": disks, "checkpoints": self.run.checkpoint.save or "", **sinks}
            print(pairs([*places.items()]), flush=True)

    def close(self) -> None:
        """Tell services of a run that fails. The engine ends by itself."""
        self.trainer.log.abandon()


@dataclass(frozen=True)
class OwnBatches:
    """The data of a run: samples to train on, their `contents`, and validation sets by metric."""

    train: OwnSource
    contents: tuple[int, int | None]
    valid: Mapping[str, OwnSource]


def own_job(model: Engine, data: OwnBatches, signals: StopSignals, callbacks: Callbacks) -> OwnJob:
    """The parts of a run on this rank, filled from a checkpoint if there is one. A collective of all ranks, of which
    rank 0 prints what the run is.

    Raises ConfigError if an output cannot be written, or the data is not the checkpoint's, and what `Engine.load`
    raises.
    """
    run, grid = model.run, model.grid
    start = find_on_all_ranks(Path(run.checkpoint.load), grid) if run.checkpoint.load else None
    position = _begin(model, start, data.contents)
    checkpoints = model.checkpoints.of(run.checkpoint)
    with as_config_error(f"--save {run.checkpoint.save}"):
        checkpoints.claim()
    program = CallbackSink(callbacks, signals)
    sinks = [*sinks_of(run, grid, position, checkpoints.fence, of_samples=True), program]
    if grid.rank == 0:
        print(pairs(_introduction(model, data.train, start, position)), flush=True)
    log = step_log(run, grid, sinks, Rates(0.0, 1, grid.axes.world_size))

    def record(position: TrainingPosition) -> dict[str, Any]:
        return {**model.progress(asdict(position)), CONTENTS: [*data.contents]}

    trainer = OwnTrainer(
        run,
        grid,
        model.steps_engine,
        TrainState(model.state, model.optimizer, model.scaler, None),
        _batches(model, data, position),
        log,
        save_policy_of(run, checkpoints, record, log, program),
        position,
        deadline_of(run),
        signals,
        WholeSteps(model.state, None, late=run.parallel.late_update),
        HostMemory(grid.device),
        model=model,
    )
    return OwnJob(run, grid, trainer, FileUse([*model.state.tiers.stores.values()]))


def _begin(model: Engine, start: FoundCheckpoint | None, data: tuple[int, int | None]) -> TrainingPosition:
    """Fill the state from a checkpoint of a run, or of `Engine.save`; return where training goes on."""
    if start is None:
        return TrainingPosition()
    how = model.run.checkpoint
    model.load_found(start, weights_only=how.finetune or how.no_load_optim)
    if how.finetune:
        return TrainingPosition()
    if (then := start.progress.get(CONTENTS)) is not None:
        _require_same_data(then, data, start, override=how.override_data)
        position = TrainingPosition.read(start.progress["about"])
    else:  # of a program's own loop, whose steps count as those of this schedule
        steps = int(start.progress["steps"])
        samples = StepPlan(model.run.schedule).batches.consumed_after(steps)
        position = TrainingPosition(steps, samples, samples)
    model.steps = position.iteration
    return position


def _require_same_data(
    then: Sequence[int | None], now: tuple[int, int | None], start: FoundCheckpoint, *, override: bool
) -> None:
    number, checksum = then
    other = None
    if number != now[0]:
        other = f"data has {now[0]} samples, and had {number}"
    elif None not in (checksum, now[1]) and checksum != now[1]:
        other = "samples of data have other contents"
    if other is not None and not override:
        raise ConfigError([f"{start.path}: {other} when it was written; override_data goes on with what is there now"])


def _batches(model: Engine, data: OwnBatches, position: TrainingPosition) -> Batches:
    run, grid = model.run, model.grid

    def loader(source: OwnSource, samples: int, workers: int) -> SampleLoader:
        return SampleLoader(
            source,
            samples,
            model.words_of_step,
            dp_rank=grid.at.dp,
            dp_size=grid.axes.dp,
            micro_batch_size=run.schedule.micro_batch_size,
            num_workers=workers,
            device=grid.device,
        )

    end = StepPlan(run.schedule).consumed_at_end(position.iteration, position.consumed_samples)
    evaluated = run.trainer.eval_iters * run.schedule.global_batch_size
    of_valid = {metric: loader(source, evaluated, 0) for metric, source in data.valid.items()} if evaluated else {}
    return Batches(loader(data.train, end, run.data.num_workers), of_valid, {})


def _introduction(
    model: Engine, train: OwnSource, start: FoundCheckpoint | None, position: TrainingPosition
) -> list[tuple[str, str]]:
    """What the run is, by name."""
    run, axes = model.run, model.grid.axes
    sizes = {each.name: math.prod(each.shape) for unit in model.inventory for each in unit}
    trained = {each.name for unit in model.inventory for each in unit if each.is_trained}
    numbers = [count(sum(sizes.values())), count(sum(sizes[name] for name in trained))]
    length, schedule = StepPlan(run.schedule).total_iterations, run.schedule
    layout = f"dp {axes.dp} x pp {axes.pp}, ZeRO-{run.parallel.zero_stage}, {run.optimizer.precision}"
    batch = f"{schedule.global_batch_size} a step in micro-batches of {schedule.micro_batch_size}"
    begins = "the first one" if start is None else f"{start.path}, iteration {position.iteration}"
    return [
        ("model", f"{len(model.inventory)} units, {numbers[0]} parameters, of which {numbers[1]} are trained"),
        ("layout", f"{layout} on {axes.world_size} x {model.grid.device.type}"),
        ("data", f"{train.number:,} samples, {batch}"),
        ("length", f"{length:,} steps, from {begins} on"),
    ]
