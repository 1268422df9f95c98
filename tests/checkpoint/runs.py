"""A run's checkpoints over a fake state, in one process or as one rank of several."""

from __future__ import annotations

from collections.abc import Collection, Generator
from dataclasses import replace
from pathlib import Path

import torch

from megazero.checkpoint.manager import Checkpoints
from megazero.checkpoint.resume_changes import record_of
from megazero.config.schema import CheckpointConfig, Run
from megazero.mpu.grid import Group, ProcessGrid, single_process_grid, single_rank_group
from megazero.zero.layout import Fragment, StoredFragment
from tests.checkpoint.fakes import Layout, Values, fragments_of, global_values, told


class FakeState:
    """A model state whose fragments have the values of a run at some iteration."""

    def __init__(self, layout: Layout, rank: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.layout, self.rank, self.dtype = layout, rank, dtype
        self.held = fragments_of(layout, rank, None, dtype)
        self.loaded = 0

    resident = True

    def stored(self) -> list[list[StoredFragment]]:
        return [told(self.held)]

    def portions(self, fill: Collection[str] = ()) -> Generator[list[Fragment], None, None]:
        return (held for held in [self.held])

    def after_load(self, filled: Collection[str] = ()) -> None:
        self.loaded += 1

    def set(self, values: Values) -> None:
        self.held = fragments_of(self.layout, self.rank, values, self.dtype)

    def equals(self, values: Values) -> bool:
        wanted = fragments_of(self.layout, self.rank, values, self.dtype)
        return all(
            torch.equal(values, other.columns[column])
            for mine, other in zip(self.held, wanted, strict=True)
            for column, values in mine.columns.items()
        )


def values_at(iteration: int, dtype: torch.dtype = torch.float32) -> Values:
    return global_values(Layout(), dtype, seed=iteration)


def open_run(
    folder: Path,
    token: str,
    layout: Layout | None = None,
    grid: ProcessGrid | None = None,
    dtype: torch.dtype = torch.float32,
    background: Group | None = None,
    **config: object,
) -> tuple[Checkpoints, FakeState]:
    """A run that saves and loads in `folder`; the caller calls `claim`. background: the group for background saves
    (default: a group of one process).
    """
    layout, grid = layout or Layout(), grid or single_process_grid()
    state = FakeState(layout, grid.rank, dtype)
    cfg = replace(CheckpointConfig(save=str(folder), load=str(folder)), **config)  # type: ignore[arg-type]
    return Checkpoints(
        cfg, record_of(Run()), state, layout.all_fragments, grid, token, background or single_rank_group()
    ), state


def save_at(checkpoints: Checkpoints, state: FakeState, *iterations: int) -> None:
    for iteration in iterations:
        state.set(values_at(iteration, state.dtype))
        checkpoints.save(iteration, {"iteration": iteration, "consumed_samples": 24 * iteration})


def resumed_at(folder: Path, layout: Layout | None = None) -> int | None:
    """The iteration that a new run finds and loads, after checking its values; None if it starts from scratch."""
    checkpoints, state = open_run(folder, "reader", layout)
    found = checkpoints.find()
    if found is None:
        return None
    checkpoints.load(found)
    iteration = found.progress["iteration"]
    assert isinstance(iteration, int)
    assert state.loaded == 1 and state.equals(values_at(iteration)), f"{found.path} holds other values"
    return iteration


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
