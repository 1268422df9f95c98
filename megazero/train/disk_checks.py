"""Checks of the folders of --nvme-path, before anything is started: whether files can be made there, and how large."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from megazero.config.derive import tiers, uses_disks, whole_steps
from megazero.config.placement import applied, as_flags
from megazero.config.schema import Run
from megazero.config.tiers import Offload, Tier
from megazero.disk.swap_file import free_bytes, leftover_bytes
from megazero.mpu.axes import Axes, axes_of
from megazero.plan.bytes import has_nccl
from megazero.plan.leaving_disks import activation_pieces, buffer_problems, writes_activations
from megazero.plan.offloaded import swap_file_bytes, swapped_pieces
from megazero.plan.step_lists import StageLists
from megazero.system import device as devices


def folder_problems(folders: Sequence[str]) -> list[str]:
    """Why swap files cannot be made in one of these folders, one sentence for each."""
    found = []
    for folder in folders:
        wrong = (
            "there is no such folder"
            if not os.path.lexists(folder)
            else "is no folder"
            if not os.path.isdir(folder)
            else "may not be written in"
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK)
            else ""
        )
        found += [f"--nvme-path {folder}: {wrong}"] * bool(wrong)
    return found


def room_problems(run: Run, world_size: int, here: range) -> list[str]:
    """A sentence if the swap files of the ranks `here` do not fit into the folders of --nvme-path, which these ranks
    share. Nothing if the vocabulary is not known.

    Files that ended processes have left there count as free: opening removes them. That the folders together have
    enough does not say that each has enough for its share, which their speed decides; opening its files says so.
    run: resolved, since the order of micro-batches decides how many activations are away at a time.
    """
    folders, axes = run.offload.nvme_path, axes_of(run, world_size)
    if not (uses_disks(run) or writes_activations(run)) or run.model.vocab_size is None:
        return []
    needed, free = swap_bytes(run, axes, here), free_in(folders, checkpoints=whole_steps(run.offload))
    if needed <= free:
        return []
    ranks = f"the {len(here)} ranks" if len(here) > 1 else "the rank"
    fits = _largest_that_fits(run, axes, here, free)
    nearest = f"; nearest: {as_flags(fits)}, or" if fits else ":"
    return [
        f"--nvme-path {' '.join(folders)}: the swap files of {ranks} here need {needed:,} bytes, and {free:,} are "
        f"free{nearest} a folder more, on another disk"
    ]


def _largest_that_fits(run: Run, axes: Axes, ranks: range, free: int) -> dict[str, Offload]:
    """By field the largest shares on disks that fit into `free` bytes, in hundredths, all reduced alike; none: even the
    smallest do not, or units are named. A share of parameters is of whole buckets, so the bytes do not grow evenly
    with it.
    """
    off = tiers(run)
    if any(offload.units for offload in off.values()):
        return {}  # what is named leaves as a whole
    on_disks = {field: offload.share for field, offload in off.items() if offload.on_disks}

    def reduced(percent: int) -> dict[str, Offload]:
        return {field: Offload(Tier.DISK, int(percent * share) / 100) for field, share in on_disks.items()}

    def needed(percent: int) -> int:
        return swap_bytes(applied(run, reduced(percent)), axes, ranks)

    shares = [percent for percent in range(1, 100) if all(int(percent * share) for share in on_disks.values())]
    fitting = bisect_right(shares, free, key=needed)
    return reduced(shares[fitting - 1]) if fitting else {}


def swap_bytes(run: Run, axes: Axes, ranks: Iterable[int]) -> int:
    """The bytes of the swap files of these ranks."""
    of_stage, total = dict[int, int](), 0
    for rank in ranks:
        at = axes.coordinates(rank)
        if at.pp not in of_stage:  # the ranks of a stage have as much
            pieces = swapped_pieces(run, axes, at, nccl=has_nccl(run.parallel, axes))
            of_stage[at.pp] = swap_file_bytes(run, pieces) + _activation_bytes(run, axes, at.pp)
        total += of_stage[at.pp]
    return total


def _activation_bytes(run: Run, axes: Axes, stage: int) -> int:
    """Those of activations. On a card they are not known before its bodies of attention are tried: opening says so."""
    kind = devices.kind(run.parallel.device)
    if not writes_activations(run) or kind != "cpu" or buffer_problems(run, axes, kind):
        return 0
    step = StageLists(run, axes, nccl=has_nccl(run.parallel, axes)).of(stage)
    return activation_pieces(step).file_bytes(len(run.offload.nvme_path))


def free_in(folders: Sequence[str], *, checkpoints: bool = False) -> int:
    """Free bytes of the file systems of these folders, each counted once, and of files that are left over there.

    checkpoints: of those that a run with --nvme-checkpoint takes over or replaces, too.
    """
    systems = {os.stat(folder).st_dev: folder for folder in folders}
    left = sum(leftover_bytes(folder, checkpoints=checkpoints) for folder in folders)
    return sum(map(free_bytes, systems.values())) + left
