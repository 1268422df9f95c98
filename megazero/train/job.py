"""A job on this rank: `build_job` creates the parts of a run and fills their state; `Job.fit` trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megazero.checkpoint.manager import Checkpoints
from megazero.config.derive import uses_disks
from megazero.config.parse import ParsedArguments
from megazero.config.schema import Run
from megazero.model.stage import Stage
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.p2p import Channels
from megazero.optim.loss_scale import LossScaler
from megazero.pipeline.build import build_engine, build_stages, host_activations, step_lists, with_graphs
from megazero.pipeline.engine import PipelineEngine
from megazero.pipeline.graphs import GraphedEngine
from megazero.pipeline.kept import HostActivations
from megazero.pipeline.kept_disks import ActivationDisks
from megazero.pipeline.stage_specs import chunks_of
from megazero.plan.kept import with_kept
from megazero.plan.leaving_disks import writes_activations
from megazero.plan.step_lists import StageLists
from megazero.system.allocator import return_large
from megazero.telemetry.units import size
from megazero.telemetry.watchdog import StopSignals
from megazero.train.arguments import Callbacks, CallbackSink
from megazero.train.batches import batches_of
from megazero.train.bodies import recompute_of_all_ranks
from megazero.train.host_memory import HostMemory, host_memory_of
from megazero.train.introduction import announce_kernels, introduce
from megazero.train.logs import sinks_of, step_log
from megazero.train.offload import DiskUse, activation_disks, backend_sentence, offloading
from megazero.train.predicted_memory import keep_budgets, trace_of_run
from megazero.train.prepare import Prepared
from megazero.train.report import report, sample_text
from megazero.train.resolved_together import resolved_on_all_ranks
from megazero.train.resume import resume, stored_probe
from megazero.train.save_policy import SavePolicy, claim_checkpoints
from megazero.train.standstill import require_finite_weights
from megazero.train.state import TrainingPosition, TrainState
from megazero.train.swap_start import SwapStart, WholeSteps
from megazero.train.trainer import Trainer
from megazero.zero.coded import coding_of
from megazero.zero.offload import Offloading
from megazero.zero.optimizer import ShardedOptimizer
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
    disks: DiskUse
    activations: HostActivations | None

    def fit(self) -> None:
        """Train, evaluate and save until the run ends. Called by all ranks."""
        with self.disks.counted():
            self.trainer.fit()

    def close(self) -> None:
        """Release captured graphs, end the lanes of what has left the device, and remove swap files unless a run may go
        on from them. Then nothing that rests off the device can be read any more.
        """
        if isinstance(self.trainer.engine, GraphedEngine):
            self.trainer.engine.release()
        self.state.model.host.close(remove=not self.trainer.whole_steps.kept)
        if self.activations is not None:
            self.activations.close()

    def report(self) -> None:
        """Close the log, generate the sample, and print it with the paths of the outputs. A collective of all ranks."""
        self.trainer.log.close()
        text = sample_text(self.run, self.stages, self.state.model, self.grid, self.prepared.tokenizer)
        disks = self.disks.sentence(self.grid) if uses_disks(self.run) or writes_activations(self.run) else None
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
    program = [] if callbacks is None else [CallbackSink(callbacks, signals)]
    announce_kernels(grid)
    prepared = replace(prepared, resolved=resolved_on_all_ranks(prepared.resolved, grid, prepared.here))
    run = prepared.run
    if uses_disks(run) and grid.device.type == "cpu":
        return_large()
    memory = host_memory_of(run, grid)
    keep_budgets(run, grid)
    with (
        offloading(run, grid, prepared, signals) as (offloaded, swapped),
        activation_disks(run, grid, signals) as activations,
    ):
        return _build(prepared, grid, signals, parsed, program, offloaded, swapped, activations, memory)


def _build(
    prepared: Prepared,
    grid: ProcessGrid,
    signals: StopSignals,
    parsed: ParsedArguments | None,
    program: Sequence[CallbackSink],
    offloaded: Offloading,
    swapped: SwapStart | None,
    disks: ActivationDisks | None,
    memory: HostMemory,
) -> Job:
    """`build_job` of a run that is resolved to its end. program: the sink of its functions. offloaded: what
    leaves the device. swapped: where its swap files lead. disks: where activations go from host memory. memory: what
    keeps the heap small.
    """
    run = prepared.run
    stages = build_stages(run, grid, recompute_of_all_ranks(run, grid), allocate=False)
    model = ModelState(stages, grid, run.optimizer, run.parallel, coding_of(run.lora, run.model), offloaded)
    optimizer = ShardedOptimizer(model, run.optimizer, grid)
    state = TrainState(model, optimizer, LossScaler(run.optimizer, grid.device), stages[0].layout.fp8)
    channels = Channels(grid, and_back=chunks_of(run).and_back)
    lists = step_lists(run, grid.at.pp, with_kept(model.shape, run, grid.axes, grid.at.pp))
    steps = StageLists(run, grid.axes, nccl=grid.world.is_on_device)
    if grid.rank == 0:
        steps.check()
    activations = host_activations(run, grid.device, disks)
    engine = build_engine(run, grid, stages, channels, lists, model.actions, activations, computed=memory.computed)
    probe_engine = build_engine(run, grid, stages, channels, lists, model.actions, micro_batch_size=1)
    batches = batches_of(run, prepared.datasets, grid)
    checkpoints = claim_checkpoints(run, grid, optimizer, prepared.found)
    minutes = run.trainer.exit_duration_in_mins  # counted from here, when the kernels are compiled
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    start = resume(run, state, checkpoints, probe_engine, grid, swapped)
    if (run.checkpoint.init_from or prepared.found) and not uses_disks(run):  # else all of the disks would be read
        require_finite_weights(run, grid, state)
    sinks = sinks_of(run, grid, start.position, checkpoints.fence)  # what is wrong with one is said before the banner
    traced = trace_of_run(steps, grid)
    introduce(run, grid, steps, prepared, start, checkpoints.fence, parsed)
    log = step_log(run, grid, [*sinks, *program])
    if model.host.swap is not None:
        log.note(backend_sentence(run, model.host.swap))
    if disks is not None:
        log.note(f"--offload-activations {run.offload.offload_activations}: {disks.swap.backend}")
    if traced is not None:
        log.note(traced)
    # The same on all ranks: a stage may have none of the units that rest on disks.
    in_background = run.checkpoint.async_save and not uses_disks(run)
    if run.checkpoint.async_save:
        log.note(_about_copies(size(checkpoints.reserve()) if in_background else None))
    record = _record_of(run, prepared, grid, state, probe_engine)
    on_saved = program[0].saved if program else None
    save_policy = SavePolicy(checkpoints, record, log.note, in_background=in_background, on_saved=on_saved)
    trainer = Trainer(
        run,
        grid,
        with_graphs(engine, model.actions, run, grid),
        state,
        batches,
        log,
        save_policy if run.checkpoint.save else None,
        start.position,
        deadline,
        signals,
        WholeSteps(model.host, swapped, late=run.parallel.late_update),
        memory,
    )
    use = DiskUse([model.host.swap, None if disks is None else disks.swap])
    return Job(run, prepared, grid, stages, state, checkpoints, probe_engine, trainer, use, activations)


def _about_copies(held: str | None) -> str:
    """A line about --async-save. held: the memory of its copies; None where the model state is too large for one."""
    if held is None:
        return "--async-save: training waits for saves, because the model state rests outside memory and is not copied"
    return f"--async-save: {held} of host memory on this rank hold the copy that is written"


def _record_of(
    run: Run, prepared: Prepared, grid: ProcessGrid, state: TrainState, probe_engine: PipelineEngine
) -> Callable[[TrainingPosition], dict[str, Any]]:
    """A function from a position to its checkpoint's `progress`: counters, order of samples and probe.

    All ranks call that function together, because the probe is a collective.
    """
    return lambda position: {
        **state.record(position),
        "data_plans": [list(plan) for plan in prepared.datasets.train.plans],
        "data_contents": [list(numbers) for numbers in prepared.contents],
        "probe": stored_probe(run, probe_engine, grid),
    }
