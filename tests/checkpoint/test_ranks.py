"""Real ranks over gloo: save and load together, and fail together."""

import os
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.agreement import raise_on_all_ranks
from megazero.checkpoint.fence import FenceLost, new_token
from megazero.checkpoint.format import CheckpointError, Damaged
from megazero.mpu.grid import build_grid
from tests.checkpoint.fakes import Layout
from tests.checkpoint.runs import names, open_run, resumed_at, save_at, values_at
from tests.ranks import run_ranks

HOME = Layout(tp=2, dp=1, pp=2, bucket=200, divisor=8)
AWAY = Layout(tp=1, dp=3, bucket=333)


def save_all(rank: int, folder: str, layout: Layout, iterations: list[int]) -> str:
    grid = build_grid(layout.axes)
    token = new_token(grid.world, grid.device)
    checkpoints, state = open_run(Path(folder), token, layout, grid, keep_last=2)
    checkpoints.claim()
    save_at(checkpoints, state, *iterations)
    return token


def load_all(rank: int, folder: str, layout: Layout, dtype: torch.dtype) -> tuple[int, bool, int]:
    grid = build_grid(layout.axes)
    checkpoints, state = open_run(Path(folder), "reader", layout, grid, dtype)
    found = checkpoints.find()
    assert found is not None
    checkpoints.load(found)
    iteration = found.progress["iteration"]
    return iteration, state.equals(values_at(iteration)), state.loaded


def failure(rank: int, folder: str, layout: Layout) -> str:
    try:
        load_all(rank, folder, layout, torch.float32)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_saved_by_four_read_by_three_four_and_one(tmp_path):
    tokens = run_ranks(4, save_all, str(tmp_path), HOME, [1, 2, 3])
    assert len(set(tokens)) == 1
    assert names(tmp_path) == ["iter_0000002", "iter_0000003", "latest", "run_token"]
    assert names(tmp_path / "iter_0000003") == [
        *(f"fragments-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)),
        "manifest.json",
    ]
    assert run_ranks(3, load_all, str(tmp_path), AWAY, torch.float32) == [(3, True, 1)] * 3
    assert run_ranks(4, load_all, str(tmp_path), HOME, torch.float64) == [(3, True, 1)] * 4
    assert resumed_at(tmp_path) == 3


@pytest.mark.slow
def test_damage_that_one_rank_meets_stops_all_with_its_message(tmp_path):
    run_ranks(4, save_all, str(tmp_path), HOME, [1, 2])
    path = tmp_path / "iter_0000002" / "fragments-00004-of-00004.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    said = run_ranks(4, failure, str(tmp_path), HOME)
    assert len(set(said)) == 1
    assert said[0].startswith(
        f"Damaged: checkpoint {tmp_path / 'iter_0000002'} is damaged: fragments-00004-of-00004.safetensors is altered"
    )
    assert said[0].endswith(f"--load {tmp_path / 'iter_0000001'}")


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_refused_by_all(tmp_path):
    run_ranks(4, save_all, str(tmp_path), HOME, [1])
    other = Layout(tp=2, dp=1, tied=False)
    said = run_ranks(2, failure, str(tmp_path), other)
    assert (
        said[0] == said[1]
        and said[0].startswith("ValueError")
        and "1 missing from the checkpoint: head.weight" in said[0]
    )


def leftover(rank: int, folder: str, layout: Layout) -> str:
    grid = build_grid(layout.axes)
    checkpoints, state = open_run(Path(folder), "old", layout, grid)
    checkpoints.claim()
    if rank == 0:  # a newer job starts elsewhere
        open_run(Path(folder), "new")[0].claim()
    torch.distributed.barrier()
    try:
        save_at(checkpoints, state, 9)
    except FenceLost as error:
        return str(error)
    return "saved"


def test_every_rank_of_a_leftover_run_stops(tmp_path):
    said = run_ranks(4, leftover, str(tmp_path), HOME)
    assert len(set(said)) == 1 and "belongs to run new, not to this run (old)" in said[0]
    assert names(tmp_path) == ["run_token"]


def no_room(rank: int, folder: str, layout: Layout) -> str:
    """Rank 2's disk is full."""
    from megazero.checkpoint import save_phases

    grid = build_grid(layout.axes)
    checkpoints, state = open_run(Path(folder), "one", layout, grid)
    checkpoints.claim()
    save_at(checkpoints, state, 1)
    original = save_phases.write_fragments

    def full(*args: object) -> None:
        raise OSError(28, os.strerror(28))

    if rank == 2:
        save_phases.write_fragments = full  # type: ignore[assignment]
    try:
        save_at(checkpoints, state, 2)
    except (OSError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        save_phases.write_fragments = original
    return "saved"


def test_a_rank_that_cannot_write_fails_the_save_for_all(tmp_path):
    said = run_ranks(4, no_room, str(tmp_path), HOME)
    assert said[2] == "OSError: [Errno 28] No space left on device"
    assert {said[i] for i in (0, 1, 3)} == {"CheckpointError: OSError: [Errno 28] No space left on device"}
    assert resumed_at(tmp_path) == 1


def disagree(rank: int) -> str:
    grid = build_grid(Layout(dp=3).axes)
    raise_on_all_ranks(grid.world, grid.device, None)
    try:
        raise_on_all_ranks(
            grid.world, grid.device, Damaged("ß from 1") if rank == 1 else (ValueError("from 2") if rank == 2 else None)
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_the_lowest_rank_is_heard():
    assert run_ranks(3, disagree) == ["Damaged: ß from 1"] * 3


@pytest.mark.parametrize("kind", ["missing", "unfinished"])
def test_nothing_to_load(tmp_path, kind):
    if kind == "unfinished":
        (tmp_path / ".tmp-iter_0000001-x").mkdir()
    assert resumed_at(tmp_path if kind == "unfinished" else tmp_path / "none") is None
