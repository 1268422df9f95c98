"""kill -9 just before any file operation of a save leaves the last complete checkpoint loadable, and the next run
carries on.

What a kill does within a write, beside a run and between ranks is in tests/e2e/test_kill.py.
"""

from __future__ import annotations

import os
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.manager import Checkpoints
from megazero.checkpoint.resume_changes import record_of
from megazero.config.schema import CheckpointConfig, ModelConfig, OptimizerConfig, ParallelConfig, Run
from megazero.mpu.grid import single_process_grid
from megazero.pipeline.build import build_stages
from megazero.zero.optimizer import ShardedOptimizer
from megazero.zero.portions import initialise_state
from megazero.zero.state import ModelState
from tests.checkpoint.runs import names
from tests.checkpoint.test_state import held_by_all
from tests.forks import fork
from tests.parameters import held_fragments

CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
Points = list[tuple[str, int]]
"""Operations, and the iteration that a run resumes from after a kill just before each."""
RUN = Run(
    model=ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=13, seq_length=8),
    optimizer=OptimizerConfig(precision="bf16"),
    parallel=ParallelConfig(device="cpu"),
)
GRID = single_process_grid()


@pytest.fixture(scope="module")
def state() -> ShardedOptimizer:
    """A model's weights, masters and moments."""
    model = ModelState(build_stages(RUN, GRID), GRID, RUN.optimizer, RUN.parallel)
    initialise_state(model, 3)
    return ShardedOptimizer(model, RUN.optimizer, GRID)


def columns(state: ShardedOptimizer, iteration: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each of its tensors, and the values that it has at an iteration."""
    for fragment in held_fragments(state):
        for column, tensor in fragment.columns.items():
            random = torch.Generator().manual_seed(
                zlib.crc32(f"{fragment.spec.name} {fragment.start} {column} {iteration}".encode())
            )
            yield tensor, torch.randn(tensor.shape, generator=random)


def opened(state: ShardedOptimizer, folder: Path, token: str, keep_last: int = 3) -> Checkpoints:
    """`claim` is left to the caller."""
    config = CheckpointConfig(save=str(folder), load=str(folder), keep_last=keep_last)
    return Checkpoints(config, record_of(RUN), state, lambda: held_by_all(RUN, GRID.axes), GRID, token)


def save_at(checkpoints: Checkpoints, state: ShardedOptimizer, *iterations: int) -> None:
    for iteration in iterations:
        for tensor, values in columns(state, iteration):
            tensor.copy_(values)
        state.after_load()
        checkpoints.save(iteration, {"iteration": iteration, "consumed_samples": 24 * iteration})


def resumed_at(state: ShardedOptimizer, folder: Path) -> int:
    """The iteration that a new run finds and loads, its values looked at."""
    for tensor, values in columns(state, 0):
        tensor.copy_(values)
    checkpoints = opened(state, folder, "reader")
    found = checkpoints.find()
    assert found is not None
    checkpoints.load(found)
    iteration = found.progress["iteration"]
    assert isinstance(iteration, int)
    assert all(torch.equal(tensor, values) for tensor, values in columns(state, iteration)), (
        f"{found.path} holds other values"
    )
    return iteration


def killed_at(folder: Path, operation: int, action: Callable[[], None]) -> str | None:
    """Run `action` in a child that is killed just before its change number `operation` within `folder`: which that was,
    and of what. None where it has fewer and came to its end. The child shows what it does by Python's audit events, and
    nothing slows it.
    """
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        left = operation

        def count(event: str, args: tuple[object, ...]) -> None:
            nonlocal left
            path = args[0] if args else None
            if not isinstance(path, str | os.PathLike) or not str(path).startswith(str(folder)):
                return
            if event in CHANGES and (event != "open" or int(str(args[2])) & WRITES):
                if left == 0:
                    left = -1
                    os.write(writing, f"{event} {Path(path).relative_to(folder)}".encode())
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        sys.addaudithook(count)  # cannot be taken away again: hence the child
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    os.close(writing)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(reading) as pipe:
        where = pipe.read()
    assert status == (-signal.SIGKILL if where else 0), f"the child ended with {status}, {where or 'nowhere'}"
    return where or None


SAVED: Points = [
    ("os.mkdir .tmp-iter_0000002-first", 1),
    ("open .tmp-iter_0000002-first/fragments-00001-of-00001.safetensors", 1),
    ("open .tmp-iter_0000002-first/manifest.json", 1),
    ("os.rename .tmp-iter_0000002-first", 1),
    ("open .latest-first", 1),
    ("os.rename .latest-first", 1),
    ("shutil.rmtree .trash-iter_0000001-first", 2),
    ("os.rename iter_0000001", 2),
    ("shutil.rmtree .trash-iter_0000001-first", 2),
    ("os.rmdir .trash-iter_0000001-first", 2),
]


@pytest.mark.slow
def test_killed_at_every_operation_of_a_save(state: ShardedOptimizer, tmp_path: Path) -> None:
    for operation, (point, kept) in enumerate([*SAVED, (None, 2)]):
        folder = tmp_path / str(operation)
        first = opened(state, folder, "first", keep_last=1)
        first.claim()
        save_at(first, state, 1)
        assert killed_at(folder, operation, partial(save_at, first, state, 2)) == point
        assert resumed_at(state, folder) == kept, point
        second = opened(state, folder, "second", keep_last=1)
        second.claim()
        assert resumed_at(state, folder) == kept, point
        assert not [name for name in names(folder) if name.startswith(".")], point
        save_at(second, state, 3)
        assert names(folder) == ["iter_0000003", "latest", "run_token"], point


SAVED_AGAIN = [
    "os.mkdir .tmp-iter_0000002-first",
    "open .tmp-iter_0000002-first/fragments-00001-of-00001.safetensors",
    "open .tmp-iter_0000002-first/manifest.json",
    "os.rename iter_0000002",
    "os.rename .tmp-iter_0000002-first",
    "open .latest-first",
    "os.rename .latest-first",
    "shutil.rmtree .trash-iter_0000002.replaced-first",
    "os.rename iter_0000002.replaced",
    "shutil.rmtree .trash-iter_0000002.replaced-first",
    "os.rmdir .trash-iter_0000002.replaced-first",
]


@pytest.mark.slow
def test_killed_at_every_operation_of_saving_an_iteration_again(state: ShardedOptimizer, tmp_path: Path) -> None:
    """The same name, so the old one must step aside: at no moment is there none."""
    for operation, point in enumerate([*SAVED_AGAIN, None]):
        folder = tmp_path / str(operation)
        first = opened(state, folder, "first")
        first.claim()
        save_at(first, state, 1, 2)
        assert killed_at(folder, operation, partial(save_at, first, state, 2)) == point
        assert resumed_at(state, folder) == 2, point
        opened(state, folder, "second").claim()
        assert names(folder) == ["iter_0000001", "iter_0000002", "latest", "run_token"], point
        assert resumed_at(state, folder) == 2, point


TAKEN_OVER = [
    "os.mkdir .",
    "open .run_token-second-rank-0",
    "os.remove .run_token-second-rank-0",
    "os.mkdir .",
    "open .run_token-second",
    "os.rename .run_token-second",
    "shutil.rmtree .trash-tmp-iter_0000002-first-second",
    "os.rename .tmp-iter_0000002-first",
    "shutil.rmtree .trash-tmp-iter_0000002-first-second",
    "os.rmdir .trash-tmp-iter_0000002-first-second",
    "os.rename iter_0000002.replaced",
]


@pytest.mark.slow
def test_killed_at_every_operation_of_taking_over(state: ShardedOptimizer, tmp_path: Path) -> None:
    """From a run that was killed in mid-save."""
    for operation, point in enumerate([*TAKEN_OVER, None]):
        folder = tmp_path / str(operation)
        first = opened(state, folder, "first")
        first.claim()
        save_at(first, state, 1, 2)
        (folder / "iter_0000002").rename(folder / "iter_0000002.replaced")
        (folder / ".tmp-iter_0000002-first").mkdir()
        (folder / ".tmp-iter_0000002-first" / "half").write_text("")
        assert killed_at(folder, operation, opened(state, folder, "second").claim) == point
        assert resumed_at(state, folder) == 2, point
        opened(state, folder, "third").claim()
        assert names(folder) == ["iter_0000001", "iter_0000002", "latest", "run_token"], point
