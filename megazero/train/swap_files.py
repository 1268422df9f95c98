"""Files of a run on this rank, for model state and for activations. They are opened before all else is built."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

from megazero.checkpoint.agreement import attempt_on_all_ranks
from megazero.checkpoint.fence import new_token
from megazero.config.derive import folders_of, tiers, uses_files, whole_steps, writes_activations
from megazero.config.placement import as_flags
from megazero.config.schema import Run
from megazero.config.tiers import FILE_TIERS, Tier
from megazero.disk import plain_files
from megazero.disk.opening import open_swap, remove_unused
from megazero.disk.plain_files import open_files
from megazero.disk.store import Store
from megazero.disk.swap import SwapSpace
from megazero.disk.swap_file import CHECKPOINT
from megazero.mpu import collectives
from megazero.mpu.grid import ProcessGrid
from megazero.pipeline.kept_disks import ActivationDisks
from megazero.plan.step_lists import StageLists
from megazero.telemetry.units import size
from megazero.telemetry.watchdog import StopSignals
from megazero.train.logs import as_config_error
from megazero.train.requirements import flag_of
from megazero.train.whole_steps import StepOwner, SwapStart, swap_start

DAY = 86_400
"""Seconds."""


class StoreKind(NamedTuple):
    """How the files of a tier are made, that a run needs until its end.

    open           the files of a rank, from folders, bytes of pieces by name, a word for the names of the files that no
                   other run has (`job`), and the `rank`; of a tier that goes back also names of pieces that keep
                   their content before a write (`again`). Raises DiskError
    remove_unused  those files, from folders, job and rank, where a signal ends the process before the first step
    """

    open: Callable[..., Store]
    remove_unused: Callable[[Sequence[Path], str, int], None]


def _swap(
    folders: Sequence[Path], pieces: Mapping[str, int], *, job: str, rank: int, again: Collection[str] = ()
) -> Store:
    return open_swap(folders, pieces, job=job, rank=rank, slots=1, again=again)


KINDS: Mapping[Tier, StoreKind] = MappingProxyType(
    {Tier.DISK: StoreKind(_swap, remove_unused), Tier.FILES: StoreKind(open_files, plain_files.remove_unused)}
)


def _named(run: Run, tier: Tier) -> str:
    """The flag that names the folders of a tier, with them."""
    return f"{flag_of(tier)} {' '.join(folders_of(run.offload, tier))}"


def _paths(run: Run, tier: Tier) -> list[Path]:
    return [Path(folder) for folder in folders_of(run.offload, tier)]


class StateFiles:
    """The files of a run's model state on this rank.

    owner     what a whole step has to fit; None: no step becomes whole on disks
    token     a word for the names of the job's files, the same on all ranks
    leaving   called if a signal ends the process before the first step
    stores    the files by tier, once `open` has opened them
    start     with --nvme-checkpoint where the swap files lead, once `open` knows
    """

    def __init__(self, run: Run, grid: ProcessGrid, owner: StepOwner | None, signals: StopSignals) -> None:
        self.run, self.grid, self.owner, self.leaving = run, grid, owner, signals.leaving
        self.token = new_token(grid.world, grid.device)[:12]
        self.stores: dict[Tier, Store] = {}
        self.start: SwapStart | None = None

    def open(self, pieces: Mapping[Tier, Mapping[str, int]], again: Collection[str]) -> Mapping[Tier, Store]:
        """The files with these pieces, by tier and name their bytes; none of a tier without any. again: names of those
        that keep their content before a write.

        A collective of the world: what `swap_start` communicates, and for each tier of the run an agreement on whether
        all ranks have opened theirs. Raises ConfigError on all ranks if one has not.
        """
        used = {offload.tier for offload in tiers(self.run).values()}
        for tier in (tier for tier in FILE_TIERS if tier in used):
            with as_config_error(_named(self.run, tier)):
                of_tier = pieces.get(tier, {})
                if tier is Tier.DISK and whole_steps(self.run.offload):
                    assert self.owner is not None, "whole steps are of a loop that goes on from them"
                    self.start = swap_start(self.owner, self.grid, of_tier, self.token)
                opens = partial(self._open, tier, of_tier, again)
                attempt_on_all_ranks(self.grid.world, self.grid.device, opens)
        return self.stores

    def _open(self, tier: Tier, pieces: Mapping[str, int], again: Collection[str]) -> None:
        folders, rank, whole = _paths(self.run, tier), self.grid.rank, self.start if tier is Tier.DISK else None
        job = self.token if whole is None else CHECKPOINT
        # Before the files are made: a signal may end the process while they are.
        self.leaving.append(lambda: KINDS[tier].remove_unused(folders, job, rank))
        if pieces and whole is not None:
            self.stores[tier] = whole.opened(folders, pieces, rank, again)
        elif pieces:
            keeps = {"again": again} if tier.goes_back else {}
            self.stores[tier] = KINDS[tier].open(folders, pieces, job=job, rank=rank, **keeps)


@contextmanager
def state_files(
    run: Run, grid: ProcessGrid, owner: StepOwner | None, signals: StopSignals
) -> Iterator[StateFiles | None]:
    """A context with the files of a run's model state, which the model state opens; None where nothing of it rests in
    files. If the block fails, or a signal ends the process before the first step, files without a whole step are
    removed.

    Where some of the state goes to files, entering is a collective of the world: a broadcast of `StateFiles.token`.
    """
    if not uses_files(run):
        yield None
        return
    files = StateFiles(run, grid, owner, signals)
    try:
        yield files
    except BaseException:
        for store in files.stores.values():
            store.close(remove=not (isinstance(store, SwapSpace) and store.record))
        raise


def backends(run: Run, stores: Mapping[Tier, Store], activations: ActivationDisks | None) -> list[str]:
    """By which way bytes move to the files of the model state and of activations, with the flags that ask for it."""
    ways = list[str]()
    for tier, store in stores.items():
        there = {field: offload for field, offload in tiers(run).items() if offload.tier is tier}
        ways.append(f"{as_flags(there)}: {store.backend}")
    if activations is not None:
        ways.append(f"--offload-activations {run.offload.offload_activations}: {activations.store.backend}")
    return ways


@dataclass
class FileUse:
    """What a rank writes to files while it trains. stores: its files."""

    stores: Sequence[Store]
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
        return sum(store.bytes_written for store in self.stores)

    def sentence(self, grid: ProcessGrid) -> str:
        """What all ranks have written, also per day at this rate. A collective of the world: an all-reduce."""
        every = torch.tensor([float(self.written)], dtype=torch.float64, device=grid.device)
        collectives.all_reduce(every, grid.world).wait()
        return written_sentence(int(every.item()), self.seconds)


@contextmanager
def activation_files_of(run: Run, grid: ProcessGrid, signals: StopSignals) -> Iterator[ActivationDisks | None]:
    """A context with this rank's files for activations; None where it writes none. If its block fails, or a signal
    ends the process before the first step, they are removed.

    Where activations go to files, entering is a collective of the world: a broadcast of the name of the job's files,
    and an agreement on whether all ranks have opened theirs. Raises ConfigError on all ranks if one has not.
    """
    if not writes_activations(run):
        yield None
        return
    swapped = StageLists(run, grid.axes, nccl=grid.world.is_on_device).activations(grid.at.pp)
    token, opened = new_token(grid.world, grid.device)[:12], list[ActivationDisks]()
    tier = run.offload.offload_activations.tier
    folders = _paths(run, tier)

    def act() -> None:
        if swapped.count:
            signals.leaving.append(lambda: KINDS[tier].remove_unused(folders, token, grid.rank))
            store = KINDS[tier].open(folders, swapped.pieces, job=token, rank=grid.rank)
            opened.append(ActivationDisks.of(store, swapped.buffer_bytes, swapped.pieces))

    try:
        with as_config_error(_named(run, tier)):
            attempt_on_all_ranks(grid.world, grid.device, act)
        yield opened[0] if opened else None
    except BaseException:
        for disks in opened:
            disks.store.close(remove=True)
        raise


def written_sentence(written: int, seconds: float) -> str:
    """What a run has written to disks, and would write in a day. seconds: how long it has trained."""
    a_day = f", which is {size(written / seconds * DAY)} a day" if seconds else ""
    return f"{size(written)} written to disks{a_day}"
