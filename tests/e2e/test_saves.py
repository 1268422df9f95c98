"""Checkpoints of the whole program: a disk that is full, nodes with disks of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megazero.checkpoint.fence import Fence
from tests.e2e.command import TINY, metrics, wait_until
from tests.e2e.halting import Halt, forked, on_nodes, whole


@pytest.fixture
def flags(corpus: Path, tmp_path: Path) -> list[object]:
    data = ["--data-path", corpus, "--data-cache-path", tmp_path / "cache", "--split", "90,10,0", "--eval-iters", 0]
    more = "--precision bf16 --global-batch-size 8 --lr-decay-style constant --override-data"
    return [*TINY, *data, *more.split()]


@pytest.mark.slow
def test_a_full_disk_is_told_and_only_the_last_save_fails_the_run(flags: list[object], tmp_path: Path) -> None:
    """A disk that takes everything but a checkpoint."""
    saves = ["--save", tmp_path / "saved", "--save-interval", 2, "--async-save", "--train-iters", 6]
    full = [Halt("no large file", 0, 0, "")]
    told = whole(1, [*flags, *saves, "--metrics-file", tmp_path / "m"], tmp_path, full, status=1)
    assert len(metrics(tmp_path / "m")) == 6, "training went on"
    for iteration in (2, 4):
        warning = f"WARNING: the checkpoint of iteration {iteration} could not be written: [Errno 27] File too large"
        assert warning in told
    assert "OSError: [Errno 27] File too large" in told.split("failed:")[-1], "the last one's failure is the run's"
    left = [path.name for path in (tmp_path / "saved").iterdir()]
    assert not [name for name in left if name.startswith(("iter_", ".tmp", "latest"))]


@pytest.mark.slow
def test_a_run_whose_folder_another_took_over_stops(flags: list[object], tmp_path: Path) -> None:
    saves = ["--save", tmp_path / "saved", "--save-interval", 1, "--async-save", "--train-iters", 1_000_000]
    output = tmp_path / "output"
    process = forked(1, [*flags, *saves], output)
    wait_until((tmp_path / "saved" / "latest").exists, process, output)
    Fence(tmp_path / "saved" / "run_token").claim("newer")
    process.join(300)
    assert process.exitcode == 1
    assert "belongs to run newer" in output.read_text() and "FenceLost" in output.read_text()


@pytest.mark.slow
def test_nodes_with_disks_of_their_own(flags: list[object], tmp_path: Path) -> None:
    nodes = [tmp_path / "one", tmp_path / "two"]
    for node in nodes:
        node.mkdir()
    run = [*flags, "--save", "saved", "--load", "saved", "--save-interval", 2, "--zero-stage", 1, "--keep-last-k", 2]
    for status, told in on_nodes(nodes, [*run, "--async-save", "--train-iters", 5]):
        assert status == 0, told
    for number, node in enumerate(nodes, 1):
        files = [f"fragments-0000{number}-of-00002.safetensors", "manifest.json"]
        assert sorted(os.listdir(node / "saved" / "iter_0000005")) == files
        assert {"iter_0000004", "iter_0000005", "latest", "run_token"} <= set(os.listdir(node / "saved"))
    (status, told), (other, _) = on_nodes(nodes, [*run, "--train-iters", 7])
    assert (status, other) == (0, 0) and "saved/iter_0000005, iteration 5" in told
    (status, told), (other, _) = on_nodes(nodes[::-1], [*run, "--train-iters", 9])
    assert (status, other) == (1, 1) and "fragments-00001-of-00002.safetensors is not in saved/iter_0000007 on " in told
