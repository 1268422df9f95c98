"""Killed at random moments, a run leaves one whole step."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from megazero.disk.transports import DiskOptions
from tests.disk.contents import empty, opened, place, read_all
from tests.forks import fork

KILLS = {"ring": 30, "threads": 12, "plain": 8}
PIECES = {f"piece {number}": 100_000 + 4096 * number for number in range(12)}


def step_content(name: str, step: int) -> torch.Tensor:
    """Whole pages that tell step and piece; a copy of a number, so that it costs nothing."""
    number = 1000 * step + list(PIECES).index(name)
    return torch.full((PIECES[name] // 4,), number, dtype=torch.int32).view(torch.uint8)


def step_of(name: str, memory: torch.Tensor) -> set[int]:
    """The steps whose bytes a piece holds; 0 where nothing has been written yet."""
    numbers = [int(number) for number in memory.view(torch.int32).aminmax()]
    assert all(number % 1000 == list(PIECES).index(name) for number in numbers if number)
    return {number // 1000 for number in numbers}


def run_until_killed(folder: Path, options: DiskOptions, told: mmap.mmap) -> None:
    """Step after step from the last whole one. told: step, and pieces of it that are written."""
    space = opened(folder, PIECES, options, resume=True)
    step = space.record.last.step if space.record else 0
    while True:
        step += 1
        told[:8] = step.to_bytes(4, "little") + bytes(4)
        for done, name in enumerate(PIECES, 1):
            space.write({name: step_content(name, step)}).wait()
            told[4:8] = done.to_bytes(4, "little")
        space.flip(step, {"step": step}).wait()


def slots(folder: Path, options: DiskOptions) -> tuple[int, list[set[int]]]:
    """(the last whole step, the steps in each piece of the other slot); the whole slot is checked."""
    space = opened(folder, PIECES, options, resume=True)
    assert space.record is not None
    whole = space.record.last.step
    assert space.record.last.about == {"step": whole}
    for name, memory in read_all(space, PIECES).items():
        assert step_of(name, memory) == {whole}, name
    others = []
    for name, count in PIECES.items():
        path, offset = place(space, name, 1 - space.record.last.versions[name].slot)
        with path.open("rb") as file:
            file.seek(offset)
            others.append(step_of(name, torch.frombuffer(bytearray(file.read(count)), dtype=torch.uint8)))
    space.close(remove=False)
    return whole, others


@pytest.mark.slow
def test_a_kill_leaves_one_whole_step(tmp_path: Path, options: DiskOptions, way: str) -> None:
    """At random moments within steps and between them. Some must hit a step of which not all pieces are written."""
    chance = random.Random(way)
    with mmap.mmap(-1, 8) as told:
        space = opened(tmp_path, PIECES, options)
        space.write({name: step_content(name, 1) for name in PIECES})
        space.flip(1, {"step": 1}).wait()
        space.close(remove=False)
        torn = mixed = 0
        last = 1
        for _ in range(KILLS[way]):
            told[:8] = bytes(8)
            child = fork()
            if not child:
                try:
                    run_until_killed(tmp_path, options, told)
                finally:
                    os._exit(1)
            pieces, steps = chance.randrange(1, len(PIECES)), chance.randrange(2)
            while int.from_bytes(told[:4], "little") < last + 1 + steps or told[4] < pieces:
                time.sleep(0.0005)
                assert os.waitpid(child, os.WNOHANG)[0] == 0, "the child has failed"
            time.sleep(chance.uniform(0, 0.004))
            os.kill(child, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
            under_way, written = int.from_bytes(told[:4], "little"), told[4]
            whole, others = slots(tmp_path, options)
            assert whole >= last and whole in (under_way - 1, under_way)
            torn += whole == under_way - 1 and 0 < written < len(PIECES)
            mixed += len(set.union(*others)) > 1
            last = whole
        assert last > 3 and torn >= 3 and mixed >= 3, (last, torn, mixed)


def test_without_the_second_slot_the_test_above_would_fail(tmp_path: Path) -> None:
    """What it looks for does happen where a step is written over the one before."""
    space = opened(tmp_path, PIECES, DiskOptions(1 << 16, 1, "threads"), slots=1)
    space.write({name: step_content(name, 1) for name in PIECES}).wait()
    first = next(iter(PIECES))
    space.write({first: step_content(first, 2)}).wait()
    memory = empty(PIECES)
    space.read(memory).wait()
    assert set.union(*(step_of(name, one) for name, one in memory.items())) == {1, 2}
    space.close(remove=True)
    with pytest.raises(AssertionError):
        step_of("piece 1", memory[first])
