"""Every reader, a corpus of damaged files and some new ones: it reads a file or refuses it by its own error, quickly
and within memory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.search import CORPUS
from tests.fuzz.targets import all_targets

EXAMPLES = 28
"""Files drawn for each reader; `make fuzz` draws more."""
SEED = 1122
"""A change is judged by the same files each time; new ones are drawn by `make fuzz`."""
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_no_file_surprises_a_reader(tmp_path: Path) -> None:
    """In a process of its own, which a reader may end."""
    words = f"-m tests.fuzz --examples {EXAMPLES} --seed {SEED} --found {tmp_path}"
    done = subprocess.run(
        [sys.executable, *words.split()], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    left = [f"{path.name}: {path.read_bytes()[:200]!r}" for path in tmp_path.glob("last-*")]
    print(done.stdout[-8000:])
    assert done.returncode == 0, (
        f"status {done.returncode}; read at the end: {left}\n{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
    )
    assert "0 findings" in done.stdout


@pytest.mark.slow
def test_the_search_finds(tmp_path: Path) -> None:
    """What it is for: an unexpected exception, a crash and too much memory or time are found, whatever the reader."""
    script = """
import sys, os
from pathlib import Path
from tests.fuzz import search as searching
from tests.fuzz.search import search, within_bounds
from tests.fuzz.targets import Target
searching.SECONDS = 0.3  # each file that is tried for the smallest one takes all of it
folder = Path(sys.argv[1])
path = folder / "x"
def reads(fault):
    def read():
        if b"a" not in path.read_bytes():
            fault()
    return read
faults = {
    "key": lambda: {}["x"],
    "memory": lambda: bytearray(4 << 30),
    "time": lambda: [None for _ in iter(int, 1)],
    "none": lambda: None,
    "refused": lambda: int("x"),
}
with within_bounds():
    for name, fault in faults.items():
        told = search(name, Target(reads(fault), path, [b"aXX"], ValueError), 200, 1, folder)
        print(name, told is not None, flush=True)
    search("crash", Target(reads(os.abort), path, [b"aXX"], ValueError), 200, 1, folder)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told = dict(line.split() for line in done.stdout.splitlines())
    assert told == {"key": "True", "memory": "True", "time": "True", "none": "False", "refused": "False"}, done.stderr
    assert done.returncode < 0 and b"a" not in (tmp_path / "last-crash").read_bytes()


class Waits(BaseException):
    """What no reader catches."""


@pytest.mark.slow
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    """No reader reads a pipe into which nobody writes: a folder that somebody sends may hold one. Refused, or passed
    over where there need be no such file.
    """

    def raise_(*_: object) -> None:
        raise Waits

    waiting, refused = [], 0
    before = signal.signal(signal.SIGALRM, raise_)
    try:
        for name, target in all_targets(tmp_path).items():
            target.path.unlink(missing_ok=True)
            os.mkfifo(target.path)
            signal.alarm(20)
            try:
                target.read()
            except target.errors as error:
                refused += "is a pipe or a device" in str(error)
            except Waits:
                waiting.append(name)
            finally:
                signal.alarm(0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not waiting and refused >= 15, (waiting, refused)


def test_the_corpus_is_small() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert files and sum(path.stat().st_size for path in files) < 200_000
