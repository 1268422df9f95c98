"""Swap files of a run on this rank, for model state and for activations. They are opened before all else is built."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megazero.checkpoint.agreement import attempt_on_all_ranks
from megazero.checkpoint.fence import new_token
from megazero.config.derive import tiers, uses_disks, whole_steps, writes_activations
from megazero.config.placement import as_flags
from megazero.config.schema import Run
from megazero.disk.opening import open_swap, remove_unused
from megazero.disk.swap import SwapSpace
from megazero.disk.swap_file import CHECKPOINT
from megazero.mpu import collectives
from megazero.mpu.grid import ProcessGrid
from megazero.pipeline.kept_disks import ActivationDisks
from megazero.plan.step_lists import StageLists
from megazero.telemetry.units import size
from megazero.telemetry.watchdog import StopSignals
from megazero.train.logs import as_config_error
from megazero.train.prepare import Prepared
from megazero.train.whole_steps import SwapStart, swap_start

DAY = 86_400
"""Seconds."""


class StateDisks:
    """The swap files of a run's model state on this rank.

    token    the name of the job's files, the same on all ranks
    leaving  called if a signal ends the process before the first step
    spaces   the files, once `open` has opened them
    start    with --nvme-checkpoint where the files lead, once `open` knows
    """

    def __init__(self, run: Run, grid: ProcessGrid, prepared: Prepared, signals: StopSignals) -> None:
        self.run, self.grid, self.prepared, self.leaving = run, grid, prepared, signals.leaving
        self.token = new_token(grid.world, grid.device)[:12]
        self.spaces: list[SwapSpace] = []
        self.start: SwapStart | None = None

    def open(self, pieces: Mapping[str, int]) -> SwapSpace | None:
        """The files with these pieces, by name their bytes; None without any.

        A collective of the world: what `swap_start` communicates, and an agreement on whether all ranks have opened
        theirs. Raises ConfigError on all ranks if one has not.
        """
        folders = [Path(folder) for folder in self.run.offload.nvme_path]
        with as_config_error(f"--nvme-path {' '.join(self.run.offload.nvme_path)}"):
            if whole_steps(self.run.offload):
                plans = self.prepared.datasets.train.plans
                self.start = swap_start(self.run, self.grid, pieces, self.token, self.prepared.resumed, plans)
            attempt_on_all_ranks(self.grid.world, self.grid.device, lambda: self._open(folders, pieces))
        return self.spaces[0] if self.spaces else None

    def _open(self, folders: Sequence[Path], pieces: Mapping[str, int]) -> None:
        job, rank = self.token if self.start is None else CHECKPOINT, self.grid.rank
        # Before the files are made: a signal may end the process while they are.
        self.leaving.append(lambda: remove_unused(folders, job, rank))
        if pieces and self.start is not None:
            self.spaces.append(self.start.opened(folders, pieces, rank))
        elif pieces:
            self.spaces.append(open_swap(folders, pieces, job=job, rank=rank, slots=1))


@contextmanager
def state_disks(run: Run, grid: ProcessGrid, prepared: Prepared, signals: StopSignals) -> Iterator[StateDisks | None]:
    """A context with the swap files of a run's model state, which the model state opens; None where nothing of it rests
    on disks. If the block fails, or a signal ends the process before the first step, files without a whole step are
    removed.

    Where some of the state goes to disks, entering is a collective of the world: a broadcast of `StateDisks.token`.
    """
    if not uses_disks(run):
        yield None
        return
    disks = StateDisks(run, grid, prepared, signals)
    try:
        yield disks
    except BaseException:
        for space in disks.spaces:
            space.close(remove=space.record is None)
        raise


def swap_backends(run: Run, state: SwapSpace | None, activations: SwapSpace | None) -> list[str]:
    """By which way bytes move to the disks of the model state and of activations, with the flags that ask for it."""
    on_disks = {field: offload for field, offload in tiers(run).items() if offload.on_disks}
    flags = as_flags(on_disks), f"--offload-activations {run.offload.offload_activations}"
    return [f"{flag}: {swap.backend}" for flag, swap in zip(flags, (state, activations), strict=True) if swap]


@dataclass
class DiskUse:
    """What a rank writes to disks while it trains. swaps: its files; None: it has none of a kind."""

    swaps: Sequence[SwapSpace | None]
    seconds: float = 0.0
    written: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A context whose time and writes count."""
        before, begin = self._written(), time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - begin
            self.written += self._written() - before

    def _written(self) -> int:
        return sum(swap.bytes_written for swap in self.swaps if swap is not None)

    def sentence(self, grid: ProcessGrid) -> str:
        """What all ranks have written, also per day at this rate. A collective of the world: an all-reduce."""
        every = torch.tensor([float(self.written)], dtype=torch.float64, device=grid.device)
        collectives.all_reduce(every, grid.world).wait()
        return written_sentence(int(every.item()), self.seconds)


@contextmanager
def activation_disks(run: Run, grid: ProcessGrid, signals: StopSignals) -> Iterator[ActivationDisks | None]:
    """A context with this rank's swap files for activations; None where it writes none. If its block fails, or a signal
    ends the process before the first step, they are removed.

    Where activations go to disks, entering is a collective of the world: a broadcast of the name of the job's files,
    and an agreement on whether all ranks have opened theirs. Raises ConfigError on all ranks if one has not.
    """
    if not writes_activations(run):
        yield None
        return
    swapped = StageLists(run, grid.axes, nccl=grid.world.is_on_device).activations(grid.at.pp)
    token, opened = new_token(grid.world, grid.device)[:12], list[ActivationDisks]()
    folders = [Path(folder) for folder in run.offload.nvme_path]

    def act() -> None:
        if swapped.count:
            signals.leaving.append(lambda: remove_unused(folders, token, grid.rank))
            swap = open_swap(folders, swapped.pieces, job=token, rank=grid.rank, slots=1)
            opened.append(ActivationDisks.of(swap, swapped.buffer_bytes, swapped.pieces))

    try:
        with as_config_error(f"--nvme-path {' '.join(run.offload.nvme_path)}"):
            attempt_on_all_ranks(grid.world, grid.device, act)
        yield opened[0] if opened else None
    except BaseException:
        for disks in opened:
            disks.swap.close(remove=True)
        raise


def written_sentence(written: int, seconds: float) -> str:
    """What a run has written to disks, and would write in a day. seconds: how long it has trained."""
    a_day = f", which is {size(written / seconds * DAY)} a day" if seconds else ""
    return f"{size(written)} written to disks{a_day}"
