"""The memory of a run. Before the first step it is predicted, for the budgets of a card and the file of --memory-trace.
While the run trains, the host's heap is kept small. Where a device has no memory left, the error says what was
predicted, what was reached and what fits.

Memory that a step frees is kept for the next one, because new pages are slow. But a heap has holes: a tensor that is
freed between two that live leaves room that a larger tensor cannot use. (As torch allocates, not even one of its own
size could: `fused_ops/csrc/torch/host_tensors.cpp`.) Where parameters come and go for every unit, between activations
that stay, the holes of a step were half as much again as its tensors. So a run that keeps something on disks, because
memory is short, returns its free memory as soon as it holds more than its account says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from megazero.checkpoint.agreement import attempt_on_all_ranks, found_by_rank_0
from megazero.config.derive import keeps_account, uses_files, writes_activations
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.mpu.grid import ProcessGrid
from megazero.plan.budgets import has_budgets, memory_problems, what_fits
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import rank_words, run_memories
from megazero.plan.step_times import ASSUMED, read_rates, timed_traces
from megazero.report.trace_files import write
from megazero.system import device as devices
from megazero.system.allocator import return_large
from megazero.system.host_memory import KEPT_HOLES, is_short
from megazero.telemetry.units import size
from megazero.train.logs import as_config_error


def keep_budgets(run: Run, grid: ProcessGrid) -> None:
    """On a card: refuse a run that is above its budgets, on all ranks, and make the device's budget the limit of
    torch's allocator. Nothing may be allocated yet.

    Elsewhere a run has been refused before any process group exists (`requirements.budget_problems`): what attention
    keeps depends on its body, which is tried on the rank's own card. A collective of the world: `found_by_rank_0`.
    """
    if grid.device.type == "cpu" or not (has_budgets(run) or writes_activations(run)):
        return
    world, kind = grid.world, grid.device.type
    if problems := found_by_rank_0(world, grid.device, lambda: memory_problems(run, world.size, kind)):
        raise ConfigError(problems)
    if run.offload.device_memory_budget is not None:
        devices.limit_memory(grid.device, run.offload.device_memory_budget)


def write_memory_trace(steps: StageLists, kind: str) -> str | None:
    """Write the file of --memory-trace, the memory of a step, and return a sentence on it; None without the flag.

    kind: as in `plan.step_memory.StageMemory`. Times are at the rates of --placement-rates, or at assumed ones. Raises
    ConfigError if the file cannot be written.
    """
    if steps.run.trainer.memory_trace is None:
        return None
    path, rates_file = Path(steps.run.trainer.memory_trace), steps.run.offload.placement_rates
    traces = timed_traces(steps, kind, ASSUMED[kind] if rates_file is None else read_rates(rates_file))
    with as_config_error("--memory-trace"):
        files = write(traces, path)
    peak, assumed = traces[0].peak, ""
    if rates_file is None and path.suffix == ".html":
        assumed = "; its times are at assumed rates: --placement-rates has yours"
    return (
        f"{', '.join(map(str, files))}: the tensors of a step take {size(peak.total)} at most by arithmetic, on "
        f"{traces[0].rank} during number {peak.number} of its list, {peak.instruction}{assumed}"
    )


def trace_of_run(steps: StageLists, grid: ProcessGrid) -> str | None:
    """`write_memory_trace` on rank 0, which gets the sentence. With the flag a collective of all ranks, which fail
    together.
    """
    if steps.run.trainer.memory_trace is None:
        return None
    write_here = partial(write_memory_trace, steps, grid.device.type) if grid.rank == 0 else None
    sentence: str | None = attempt_on_all_ranks(grid.world, grid.device, write_here)
    return sentence


GROWTH = 1.25
"""Free memory of the host's allocator is returned to the system when a rank's resident set exceeds its size after the
second step by this factor, or when the host's memory is short.
"""


class HostMemory:
    """Keeps the host's heap from growing without limit. Made before anything of the model is allocated.

    account: most bytes of the model state and of a step in this process, where free memory is returned within steps
    too; None: between steps only
    """

    def __init__(self, device: torch.device, account: int | None = None) -> None:
        self._device, self._usual = device, 0
        self.computed: Callable[[], None] | None = None if account is None else self._keep_account
        """What follows each computation of a step."""
        if account is not None:
            devices.return_free_memory(self._device)  # or what was freed before would count as room
            self._most = devices.memory_bytes(self._device) + account

    def limit(self, steps: int) -> None:
        """Return free memory if too much is held, after this number of steps of the process."""
        if self._device.type != "cpu":
            return
        held = devices.memory_bytes(self._device)
        if steps <= 2:
            self._usual = held
        elif held > GROWTH * self._usual or is_short():
            devices.return_free_memory(self._device)

    def _keep_account(self) -> None:
        """Return free memory if more is held than the account. What stays is in use: the next return waits until a part
        more than that is held, or what libraries keep would have every computation begin with pages that are new.
        """
        if devices.memory_bytes(self._device) > self._most:
            devices.return_free_memory(self._device)
            self._most = max(self._most, int((1 + KEPT_HOLES) * devices.memory_bytes(self._device)))


def host_memory_of(run: Run, grid: ProcessGrid) -> HostMemory:
    """That of a run on this rank, before anything is allocated. On a CPU with something on disks the account is that of
    both tiers, which are one memory.
    """
    if grid.device.type != "cpu" or not keeps_account(run):
        return HostMemory(grid.device)
    if uses_files(run):
        return_large()
    peaks = run_memories(run, grid.axes, grid.device.type)[grid.at.pp].peaks
    return HostMemory(grid.device, peaks.total_bytes)


MARGIN = 0.96
"""Of the predicted bytes: a change has to take less, where the prediction had room and the run had not."""


class OutOfMemory(torch.OutOfMemoryError):
    """torch's error, with what was predicted of this rank, what was reached, and a change that fits."""


@contextmanager
def explained_out_of_memory(run: Run, grid: ProcessGrid) -> Iterator[None]:
    """A context in which a device that has no memory left is an OutOfMemory. Communicates nothing: other ranks may wait
    for this one.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        words = None
        with suppress(Exception):  # what is said of an error must not hide it
            words = out_of_memory_text(run, grid)
        if words is None:
            raise
        raise OutOfMemory(words) from error


def out_of_memory_text(run: Run, grid: ProcessGrid) -> str:
    """What was predicted of this rank's memory, what was reached, and what fits."""
    kind, stage = grid.device.type, grid.at.pp
    peaks = run_memories(run, grid.axes, kind)[stage].peaks
    predicted = peaks.total_bytes if kind == "cpu" else peaks.device_bytes
    reached, room = devices.peak_memory_bytes(grid.device), devices.room_bytes(grid.device) or predicted
    fitting = what_fits(run, grid.world.size, kind, min(room, round(MARGIN * predicted)), stage)
    return (
        f"rank {grid.rank}, {rank_words(stage, grid.axes)}, has no memory left. Predicted: its tensors take "
        f"{size(predicted)} at most, at {peaks.moment}. Reached: {size(reached)}, and the device has room for "
        f"{size(room)}. Take less; {fitting}"
    )
