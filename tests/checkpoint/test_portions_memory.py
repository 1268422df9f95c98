"""A state larger than the memory that a process may take: saved, loaded into another layout, started from."""

from __future__ import annotations

import os
import resource
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megazero.mpu.parameter import ParameterKind, shard
from megazero.zero.layout import FragmentSpec
from tests.checkpoint.resting import Rest, RestingState, checkpoints_of
from tests.forks import fork

ROWS, WIDE, TENSORS = 1000, 1024, 12
STATE = 3 * 4 * ROWS * WIDE * TENSORS
PORTION = 700_001
BOUND = 90 << 20
"""Bytes of anonymous memory beyond those at the start: the threads' stacks, a few blocks of 8 MiB and portions of 8."""


def held(tp: int, index: int) -> list[FragmentSpec]:
    """The fragments of a tp rank: matrices that are split along their columns."""
    kind = ParameterKind.MATRIX
    specs = [shard(f"{i}.weight", (ROWS, WIDE), kind, dim=1, rank=index, size=tp) for i in range(TENSORS)]
    return [FragmentSpec(spec, 0, spec.local_numel) for spec in specs]


def resting(folder: Path, fragments: list[FragmentSpec]) -> RestingState:
    """A state in files that are mapped shared: their pages are no memory of the process."""
    folder.mkdir(exist_ok=True)
    rest: Rest = {}
    for one in fragments:
        for column in ("weight", "exp_avg", "exp_avg_sq"):
            path = str(folder / f"{one.spec.name}.{column}")
            rest[one.spec.name, column] = torch.from_file(path, shared=True, size=one.numel, dtype=torch.float32)
    return RestingState(fragments, rest, PORTION, spoil=False)


def value(tensor: int, column: int) -> float:
    return 1.0 + tensor + 0.25 * column


def in_bounded_memory(action: Callable[[], None]) -> None:
    """Run the action in a child that may take `BOUND` bytes more than it has. Linux counts mapped files apart."""
    child = fork()
    if child == 0:
        try:
            now = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
            resource.setrlimit(resource.RLIMIT_DATA, (now + BOUND, now + BOUND))
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.slow
def test_a_state_larger_than_memory(tmp_path: Path) -> None:
    assert STATE > 1.5 * BOUND
    whole = resting(tmp_path / "rest", held(1, 0))
    for (name, column), values in whole.rest.items():
        rows = torch.arange(ROWS).repeat_interleave(WIDE)
        values.copy_(rows + value(int(name.split(".")[0]), ("weight", "exp_avg", "exp_avg_sq").index(column)))

    def save() -> None:
        checkpoints = checkpoints_of(tmp_path / "saved", whole, lambda: [held(1, 0)])
        checkpoints.claim()
        checkpoints.save(1, {"iteration": 1})

    in_bounded_memory(save)
    half = resting(tmp_path / "half", held(2, 1))

    def load() -> None:
        reader = checkpoints_of(tmp_path / "saved", half, lambda: [held(2, 1)])
        found = reader.find()
        assert found is not None
        reader.load(found)

    in_bounded_memory(load)
    for (name, column), values in half.rest.items():
        at = value(int(name.split(".")[0]), ("weight", "exp_avg", "exp_avg_sq").index(column))
        assert torch.equal(values.view(ROWS, -1), torch.arange(ROWS)[:, None].expand(ROWS, WIDE // 2) + at)


def test_the_bound_is_one() -> None:
    """All of the state at once does not fit."""
    with pytest.raises(AssertionError):
        in_bounded_memory(lambda: print(torch.zeros(STATE // 4).sum()))
