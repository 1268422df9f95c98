"""What a run writes down of its steps, and where: the log, the metrics file, curves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megazero.checkpoint.agreement import attempt_on_all_ranks
from megazero.checkpoint.fence import Fence
from megazero.checkpoint.format import CheckpointError
from megazero.config.dtypes import compute_dtype
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.mpu import collectives
from megazero.mpu.grid import ProcessGrid
from megazero.optim.step_plan import StepPlan
from megazero.plan.flops import flops_again, step_flops
from megazero.system import device as devices
from megazero.telemetry.logline import LogLines
from megazero.telemetry.record import Rates, Sink
from megazero.telemetry.sinks import Opening, named_places, open_sinks
from megazero.telemetry.steplog import StepLog
from megazero.train.state import TrainingPosition


@contextmanager
def refused(flag: str) -> Iterator[None]:
    """What a folder or file answers to the first writing turns out to be: on every rank a mistake in the configuration,
    not a fault.
    """
    try:
        yield
    except (OSError, CheckpointError) as error:
        raise ConfigError([f"{flag}: {error}"]) from error


def step_log(run: Run, grid: ProcessGrid, sinks: list[Sink]) -> StepLog:
    """The log of a run's steps, told to these sinks. Called by all ranks."""
    peak = devices.peak_flops(grid.device, compute_dtype(run.optimizer.precision))
    rates = Rates(float(step_flops(run)), run.model.seq_length, grid.axes.world_size, peak, float(flops_again(run)))

    def peak_memory() -> int:
        most = torch.tensor([devices.peak_memory_bytes(grid.device)], dtype=torch.float64, device=grid.device)
        collectives.all_reduce(most, grid.world, "max").wait()
        return int(most.item())

    return StepLog(sinks, rates, peak_memory, run.trainer.log_interval)


def sinks_of(run: Run, grid: ProcessGrid, position: TrainingPosition, fence: Fence | None) -> list[Sink]:
    """Rank 0 shows and writes; the others have nothing to say. Called by all ranks, which fail together."""
    lines, opened = _log_lines(run), list[Sink]()
    opening = Opening(run, position.iteration + 1, fence.check if fence else None, lines.note)
    places = named_places(run)
    if places:
        with refused(" ".join(f"{flag} {place}" for flag, place in places.items())):
            work = (lambda: opened.extend(open_sinks(opening))) if grid.rank == 0 else None
            attempt_on_all_ranks(grid.world, grid.device, work)
    # Lines for people last: where their terminal is lost, programs still have their numbers.
    return [*opened, lines] if grid.rank == 0 else []


def _log_lines(run: Run) -> LogLines:
    total = StepPlan(run.schedule).total_iterations
    assert total is not None
    minutes = run.trainer.exit_duration_in_mins
    return LogLines(
        total,
        fp16=run.optimizer.precision == "fp16",
        interval=run.trainer.log_interval,
        seconds_to_deadline=None if minutes is None else 60 * minutes,
    )
