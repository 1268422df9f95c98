"""Swap files for what the units of a user's model keep for their backward (offload_activations nvme)."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from megazero.checkpoint.agreement import attempt_on_all_ranks
from megazero.checkpoint.fence import new_token
from megazero.config.derive import folders_of, writes_activations
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.disk.measure import weights_of
from megazero.disk.opening import open_swap
from megazero.disk.swap import SwapSpace
from megazero.disk.transports import DiskOptions
from megazero.mpu.grid import ProcessGrid
from megazero.own.opening import Opening
from megazero.pipeline.kept_disks import GrowingDisks
from megazero.train.logs import as_config_error
from megazero.train.requirements import flag_of, folder_problems


def activation_files(run: Run, grid: ProcessGrid, opening: Opening) -> GrowingDisks | None:
    """This rank's files for activations, of which there are none before the first step; they end with the opening. None
    where activations stay in memory.

    Where they go to files a collective of the world: a broadcast of the name of the job's files, and an agreement on
    whether all ranks have their folders. Raises ConfigError on all ranks if one has not.
    """
    if not writes_activations(run):
        return None
    tier = run.offload.offload_activations.tier
    names = folders_of(run.offload, tier)
    folders, numbers = [Path(name) for name in names], count()
    token = new_token(grid.world, grid.device)[:12]
    options, weights = DiskOptions(), list[float]()

    def look() -> None:
        if problems := folder_problems(names, flag_of(tier)):
            raise ConfigError(problems)
        weights.extend(weights_of(folders, options, run.offload.nvme_buffer_bytes))

    with as_config_error(f"{flag_of(tier)} {' '.join(names)}"):
        attempt_on_all_ranks(grid.world, grid.device, look)
    of_opening = weakref.ref(opening)  # which has a reference to these files

    def opened(pieces: Mapping[str, int]) -> SwapSpace:
        job = f"{token}a{next(numbers)}"
        store = open_swap(folders, pieces, options, job=job, rank=grid.rank, slots=1, weights=tuple(weights))
        if (still := of_opening()) is not None:
            still.leave_first()
        return store

    disks = GrowingDisks(opened, run.offload.nvme_buffer_bytes)
    opening.at_end(disks.close)
    return disks
