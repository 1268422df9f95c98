"""A crash at any point of a save leaves the last complete checkpoint loadable, and the next run carries on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoint.runs import names, open_run, resumed_at, save_at

CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree")


def dies_at(folder: Path, operation: int, action: Callable[[], None]) -> bool:
    """Run `action` in a child that dies just before its file operation number `operation` within `folder`; whether it did."""
    child = os.fork()
    if child == 0:
        left = operation

        def count(event: str, args: tuple[object, ...]) -> None:
            nonlocal left
            if event in CHANGES and isinstance(args[0], str | os.PathLike) and str(args[0]).startswith(str(folder)):
                if left == 0:
                    os._exit(9)
                left -= 1

        sys.addaudithook(count)  # cannot be taken away again: hence the child
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), f"the child failed with {status}"
    return status == 9


def test_died_at_every_operation_of_a_save(tmp_path):
    operation, outcomes = 0, []
    while True:
        folder = tmp_path / str(operation)
        first, state = open_run(folder, "first", keep_last=1)
        first.claim()
        save_at(first, state, 1)
        died = dies_at(folder, operation, partial(save_at, first, state, 2))
        outcomes.append(resumed_at(folder))
        second, state = open_run(folder, "second", keep_last=1)
        second.claim()
        assert resumed_at(folder) == outcomes[-1]
        assert not [name for name in names(folder) if name.startswith(".")]
        save_at(second, state, 3)
        assert names(folder) == ["iter_0000003", "latest", "run_token"]
        if not died:
            break
        operation += 1
    assert operation > 10
    moved = outcomes.index(2)
    assert outcomes == [1] * moved + [2] * (len(outcomes) - moved), "once the new one is taken, it stays"


def test_died_at_every_operation_of_saving_an_iteration_again(tmp_path):
    """The same name, so the old one must step aside: at no moment is there none."""
    operation = 0
    while True:
        folder = tmp_path / str(operation)
        first, state = open_run(folder, "first")
        first.claim()
        save_at(first, state, 1, 2)
        died = dies_at(folder, operation, partial(save_at, first, state, 2))
        assert resumed_at(folder) == 2
        second, state = open_run(folder, "second")
        second.claim()
        assert names(folder) == ["iter_0000001", "iter_0000002", "latest", "run_token"]
        assert resumed_at(folder) == 2
        if not died:
            break
        operation += 1
    assert operation > 10


def test_died_at_every_operation_of_taking_over(tmp_path):
    operation = 0
    while True:
        folder = tmp_path / str(operation)
        first, state = open_run(folder, "first")
        first.claim()
        save_at(first, state, 1, 2)
        (folder / "iter_0000002").rename(folder / "iter_0000002.replaced")
        (folder / ".tmp-iter_0000002-first").mkdir()
        (folder / ".tmp-iter_0000002-first" / "half").write_text("")
        second, state = open_run(folder, "second")
        died = dies_at(folder, operation, second.claim)
        assert resumed_at(folder) == 2
        third, state = open_run(folder, "third")
        third.claim()
        assert names(folder) == ["iter_0000001", "iter_0000002", "latest", "run_token"]
        if not died:
            break
        operation += 1
    assert operation > 4


VICTIM = """
import sys
from pathlib import Path
from tests.checkpoint.runs import open_run, resumed_at, save_at

folder, token = Path(sys.argv[1]), sys.argv[2]
checkpoints, state = open_run(folder, token, keep_last=2)
checkpoints.claim()
iteration = (resumed_at(folder) or 0) + 1
print("ready", flush=True)
while True:
    save_at(checkpoints, state, iteration)
    print(iteration, flush=True)
    iteration += 1
"""


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    """kill -9 of a process that does nothing but save; what it said was saved is there, with the right values."""
    folder, reached = tmp_path / "saved", 0
    for number in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(folder), f"run{number}"],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        said = [process.stdout.readline()] if number % 2 else []  # so that it gets on, however busy the machine is
        time.sleep(0.05 + 0.173 * number)
        process.send_signal(signal.SIGKILL)
        said += process.stdout.read().split()
        process.wait()
        found = resumed_at(folder)
        reached = max(reached, *(int(line) for line in said), 0) if said else reached
        assert (found or 0) in (reached, reached + 1)
        reached = found or 0
    assert reached >= 3
    last, state = open_run(folder, "last", keep_last=2)
    last.claim()
    save_at(last, state, reached + 1)
    assert names(folder) == [f"iter_{reached:07d}", f"iter_{reached + 1:07d}", "latest", "run_token"]
