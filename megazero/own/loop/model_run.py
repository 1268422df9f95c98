"""megazero's own loop over a user's model: the steps, evaluations, saves and stops of `train.trainer`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from megazero.checkpoint.manager import FoundCheckpoint
from megazero.config.derive import uses_files, validation_samples
from megazero.config.dump import run_dict
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.data.loader import Batches
from megazero.mpu.grid import ProcessGrid
from megazero.optim.step_plan import StepPlan
from megazero.own.engine import Engine
from megazero.own.loop.model_steps import Beginning, ModelLoop, changed
from megazero.own.loop.samples import OwnSource, SampleContents, SampleLoader
from megazero.own.units.stage import OwnBatch
from megazero.report.text_blocks import pairs
from megazero.telemetry.record import Rates
from megazero.telemetry.units import count
from megazero.telemetry.watchdog import StopSignals
from megazero.train.job import deadline_of, save_policy_of
from megazero.train.logs import Callbacks, CallbackSink, as_config_error, sinks_of, step_log
from megazero.train.report import report
from megazero.train.resume import StartPoint
from megazero.train.run_memory import HostMemory
from megazero.train.state import TrainingPosition
from megazero.train.swap_files import FileUse
from megazero.train.trainer import StepValues, Trainer
from megazero.train.whole_steps import WholeSteps

SAMPLES, SCHEDULE = "own_samples", "own_schedule"
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
        return self.model.counted

    def warm_up(self, batches: Sequence[OwnBatch], loss_factor: Tensor) -> float:
        self.model.steps_engine.warm_up(batches, loss_factor)
        return 0.0

    def groups_at(self, lr: float) -> tuple[Mapping[str, Any], ...]:
        return self.model.groups_at(lr)

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
        disks = self.disks.sentence(self.grid) if uses_files(self.run) else None
        if self.grid.rank == 0:
            report(self.run, None, disks)

    def close(self) -> None:
        """Tell services of a run that fails. The engine ends by itself."""
        self.trainer.log.abandon()


@dataclass(frozen=True)
class OwnBatches:
    """The data of a run: samples to train on, and validation sets by metric."""

    train: OwnSource
    valid: Mapping[str, OwnSource]


def own_job(model: Engine, loop: ModelLoop, data: OwnBatches, signals: StopSignals, callbacks: Callbacks) -> OwnJob:
    """The parts of a run on this rank, filled from a checkpoint if there is one. A collective of all ranks, of which
    rank 0 prints what the run is.

    Raises ConfigError if an output cannot be written, or the data is not the checkpoint's, and what `Engine.load`
    raises.
    """
    run, grid = model.run, model.grid
    start, samples = _begin(model, loop.beginning), loop.beginning.samples
    saving = model.checkpoints.of(run.checkpoint)
    checkpoints = saving.checkpoints
    with as_config_error(f"--save {run.checkpoint.save}"):
        checkpoints.claim()
    program = CallbackSink(callbacks, signals)
    sinks = [*sinks_of(run, grid, start.position, checkpoints.fence, of_samples=True), program]
    if grid.rank == 0:
        print(pairs(_introduction(model, data.train, start)), end="\n\n")
        print(model.planned_memory, end="\n\n", flush=True)
    log = step_log(run, grid, sinks, Rates(0.0, 1, grid.axes.world_size))

    def record(position: TrainingPosition) -> dict[str, Any]:
        progress, beside = model.to_save(asdict(position))
        saving.hold(beside)
        return {**progress, SAMPLES: asdict(samples), SCHEDULE: run_dict(run)["schedule"]}

    whole_steps = WholeSteps(model.state, model.swapped, late=run.parallel.late_update)
    loop.whole_steps = whole_steps
    trainer = OwnTrainer(
        run,
        grid,
        model.steps_engine,
        model.train_state,
        _batches(model, data, samples, start.position),
        log,
        save_policy_of(run, checkpoints, record, log, program),
        start.position,
        deadline_of(run),
        signals,
        whole_steps,
        HostMemory(grid.device),
        model=model,
    )
    return OwnJob(run, grid, trainer, FileUse([*model.state.tiers.stores.values()]))


def _begin(model: Engine, beginning: Beginning) -> StartPoint:
    """Fill the state from a checkpoint of a run, or of `Engine.save`, unless swap files lead to a later step; return
    where training goes on.
    """
    checkpoint, how, swapped = beginning.checkpoint, model.run.checkpoint, model.swapped
    if swapped is not None and swapped.step is not None:
        model.train_state.restore(swapped.progress)
        if checkpoint is not None:  # a step on disks has what is trained alone
            model.load_untrained(checkpoint)
        return StartPoint(swapped.position, swapped.words(model.run.offload.nvme_path, checkpoint))
    if checkpoint is None:
        return StartPoint(TrainingPosition(), "from the model's own values", is_read=False)
    then = None if how.finetune else checkpoint.progress.get(SAMPLES)
    if then is not None:  # before anything is read
        _require_same_samples(then, beginning.samples, checkpoint, override=how.override_data)
    model.load_found(checkpoint, weights_only=how.finetune or how.no_load_optim)
    if how.finetune:
        return StartPoint(TrainingPosition(), f"weights of {checkpoint.path}")
    model.steps = int(checkpoint.progress["steps"])
    if then is None:  # of a program's own loop, whose steps count as those of this schedule
        samples = StepPlan(model.run.schedule).batches.consumed_after(model.steps)
        return _at(TrainingPosition(model.steps, samples, samples), checkpoint, [])
    fields = changed(checkpoint.progress[SCHEDULE], run_dict(model.run)["schedule"])
    return _at(TrainingPosition.read(checkpoint.progress["about"]), checkpoint, fields)


def _at(position: TrainingPosition, checkpoint: FoundCheckpoint, fields: Sequence[str]) -> StartPoint:
    """A run that goes on from a checkpoint. fields: of the schedule that have changed."""
    differs = f"; changed: {', '.join(fields)}" if fields else ""
    return StartPoint(position, f"{checkpoint.path}, iteration {position.iteration}{differs}")


def _require_same_samples(
    then: Mapping[str, Any], now: SampleContents, checkpoint: FoundCheckpoint, *, override: bool
) -> None:
    """Raise ConfigError where a checkpoint is of other samples, or of another order."""
    other = None
    if then["number"] != now.number:
        other = f"data has {now.number} samples, and had {then['number']}"
    elif None not in (then["checksum"], now.checksum) and then["checksum"] != now.checksum:
        other = "samples of data have other contents"
    elif then["order"] != now.order:
        orders = now.order, then["order"]
        now_in, then_in = ("in order" if order is None else f"shuffled by seed {order}" for order in orders)
        other = f"samples are {now_in}, and were {then_in}"
    if other is not None and not override:
        way_out = "override_data goes on with what is there now"
        raise ConfigError([f"{checkpoint.path}: {other} when it was written; {way_out}"])


def _batches(model: Engine, data: OwnBatches, contents: SampleContents, position: TrainingPosition) -> Batches:
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
    train = loader(data.train, end, 0 if contents.draws else run.data.num_workers)
    evaluated = validation_samples(run)
    sets = data.valid if evaluated else {}
    return Batches(train, {metric: loader(source, evaluated, 0) for metric, source in sets.items()}, {})


def _introduction(model: Engine, train: OwnSource, start: StartPoint) -> list[tuple[str, str]]:
    """What the run is, by name."""
    run, axes = model.run, model.grid.axes
    sizes = {each.name: math.prod(each.shape) for unit in model.inventory for each in unit}
    trained = {each.name for unit in model.inventory for each in unit if each.is_trained}
    numbers = [count(sum(sizes.values())), count(sum(sizes[name] for name in trained))]
    length, schedule = StepPlan(run.schedule).total_iterations, run.schedule
    cut = "" if run.parallel.partition is None else f" of {'-'.join(map(str, run.parallel.partition))} units"
    tp = "" if axes.tp == 1 else f"tp {axes.tp} x "
    layout = f"dp {axes.dp} x {tp}pp {axes.pp}{cut}, ZeRO-{run.parallel.zero_stage}, {run.optimizer.precision}"
    batch = f"{schedule.global_batch_size} a step in micro-batches of {schedule.micro_batch_size}"
    return [
        ("model", f"{len(model.inventory)} units, {numbers[0]} parameters, of which {numbers[1]} are trained"),
        ("layout", f"{layout} on {axes.world_size} x {model.grid.device.type}"),
        ("data", f"{train.number:,} samples, {batch}"),
        ("length", f"{length:,} steps"),
        ("starts", start.text),
    ]
