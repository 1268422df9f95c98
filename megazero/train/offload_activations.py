"""Swap files of activations (--offload-activations nvme), opened before anything else is built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megazero.checkpoint.agreement import attempt_on_all_ranks
from megazero.checkpoint.fence import new_token
from megazero.config.schema import Run
from megazero.disk.opening import open_swap, remove_unused
from megazero.mpu.grid import ProcessGrid
from megazero.pipeline.kept_disks import ActivationDisks
from megazero.plan.leaving_disks import activation_pieces, writes_activations
from megazero.plan.step_lists import StageLists
from megazero.telemetry.watchdog import StopSignals
from megazero.train.logs import as_config_error


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
    found = activation_pieces(StageLists(run, grid.axes, nccl=grid.world.is_on_device).of(grid.at.pp))
    token, opened = new_token(grid.world, grid.device)[:12], list[ActivationDisks]()
    folders = [Path(folder) for folder in run.offload.nvme_path]

    def act() -> None:
        if found.count:
            signals.leaving.append(lambda: remove_unused(folders, token, grid.rank))
            swap = open_swap(folders, found.pieces, job=token, rank=grid.rank, slots=1)
            opened.append(ActivationDisks.of(swap, found.buffer_bytes, found.pieces))

    try:
        with as_config_error(f"--nvme-path {' '.join(run.offload.nvme_path)}"):
            attempt_on_all_ranks(grid.world, grid.device, act)
        yield opened[0] if opened else None
    except BaseException:
        for disks in opened:
            disks.swap.close(remove=True)
        raise
