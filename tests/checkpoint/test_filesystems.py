"""Folders on the local disks of nodes: as many copies of the manifest as folders, and every rank's file in its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from megazero.checkpoint import folder as folders
from megazero.checkpoint.fence import FenceLost, new_token
from megazero.checkpoint.filesystems import Filesystems, find_filesystems
from megazero.checkpoint.manager import Checkpoints
from megazero.checkpoint.reader import read_manifest
from megazero.mpu.grid import background_group, build_grid
from tests.checkpoint.fakes import Layout
from tests.checkpoint.runs import FakeState, names, open_run, resumed_at, save_at, values_at
from tests.ranks import run_ranks

LAYOUT = Layout(dp=2, tp=2, bucket=200, divisor=8)
RUN = "runs/saved"
"""Relative: what it means depends on where a rank is."""


@contextmanager
def started(
    rank: int, disks: list[str], layout: Layout, keep_last: int = 3, run: str = RUN
) -> Iterator[tuple[Checkpoints, FakeState]]:
    """The run of a rank that works in its folder. run: the folder of checkpoints there."""
    before, grid = Path.cwd(), build_grid(layout.axes)
    token, background = new_token(grid.world, grid.device), background_group(grid)
    os.chdir(disks[rank])
    try:
        yield open_run(Path(run), token, layout, grid, background=background, keep_last=keep_last)
    finally:
        os.chdir(before)


def saves(rank: int, disks: list[str], layout: Layout, iterations: list[int], in_background: bool) -> tuple[int, ...]:
    with started(rank, disks, layout, keep_last=2) as (checkpoints, state):
        checkpoints.claim()
        for iteration in iterations:
            if in_background:
                state.set(values_at(iteration))
                checkpoints.start(iteration, {"iteration": iteration})
                outcome = checkpoints.wait()
                assert outcome is not None and outcome.error is None
            else:
                save_at(checkpoints, state, iteration)
        assert checkpoints._saving is not None
        return checkpoints._saving.filesystems.leaders


def loads(rank: int, disks: list[str], layout: Layout, runs: Sequence[str] = (RUN,) * 4) -> str:
    with started(rank, disks, layout, run=runs[rank]) as (checkpoints, state):
        try:
            found = checkpoints.find()
            if found is None:
                return "nothing"
            checkpoints.load(found)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        assert state.equals(values_at(found.progress["iteration"]))
        return str(found.progress["iteration"])


@pytest.fixture
def nodes(tmp_path: Path) -> list[str]:
    """Two folders, and which of them each of four ranks works in."""
    disks = [tmp_path / "one", tmp_path / "two"]
    for disk in disks:
        disk.mkdir()
    return [str(disks[0]), str(disks[0]), str(disks[1]), str(disks[1])]


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True], ids=["waited", "async"])
def test_every_node_has_a_manifest_and_its_own_files(nodes: list[str], in_background: bool) -> None:
    assert run_ranks(4, saves, nodes, LAYOUT, [1, 2, 3], in_background) == [(0, 0, 2, 2)] * 4
    one, two = Path(nodes[0]) / RUN, Path(nodes[2]) / RUN
    assert names(one) == names(two) == ["iter_0000002", "iter_0000003", "latest", "run_token"]
    files = [f"fragments-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert names(one / "iter_0000003") == [*files[:2], "manifest.json"]
    assert names(two / "iter_0000003") == [*files[2:], "manifest.json"]
    manifest = read_manifest(one / "iter_0000003")
    assert manifest == read_manifest(two / "iter_0000003") and [file.name for file in manifest.files] == files
    assert manifest.layout["places"] == 2 and manifest.is_scattered
    assert run_ranks(4, loads, nodes, LAYOUT) == ["3"] * 4
    if in_background:
        return
    # Another layout, or ranks on other disks, need files of another node: an error that says which and what to do.
    for said in (*run_ranks(4, loads, [*nodes[2:], *nodes[:2]], LAYOUT), *run_ranks(2, loads, nodes[:2], Layout(dp=2))):
        assert said.startswith("Damaged") and "bring the folders of all of them together" in said
        assert (
            "fragments-0000" in said and "is not in runs/saved/iter_0000003 on " in said and "disks of 2 nodes" in said
        )
    for name in files[2:]:
        shutil.copy(two / "iter_0000003" / name, one / "iter_0000003")
    assert resumed_at(one) == 3
    assert run_ranks(2, loads, nodes[:2], Layout(dp=2)) == ["3"] * 2


@pytest.mark.slow
def test_one_shared_folder_is_one_place(nodes: list[str]) -> None:
    assert run_ranks(4, saves, [nodes[0]] * 4, LAYOUT, [1], False) == [(0, 0, 0, 0)] * 4
    assert names(Path(nodes[0]) / RUN) == ["iter_0000001", "latest", "run_token"]
    assert not read_manifest(Path(nodes[0]) / RUN / "iter_0000001").is_scattered


@pytest.mark.slow
def test_a_crash_between_two_nodes_leaves_the_newest_that_both_have(nodes: list[str]) -> None:
    run_ranks(4, saves, nodes, LAYOUT, [1, 2], False)
    two = Path(nodes[2]) / RUN
    (two / "iter_0000002").rename(two / ".tmp-iter_0000002-x")
    (two / "latest").write_text("iter_0000001\n")
    assert run_ranks(4, loads, nodes, LAYOUT) == ["1"] * 4
    assert run_ranks(4, loads, [*nodes[2:], *nodes[:2]], LAYOUT)[0].startswith("Damaged"), (
        "the same checkpoint, other ranks"
    )
    assert run_ranks(4, saves, nodes, LAYOUT, [2], True) == [(0, 0, 2, 2)] * 4
    assert run_ranks(4, loads, nodes, LAYOUT) == ["2"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 2])
def test_a_node_with_an_empty_disk_is_no_new_run(nodes: list[str], lost: int) -> None:
    run_ranks(4, saves, nodes, LAYOUT, [1], False)
    shutil.rmtree(Path(nodes[lost]) / RUN)
    for said in run_ranks(4, loads, nodes, LAYOUT):
        assert said.startswith("ConfigError") and "Damaged" not in said, said
        sees = "finds iter_0000001 there, and rank 0 none" if lost == 0 else "does not see iter_0000001, as rank 0 does"
        assert f"--load {RUN}: rank 2 on " in said and sees in said


@pytest.mark.slow
def test_nothing_anywhere_is_a_new_run(nodes: list[str]) -> None:
    assert run_ranks(4, loads, nodes, LAYOUT) == ["nothing"] * 4


def taken_over(rank: int, disks: list[str], layout: Layout) -> str:
    """A newer job claims the second node's folder only: none of the ranks may save."""
    with started(rank, disks, layout) as (checkpoints, state):
        checkpoints.claim()
        if rank == 2:
            open_run(Path(RUN), "newer")[0].claim()
        torch.distributed.barrier()
        try:
            save_at(checkpoints, state, 1)
        except FenceLost as error:
            return str(error)
        return "saved"


@pytest.mark.slow
def test_a_newer_job_on_one_node_stops_all(nodes: list[str]) -> None:
    said = run_ranks(4, taken_over, nodes, LAYOUT)
    assert all("belongs to run newer" in text for text in said)
    assert names(Path(nodes[0]) / RUN) == names(Path(nodes[2]) / RUN) == ["run_token"]


def across_hosts(rank: int, root: str, identities: list[int], seen: list[list[int]]) -> tuple[int, ...]:
    """Ranks whose host and folder have these numbers, and see the marks of these ranks only."""
    from megazero.checkpoint import filesystems

    grid = build_grid(Layout(dp=len(identities)).axes)
    identity, lowest = filesystems._identity, filesystems._lowest_mark
    filesystems._identity = lambda root: [identities[rank], 0]

    def visible(root: Path, token: str) -> int:
        there = sorted(int(path.name.rpartition("-")[2]) for path in root.iterdir() if ".run_token-" in path.name)
        assert lowest(root, token) == there[0]
        return min(other for other in there if other in seen[rank])

    filesystems._lowest_mark = visible
    checkpoints, _ = open_run(Path(root), "t", Layout(dp=len(identities)), grid)
    try:
        return find_filesystems(Path(root), "t", grid.world, grid.device, checkpoints._attempt_on_all_ranks).leaders
    finally:
        filesystems._identity, filesystems._lowest_mark = identity, lowest


@pytest.mark.slow
def test_hosts_that_share_are_found_by_marks(tmp_path: Path) -> None:
    """Four hosts, one rank each: all on one file system, then the last two on one of their own."""
    assert run_ranks(4, across_hosts, str(tmp_path), [1, 2, 3, 4], [[0, 1, 2, 3]] * 4) == [(0, 0, 0, 0)] * 4
    seen = [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert run_ranks(4, across_hosts, str(tmp_path), [1, 2, 3, 4], seen) == [(0, 0, 2, 2)] * 4
    assert names(tmp_path) == [], "no mark is left"


def test_members_and_leaders() -> None:
    filesystems = Filesystems((0, 0, 2, 0, 2), 3)
    assert (
        filesystems.all_leaders == [0, 2] and filesystems.members(2) == [2, 4] and filesystems.members(0) == [0, 1, 3]
    )
    assert not filesystems.leads and Filesystems((0, 0, 2, 0, 2), 2).leads


def test_a_mark_that_is_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / ".run_token-dead-rank-4").touch()
    checkpoints, _ = open_run(tmp_path, "t")
    checkpoints.claim()
    assert names(tmp_path) == [folders.TOKEN]


@pytest.mark.slow
def test_the_folder_may_have_another_name_on_each_node(nodes: list[str]) -> None:
    run_ranks(4, saves, nodes, LAYOUT, [1, 2], False)
    (Path(nodes[2]) / RUN).rename(Path(nodes[2]) / "elsewhere")
    assert run_ranks(4, loads, nodes, LAYOUT, (RUN, RUN, "elsewhere", "elsewhere")) == ["2"] * 4
    named = f"{RUN}/iter_0000001", f"{RUN}/iter_0000001", "elsewhere/iter_0000001", "elsewhere/iter_0000001"
    assert run_ranks(4, loads, nodes, LAYOUT, named) == ["1"] * 4
