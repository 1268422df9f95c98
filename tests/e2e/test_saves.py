"""Checkpoints of the whole program: a disk that is full, nodes with disks of their own."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megazero.checkpoint.fence import Fence
from tests.e2e.command import TINY, command, environment, metrics, start

MODEL = [*TINY, "--precision", "bf16"]


@pytest.fixture
def flags(corpus: Path, tmp_path: Path) -> list[object]:
    data = ["--data-path", corpus, "--data-cache-path", tmp_path / "cache", "--split", "90,10,0", "--eval-iters", 0]
    return [*MODEL, *data, "--global-batch-size", 8, "--lr-decay-style", "constant", "--override-data"]


@pytest.mark.slow
def test_a_full_disk_is_told_and_only_the_last_save_fails_the_run(flags: list[object], tmp_path: Path) -> None:
    """The kernel lets no file grow beyond 150 kB, which is less than a checkpoint and more than
    everything else here.
    """
    saves = [
        "--save",
        tmp_path / "saved",
        "--save-interval",
        2,
        "--async-save",
        "--train-iters",
        6,
        "--metrics-file",
        tmp_path / "m",
    ]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))

    done = subprocess.run(
        command(1, [*flags, *saves]),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
        preexec_fn=limit,
    )
    assert done.returncode == 1, done.stdout
    assert len(metrics(tmp_path / "m")) == 6, "training went on"
    for iteration in (2, 4):
        assert (
            f"WARNING: the checkpoint of iteration {iteration} could not be written: [Errno 27] File too large"
            in done.stdout
        )
    assert "OSError: [Errno 27] File too large" in done.stdout.split("failed:")[-1], (
        "and the last one's failure is the run's"
    )
    assert not [
        path.name for path in (tmp_path / "saved").iterdir() if path.name.startswith(("iter_", ".tmp", "latest"))
    ]


@pytest.mark.slow
def test_a_run_whose_folder_another_took_over_stops(flags: list[object], tmp_path: Path) -> None:
    saves = ["--save", tmp_path / "saved", "--save-interval", 1, "--async-save", "--train-iters", 1_000_000]
    process = start(1, [*flags, *saves], tmp_path / "output")
    deadline = time.monotonic() + 300
    while not (tmp_path / "saved" / "latest").exists():
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
        time.sleep(0.1)
    Fence(tmp_path / "saved" / "run_token").claim("newer")
    assert process.wait(timeout=300) == 1
    told = (tmp_path / "output").read_text()
    assert "belongs to run newer" in told and "FenceLost" in told


def on_nodes(nodes: Sequence[Path], flags: Sequence[object]) -> list[tuple[int, str]]:
    """Status and output of one rank per node, each started as a node's launcher starts it: in a working directory of
    its own.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = environment(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(len(nodes)), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"
    )
    ranks = [
        subprocess.Popen(
            command(1, flags),
            cwd=node,
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, node in enumerate(nodes)
    ]
    told = [rank.communicate(timeout=300)[0] for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, told, strict=True)]


@pytest.mark.slow
def test_nodes_with_disks_of_their_own(flags: list[object], tmp_path: Path) -> None:
    nodes = [tmp_path / "one", tmp_path / "two"]
    for node in nodes:
        node.mkdir()
    run = [*flags, "--save", "saved", "--load", "saved", "--save-interval", 2, "--zero-stage", 1, "--keep-last-k", 2]
    for status, told in on_nodes(nodes, [*run, "--async-save", "--train-iters", 5]):
        assert status == 0, told
    for number, node in enumerate(nodes, 1):
        assert sorted(os.listdir(node / "saved" / "iter_0000005")) == [
            f"fragments-0000{number}-of-00002.safetensors",
            "manifest.json",
        ]
        assert {"iter_0000004", "iter_0000005", "latest", "run_token"} <= set(os.listdir(node / "saved"))
    (status, told), (other, _) = on_nodes(nodes, [*run, "--train-iters", 7])
    assert (status, other) == (0, 0) and "saved/iter_0000005, iteration 5" in told
    (status, told), (other, _) = on_nodes(nodes[::-1], [*run, "--train-iters", 9])
    assert (status, other) == (1, 1) and "fragments-00001-of-00002.safetensors is not in saved/iter_0000007 on " in told
