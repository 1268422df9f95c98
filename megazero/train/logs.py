"""The records of a run's steps: log lines, the metrics file, TensorBoard, other sinks, and callbacks of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
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
from megazero.plan.flops import recomputed_flops, step_flops
from megazero.plan.recompute import recompute_table
from megazero.system import device as devices
from megazero.telemetry.logline import LogLines
from megazero.telemetry.record import NoSink, Rates, Sink, StepRecord
from megazero.telemetry.sinks import SinkContext, named_places, open_sinks
from megazero.telemetry.steplog import StepLog
from megazero.telemetry.watchdog import StopSignals
from megazero.train.state import TrainingPosition


@contextmanager
def as_config_error(flag: str) -> Iterator[None]:
    """Raise an OSError, CheckpointError or NoSink of the block as a ConfigError of this flag.

    For the first write to a folder or file: if it fails, the configuration is wrong.
    """
    try:
        yield
    except (OSError, CheckpointError, NoSink) as error:
        raise ConfigError([f"{flag}: {error}"]) from error


def run_rates(run: Run, grid: ProcessGrid) -> Rates:
    """What a run's seconds become rates by."""
    peak = devices.peak_flops(grid.device, compute_dtype(run.optimizer.precision))
    again = recomputed_flops(run.model, 1, recompute_table(run, grid.axes, grid.device.type))
    return Rates(float(step_flops(run)), run.model.seq_length, grid.axes.world_size, peak, float(again))


def step_log(run: Run, grid: ProcessGrid, sinks: list[Sink], rates: Rates) -> StepLog:
    """The log of a run's steps, which writes to these sinks. All ranks make one; its peak memory is an all-reduce."""

    def peak_memory() -> int:
        most = torch.tensor([devices.peak_memory_bytes(grid.device)], dtype=torch.float64, device=grid.device)
        collectives.all_reduce(most, grid.world, "max").wait()
        return int(most.item())

    return StepLog(sinks, rates, peak_memory, run.trainer.log_interval)


def sinks_of(
    run: Run, grid: ProcessGrid, position: TrainingPosition, fence: Fence | None, *, of_samples: bool = False
) -> list[Sink]:
    """The sinks of rank 0; the other ranks have none. A collective of all ranks, which fail together.

    of_samples: whether log lines say samples where they say tokens else, and no FLOPs, of which nobody knows

    Raises ConfigError if an output cannot be opened.
    """
    lines, opened = _log_lines(run, of_samples), list[Sink]()
    opening = SinkContext(run, position.iteration + 1, fence.check if fence else None, lines.note)
    places = named_places(run)
    if places:
        with as_config_error(" ".join(f"{flag} {place}" for flag, place in places.items())):
            work = (lambda: opened.extend(open_sinks(opening))) if grid.rank == 0 else None
            attempt_on_all_ranks(grid.world, grid.device, work)
    # Log lines come last: if the terminal is gone and writing them fails, the other sinks have the numbers already.
    return [*opened, lines] if grid.rank == 0 else []


def _log_lines(run: Run, of_samples: bool) -> LogLines:
    total = StepPlan(run.schedule).total_iterations
    assert total is not None
    minutes = run.trainer.exit_duration_in_mins
    return LogLines(
        total,
        fp16=run.optimizer.precision == "fp16",
        interval=run.trainer.log_interval,
        seconds_to_deadline=None if minutes is None else 60 * minutes,
        of_samples=of_samples,
    )


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
