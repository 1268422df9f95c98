"""kill -9 while a checkpoint is being written beside the run: the last complete one always loads, and is whole."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megazero.checkpoint import blocks, saving
from megazero.checkpoint.format import columns_of
from megazero.checkpoint.manager import find
from megazero.checkpoint.shares import Values
from megazero.checkpoint.verify import verify
from megazero.checkpoint.writer import write_fragments
from tests.checkpoint.fakes import Layout
from tests.checkpoint.runs import names, open_run, resumed_at, values_at

KILLS = 20
BLOCK, SECONDS = 512, 0.25
"""Bytes of a block here, and what the writing of a checkpoint is stretched to."""


def slowly(folder: Path, index: int, count: int, fragments: list[Values]) -> None:
    """The real writer with small blocks, each of which takes its time as on a slow disk. Only ever called in the child."""
    sizes = [tensor.nbytes for fragment in fragments for tensor in columns_of(fragment).values()]
    pause, original = SECONDS / sum(-(-size // BLOCK) for size in sizes), blocks._blocks

    def paced(values: blocks.Values, block_bytes: int) -> Iterator[Tensor]:
        for block in original(values, block_bytes):
            time.sleep(pause)
            yield block

    blocks._blocks = paced
    try:
        write_fragments(folder, index, count, fragments, BLOCK)
    finally:
        blocks._blocks = original


def trains(folder: Path, token: str, tell: int) -> None:
    """The victim: takes over, loads, then saves beside its steps for ever; tells of each save that it began."""
    torch.set_num_threads(1)  # a fork has none of its parent's OpenMP threads, but waits for them
    saving.write_fragments = slowly  # type: ignore[assignment]
    checkpoints, state = open_run(folder, token, keep_last=2)
    checkpoints.claim()
    iteration = resumed_at(folder) or 0
    while True:
        iteration += 1
        state.set(values_at(iteration))
        checkpoints.start(iteration, {"iteration": iteration})
        os.write(tell, b"%d\n" % iteration)
        outcome = checkpoints.wait()
        assert outcome is not None and outcome.saved is not None, outcome


def killed(folder: Path, token: str, after: float) -> list[int]:
    """Fork the victim, kill it that long after its first save has begun; the iterations whose saves it began."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            trains(folder, token, write)
        finally:
            os._exit(1)
    os.close(write)
    assert select.select([read], [], [], 60)[0], "no save in a minute"
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, "it ended by itself"
    told = b""
    while piece := os.read(read, 1 << 16):
        told += piece
    os.close(read)
    return [int(line) for line in told.split()]


@pytest.mark.slow
def test_killed_twenty_times_while_it_writes(tmp_path: Path) -> None:
    random_, reached, halves = random.Random(5), 0, 0
    for number in range(KILLS):
        began = killed(tmp_path, f"run{number}", random_.uniform(0.0, 2.5 * SECONDS))
        assert began[0] == reached + 1, "it goes on from the last complete one"
        halves += any(name.startswith(".tmp-") for name in names(tmp_path))
        found = resumed_at(tmp_path)  # values compared
        assert (found or 0) in (began[-1] - 1, began[-1]), "no more than the save under way is lost"
        reached = found or 0
        complete = [path for path in tmp_path.iterdir() if path.name.startswith("iter_")]
        assert bool(complete) == bool(reached)
        for path in complete:  # every hash of every one that is there
            opened = find(path)
            assert opened is not None and verify(path, opened.manifest, 1, lambda _: None) == []
    assert halves > 0 and reached > 0, "some of the kills met a write, some of the writes ended: how many is the machine's affair"
    last, _ = open_run(tmp_path, "last", Layout(), keep_last=2)
    last.claim()
    assert [name for name in names(tmp_path) if not name.startswith("iter_")] == ["latest", "run_token"], "leftovers are swept"
    assert resumed_at(tmp_path) == reached
