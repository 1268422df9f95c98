"""Set-up of a run's checkpoints: claim the folder, and say what each rank writes and which files are added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megazero.checkpoint.fence import new_token
from megazero.checkpoint.manager import Checkpoints, FoundCheckpoint
from megazero.checkpoint.resume_changes import record_of
from megazero.config.dtypes import compute_dtype
from megazero.config.schema import Run
from megazero.convert.model_files import model_files
from megazero.mpu.axes import Coordinates
from megazero.mpu.grid import ProcessGrid, background_group
from megazero.plan.parameter_specs import specs_of
from megazero.train.adapters import peft_files
from megazero.train.logs import as_config_error
from megazero.zero.layout import owned_fragments
from megazero.zero.optimizer import ShardedOptimizer
from megazero.zero.state import packing_on


def claim_checkpoints(
    run: Run, grid: ProcessGrid, optimizer: ShardedOptimizer, found: FoundCheckpoint | None
) -> Checkpoints:
    """The run's `Checkpoints`, with the save folder claimed from any earlier job.

    found: the checkpoint to resume from; its model files are copied on. A collective of the world: a broadcast of the
    token, and `Checkpoints.claim`. Raises ConfigError on all ranks if the folder cannot be written.
    """
    token = new_token(grid.world, grid.device)
    group = background_group(grid) if run.checkpoint.async_save else None
    extra = (peft_files(run), model_files(run, found)) if grid.rank == 0 and run.checkpoint.save else ()
    weights = compute_dtype(run.optimizer.precision) if run.checkpoint.no_save_optim else None
    of = run.checkpoint, record_of(run), optimizer, _fragments_of_all(run, grid), grid, token, group, _each(extra)
    checkpoints = Checkpoints(*of, weights=weights)
    with as_config_error(f"--save {run.checkpoint.save}"):
        checkpoints.claim()
    return checkpoints


def _each(writers: Sequence[Callable[[Path], None] | None]) -> Callable[[Path], None] | None:
    """One function that runs all writers that are not None; None if there are none."""
    there = [write for write in writers if write is not None]

    def write_all(folder: Path) -> None:
        for write in there:
            write(folder)

    return write_all if there else None


def _fragments_of_all(run: Run, grid: ProcessGrid) -> Callable[[], Sequence[Sequence[Any]]]:
    """A function that returns the fragments of every rank, by arithmetic without messages.

    Specs are computed once for each (pp, tp) index, since the ranks with equal indices hold the same parameters.
    """

    @cache
    def specs(pp_index: int, tp_index: int) -> Any:
        return specs_of(run, pp_index, tp_index)

    packing = packing_on(grid, run.parallel, run.offload)

    def held_by(at: Coordinates) -> list[Any]:
        return [fragment for _, fragment in owned_fragments(specs(at.pp, at.tp), grid.axes, at, packing)]

    return lambda: [held_by(grid.axes.coordinates(rank)) for rank in range(grid.axes.world_size)]
