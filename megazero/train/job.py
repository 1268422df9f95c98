"""A job on this rank: `build_job` creates the parts of a run and fills their state; `Job.fit` trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from megazero.checkpoint.manager import Checkpoints
from megazero.config.derive import uses_files, validation_samples, writes_activations
from megazero.config.parse import ParsedArguments
from megazero.config.schema import Run
from megazero.data.loader import batches_of
from megazero.model.stage import Stage
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.p2p import Channels
from megazero.pipeline.build import build_engine, build_stages, host_activations, step_lists, with_graphs
from megazero.pipeline.engine import PipelineEngine
from megazero.pipeline.graphs import GraphedEngine
from megazero.pipeline.kept import HostActivations
from megazero.pipeline.kept_disks import ActivationDisks
from megazero.pipeline.stage_specs import chunks_of
from megazero.plan.planned_model import with_kept
from megazero.plan.step_lists import StageLists
from megazero.telemetry.steplog import StepLog
from megazero.telemetry.units import size
from megazero.telemetry.watchdog import StopSignals
from megazero.train.bodies import recompute_of_all_ranks
from megazero.train.checked import resolved_on_all_ranks
from megazero.train.logs import Callbacks, CallbackSink, run_rates, sinks_of, step_log
from megazero.train.prepare import Prepared
from megazero.train.report import announce_kernels, introduce, report, sample_text
from megazero.train.resume import StartPoint, resume, stored_probe
from megazero.train.run_memory import (
    HostMemory,
    explained_out_of_memory,
    host_memory_of,
    keep_budgets,
    trace_of_run,
)
from megazero.train.save_policy import SavePolicy, claim_checkpoints
from megazero.train.standstill import require_finite_weights
from megazero.train.state import TrainingPosition, TrainState, build_state
from megazero.train.swap_files import FileUse, activation_files_of, backends, state_files
from megazero.train.trainer import Trainer
from megazero.train.whole_steps import RunSteps, WholeSteps
from megazero.zero.state import ModelState


@dataclass(frozen=True)
class Job:
    """The parts of a run on this rank, as `build_job` makes them. `fit` trains. Whoever has it closes it at the end."""

    run: Run
    prepared: Prepared
    grid: ProcessGrid
    stages: list[Stage]
    state: TrainState
    checkpoints: Checkpoints
    probe_engine: PipelineEngine
    trainer: Trainer
    disks: FileUse
    activations: HostActivations | None

    def fit(self) -> None:
        """Train, evaluate and save until the run ends. Called by all ranks."""
        with self.disks.counted(), explained_out_of_memory(self.run, self.grid):
            self.trainer.fit()

    def close(self) -> None:
        """Tell services of a run that fails, release captured graphs, end the lanes of what has left the device, and
        remove swap files unless a run may go on from them. Then nothing that rests off the device can be read any more.
        """
        self.trainer.log.abandon()
        if isinstance(self.trainer.engine, GraphedEngine):
            self.trainer.engine.release()
        self.state.model.tiers.close(remove=not self.trainer.whole_steps.kept)
        if self.activations is not None:
            self.activations.close()

    def report(self) -> None:
        """Close the log, generate the sample, and print it with the paths of the outputs. A collective of all ranks."""
        self.trainer.log.close(self.trainer.ending)
        text = sample_text(self.run, self.stages, self.state.model, self.grid, self.prepared.tokenizer)
        disks = self.disks.sentence(self.grid) if uses_files(self.run) or writes_activations(self.run) else None
        if self.grid.rank == 0:
            report(self.run, text, disks)


def build_job(
    prepared: Prepared,
    grid: ProcessGrid,
    signals: StopSignals | None = None,
    parsed: ParsedArguments | None = None,
    callbacks: Callbacks | None = None,
) -> Job:
    """Create all parts of a run on this rank and fill them from a checkpoint, other weights or the seed.

    A collective of all ranks; rank 0 prints the banner. signals: requests to stop. parsed: the user's settings and
    notes for the banner; None for a run that a program made. callbacks: functions of the program on this rank. Raises
    ConfigError if an output cannot be written, and what `resume` raises.
    """
    signals = signals or StopSignals()
    announce_kernels(grid)
    prepared = replace(prepared, resolved=resolved_on_all_ranks(prepared.resolved, grid, prepared.local_world_size))
    run = prepared.run
    memory = host_memory_of(run, grid)  # before anything of the model is allocated
    keep_budgets(run, grid)
    with ExitStack() as opened:  # swap files, which are removed if a later part fails
        opened.enter_context(explained_out_of_memory(run, grid))
        plans, nccl = prepared.datasets.train.plans, grid.world.is_on_device
        owner = RunSteps(run, grid.axes, grid.rank, prepared.resumed, plans, nccl)
        files = opened.enter_context(state_files(run, grid, owner, signals))
        activation_files = opened.enter_context(activation_files_of(run, grid, signals))
        # On the meta device: the model state allocates its columns, and parameters are views of these.
        stages = build_stages(run, grid, recompute_of_all_ranks(run, grid), allocate=False)
        state = build_state(run, grid, stages, None if files is None else files.open)
        swap_start = None if files is None else files.start
        engines = build_engines(run, grid, stages, state.model, activation_files, memory)
        batches = batches_of(run, prepared.datasets, grid, validation_samples(run))
        checkpoints = claim_checkpoints(run, grid, state.optimizer, prepared.resumed)
        deadline = deadline_of(run)  # counted from here, when the kernels are compiled
        start = resume(run, state, checkpoints, engines.probe, grid, swap_start)
        # State on disks would all be read for this, as in a step. Whether there is a checkpoint is asked of `resume`,
        # where ranks agree: this rank alone may have seen one, or none, before.
        if start.is_read and not uses_files(run):
            require_finite_weights(run, grid, state)
        program = None if callbacks is None else CallbackSink(callbacks, signals)
        stores = [*state.model.tiers.stores.values()]
        if activation_files is not None:
            stores.append(activation_files.store)
        log = begin_log(prepared, grid, engines.steps, start, checkpoints, parsed, program)
        for backend in backends(run, state.model.tiers.stores, activation_files):
            log.note(backend)
        record = record_of(prepared, grid, state, engines.probe)
        save_policy = save_policy_of(run, checkpoints, record, log, program)
        whole_steps = WholeSteps(state.model, swap_start, late=run.parallel.late_update)
        engine = with_graphs(engines.training, state.model.reducer, run, grid)
        trainer = Trainer(
            run, grid, engine, state, batches, log, save_policy, start.position, deadline, signals, whole_steps, memory
        )
        return Job(
            run,
            prepared,
            grid,
            stages,
            state,
            checkpoints,
            engines.probe,
            trainer,
            FileUse(stores),
            engines.activations,
        )


@dataclass(frozen=True)
class Engines:
    """What runs the lists of a rank.

    training     the engine of training steps and evaluations
    probe        the engine of a checkpoint's probe, of one sample a micro-batch
    steps        the lists of the steps of all stages
    activations  the activations that leave the device; None where all stay
    """

    training: PipelineEngine
    probe: PipelineEngine
    steps: StageLists
    activations: HostActivations | None


def build_engines(
    run: Run,
    grid: ProcessGrid,
    stages: list[Stage],
    model: ModelState,
    activation_files: ActivationDisks | None,
    memory: HostMemory,
) -> Engines:
    """The engines of this rank. activation_files: where activations go from host memory. Communicates nothing."""
    channels = Channels(grid, and_back=chunks_of(run).and_back)  # of both engines: making them is a collective
    lists = step_lists(run, grid.at.pp, with_kept(model.shape, run, grid.axes, grid.at.pp))
    steps = StageLists(run, grid.axes, nccl=grid.world.is_on_device)
    if grid.rank == 0:  # the lists of all stages are arithmetic, and the same on every rank
        steps.check()
    activations = host_activations(run, grid.device, activation_files)
    parts = run, grid, stages, channels, lists, model.actions
    return Engines(
        build_engine(*parts, activations, computed=memory.computed),
        build_engine(*parts, micro_batch_size=1),
        steps,
        activations,
    )


def begin_log(
    prepared: Prepared,
    grid: ProcessGrid,
    steps: StageLists,
    start: StartPoint,
    checkpoints: Checkpoints,
    parsed: ParsedArguments | None,
    program: CallbackSink | None,
) -> StepLog:
    """The log of the run's steps, begun with the banner. A collective of all ranks, as `introduce`.

    program: the sink of the program's functions. Raises ConfigError if an output cannot be opened.
    """
    run = prepared.run
    sinks = sinks_of(run, grid, start.position, checkpoints.fence)  # what is wrong with one is said before the banner
    traced = trace_of_run(steps, grid)
    introduce(run, grid, steps, prepared, start, checkpoints.fence, parsed)
    log = step_log(run, grid, sinks if program is None else [*sinks, program], run_rates(run, grid))
    if traced is not None:
        log.note(traced)
    return log


def save_policy_of(
    run: Run,
    checkpoints: Checkpoints,
    record: Callable[[TrainingPosition], dict[str, Any]],
    log: StepLog,
    program: CallbackSink | None,
) -> SavePolicy | None:
    """How the run saves; None: it saves nothing. record: the `progress` of a checkpoint at a position."""
    # A question to the run and not to this rank's state: a stage may have none of the units that rest on disks, and all
    # ranks have to save alike.
    in_background = run.checkpoint.async_save and not uses_files(run)
    if in_background:
        copies = size(checkpoints.reserve())
        log.note(f"--async-save: {copies} of host memory on this rank hold the copy that is written")
    elif run.checkpoint.async_save:
        why = "because the model state rests outside memory and is not copied"
        log.note(f"--async-save: training waits for saves, {why}")
    on_saved = None if program is None else program.saved
    policy = SavePolicy(checkpoints, record, log.note, in_background=in_background, on_saved=on_saved)
    return policy if run.checkpoint.save else None


def record_of(
    prepared: Prepared, grid: ProcessGrid, state: TrainState, probe: PipelineEngine
) -> Callable[[TrainingPosition], dict[str, Any]]:
    """A function from a position to its checkpoint's `progress`: counters, order of samples and probe.

    All ranks call that function together, because the probe is a collective.
    """
    return lambda position: {
        **state.record(position),
        "data_plans": [list(plan) for plan in prepared.datasets.train.plans],
        "data_contents": [list(numbers) for numbers in prepared.contents],
        "probe": stored_probe(prepared.run, probe, grid),
    }


def deadline_of(run: Run) -> float | None:
    """`time.monotonic()` at which a run that begins now saves and stops; None: no limit."""
    minutes = run.trainer.exit_duration_in_mins
    return None if minutes is None else time.monotonic() + 60 * minutes
