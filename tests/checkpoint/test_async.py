"""Saves in the background: what is saved is that of the moment, failures are told, and the last good checkpoint is left
alone.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megazero.checkpoint import folder as folders
from megazero.checkpoint import save_phases
from megazero.checkpoint.background import Snapshot
from megazero.checkpoint.fence import FenceLost, new_token
from megazero.checkpoint.manager import Checkpoints
from megazero.mpu.collectives import all_reduce
from megazero.mpu.grid import background_group, build_grid
from megazero.system.streams import HostCopies
from megazero.train.save_policy import SavePolicy
from megazero.train.state import TrainingPosition
from tests.checkpoint.fakes import Layout
from tests.checkpoint.runs import FakeState, names, open_run, resumed_at, values_at
from tests.ranks import run_ranks


def overwrite(state: FakeState) -> None:
    """What the next step does to the state."""
    for fragment in state.held:
        for tensor in fragment.columns.values():
            tensor.fill_(math.nan)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writes wait until it is opened."""
    opened, original = threading.Event(), save_phases.write_fragments

    def held_back(*args: object) -> None:
        assert opened.wait(60)
        original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(save_phases, "write_fragments", held_back)
    yield opened
    opened.set()


def run_in(folder: Path) -> tuple[Checkpoints, FakeState, SavePolicy, list[str]]:
    checkpoints, state = open_run(folder, "t")
    checkpoints.claim()
    told: list[str] = []
    saves = SavePolicy(
        checkpoints, lambda at: {"iteration": at.iteration}, told.append, in_background=True, pauses=(0.0, 0.0)
    )
    return checkpoints, state, saves, told


def begin(saves: SavePolicy, state: FakeState, iteration: int) -> None:
    state.set(values_at(iteration))
    saves.save(TrainingPosition(iteration))
    overwrite(state)


def test_what_is_saved_is_that_of_the_moment(tmp_path: Path, gate: threading.Event) -> None:
    checkpoints, state, saves, told = run_in(tmp_path)
    begin(saves, state, 1)
    saves.poll()
    assert checkpoints.busy and told == [] and resumed_at(tmp_path) is None
    gate.set()
    saves.finish(TrainingPosition(1))
    assert resumed_at(tmp_path) == 1
    assert (
        len(told) == 1
        and told[0].startswith(f"saved {tmp_path / 'iter_0000001'}: ")
        and "; the step waited 0." in told[0]
    )


def test_a_save_that_meets_another_waits_for_it(tmp_path: Path, gate: threading.Event) -> None:
    _, state, saves, told = run_in(tmp_path)
    begin(saves, state, 1)
    threading.Timer(0.3, gate.set).start()
    begin(saves, state, 2)
    saves.finish(TrainingPosition(2))
    assert [line.split(":")[0] for line in told] == [
        "iteration 2 waits with its save",
        f"saved {tmp_path / 'iter_0000001'}",
        f"saved {tmp_path / 'iter_0000002'}",
    ]
    assert resumed_at(tmp_path) == 2
    (tmp_path / "latest").write_text("iter_0000001\n")
    assert resumed_at(tmp_path) == 1


def test_a_full_disk_is_told_and_the_next_save_tries_again(tmp_path: Path) -> None:
    checkpoints, state, saves, told = run_in(tmp_path)
    begin(saves, state, 1)
    checkpoints._background._thread.join()  # type: ignore[union-attr]
    saves.poll()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1000, limits[1])
    )  # what a full disk does, this kernel does: a write fails
    try:
        begin(saves, state, 2)
        checkpoints._background._thread.join()  # type: ignore[union-attr]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    saves.poll()
    assert "WARNING: the checkpoint of iteration 2 could not be written: [Errno 27] File too large" in told[1]
    assert "fragments-00001-of-00001.safetensors" in told[1] and "training goes on" in told[1]
    assert resumed_at(tmp_path) == 1 and names(tmp_path) == ["iter_0000001", "latest", "run_token"]
    begin(saves, state, 3)
    saves.finish(TrainingPosition(3))
    assert resumed_at(tmp_path) == 3
    saves.save(TrainingPosition(3))
    assert not checkpoints.busy, "it is saved already"
    assert names(tmp_path) == ["iter_0000001", "iter_0000003", "latest", "run_token"]


def test_a_last_save_that_failed_beside_the_run_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, state, saves, told = run_in(tmp_path)
    failures, original = [OSError(28, os.strerror(28), "somewhere")] * 2, save_phases.write_fragments

    def full(*args: object) -> None:
        if failures:
            raise failures.pop()
        original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(save_phases, "write_fragments", full)
    state.set(values_at(1))
    saves.save(TrainingPosition(1))
    saves.finish(TrainingPosition(1))
    assert [line.split(":")[0] for line in told[:2]] == ["WARNING"] * 2 and told[2].startswith("saved ")
    assert "training goes on" in told[0] and "this was try 1 of 2" in told[1]
    assert resumed_at(tmp_path) == 1


def test_a_run_that_lost_its_folder_learns_it(tmp_path: Path, gate: threading.Event) -> None:
    checkpoints, state, saves, told = run_in(tmp_path)
    begin(saves, state, 1)
    newer, _ = open_run(tmp_path, "newer")
    newer.claim()
    gate.set()
    checkpoints._background._thread.join()  # type: ignore[union-attr]
    assert not saves.superseded
    saves.poll()
    assert saves.superseded and "belongs to run newer" in told[0]
    with pytest.raises(FenceLost, match="belongs to run newer"):
        saves.finish(TrainingPosition(2))
    assert names(tmp_path) == ["run_token"]


def test_what_a_run_begins_as_it_loses_its_folder_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder changes hands behind the check, and the newer run has swept before the older one makes what it writes
    to.
    """
    checkpoints, state, saves, told = run_in(tmp_path)
    newer, _ = open_run(tmp_path, "newer")
    original = folders.discard
    taken: list[Path] = []

    def take_over_first(path: Path, token: str) -> None:
        if not taken:
            taken.append(path)
            newer.claim()
        original(path, token)

    monkeypatch.setattr(folders, "discard", take_over_first)
    begin(saves, state, 1)
    checkpoints._background._thread.join()  # type: ignore[union-attr]
    saves.poll()
    assert taken and saves.superseded and "belongs to run newer" in told[0]
    assert names(tmp_path) == ["run_token"]


def test_two_runs_may_delete_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ".tmp-iter_0000001-t"
    folder.mkdir()
    original = shutil.rmtree

    def other_first(path: Path, **options: bool) -> None:
        if folder.exists():
            folder.rmdir()
        original(path, ignore_errors=options["ignore_errors"])

    monkeypatch.setattr(shutil, "rmtree", other_first)
    folders.discard(folder, "newer")
    assert names(tmp_path) == []


def test_a_run_that_lost_its_folder_learns_it_at_the_latest_from_the_next_save(
    tmp_path: Path, gate: threading.Event
) -> None:
    _, state, saves, _ = run_in(tmp_path)
    begin(saves, state, 1)
    newer, _ = open_run(tmp_path, "newer")
    newer.claim()
    gate.set()
    with pytest.raises(FenceLost, match="belongs to run newer"):
        saves.save(TrainingPosition(2))


def test_copies_keep_their_memory(tmp_path: Path) -> None:
    checkpoints, state, saves, _ = run_in(tmp_path)
    assert checkpoints.reserve() > 3 * 4 * 1000
    memory = checkpoints._snapshot._copies._memory.data_ptr()
    for iteration in (1, 2):
        begin(saves, state, iteration)
        saves.finish(TrainingPosition(iteration))
        assert resumed_at(tmp_path) == iteration
    assert checkpoints._snapshot._copies._memory.data_ptr() == memory


def test_copies_are_copies() -> None:
    generator = torch.Generator().manual_seed(3)
    dtypes = torch.bfloat16, torch.float64, torch.float32, torch.float16
    tensors = [torch.randn(7 * i + 1, generator=generator, dtype=torch.float64).to(dtypes[i % 4]) for i in range(12)]
    wanted = [tensor.clone() for tensor in tensors]
    copies = HostCopies(torch.device("cpu")).take(tensors)
    for tensor in tensors:
        tensor.zero_()
    assert all(torch.equal(copy, want) and copy.dtype == want.dtype for copy, want in zip(copies, wanted, strict=True))
    assert Snapshot(torch.device("cpu")).take([]) == []


def beside_a_run(rank: int, folder: str, layout: Layout) -> tuple[list[str], float]:
    """Four saves, the third of which fails on rank 2, while the main thread sums over the world without a pause."""
    grid = build_grid(layout.axes)
    token = new_token(grid.world, grid.device)
    checkpoints, state = open_run(Path(folder), token, layout, grid, background=background_group(grid), keep_last=2)
    checkpoints.claim()
    original, outcomes, total = save_phases.write_fragments, [], 0.0

    def full(*args: object) -> None:
        raise OSError(28, os.strerror(28), "rank 2's disk")

    for iteration in range(1, 5):
        state.set(values_at(iteration))
        if rank == 2 and iteration == 3:
            save_phases.write_fragments = full  # type: ignore[assignment]
        checkpoints.start(iteration, {"iteration": iteration})
        overwrite(state)
        for _ in range(50):
            number = torch.tensor([float(rank)])
            all_reduce(number, grid.world).wait()
            total += number.item()
        outcome = checkpoints.wait()
        save_phases.write_fragments = original
        assert outcome is not None and outcome.iteration == iteration
        outcomes.append("saved" if outcome.saved else str(outcome.error))
    return outcomes, total


@pytest.mark.slow
def test_ranks_save_beside_what_they_exchange(tmp_path: Path) -> None:
    found = run_ranks(4, beside_a_run, str(tmp_path), Layout(tp=2, pp=2, bucket=200, divisor=8))
    for rank, (outcomes, total) in enumerate(found):
        assert total == 4 * 50 * 6
        assert outcomes[:2] == ["saved", "saved"] and outcomes[3] == "saved"
        assert 'No space left on device: "rank 2\'s disk"' in outcomes[2], (rank, outcomes)
    assert names(tmp_path) == ["iter_0000002", "iter_0000004", "latest", "run_token"]
    assert resumed_at(tmp_path) == 4
