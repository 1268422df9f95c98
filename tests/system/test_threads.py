"""Ranks of a host divide its cores, unless the user has said how many threads each gets; torchrun's 1 is not the
user's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.system import limits, threads

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch):
    """Sixteen processors of eight cores, no limit of time; returns what sets who may use which."""

    def bind(own: range, launcher: range) -> None:
        monkeypatch.setattr("os.sched_getaffinity", lambda process: set(launcher if process else own))

    monkeypatch.setattr(threads, "_siblings", lambda number: f"core {number % 8}")
    monkeypatch.setattr(threads, "_quota", lambda count: count)
    bind(range(16), range(16))
    return bind


@pytest.mark.parametrize(("ranks", "each"), [(1, 8), (2, 4), (3, 2), (8, 1), (48, 1)])
def test_ranks_divide_the_cores(ranks: int, each: int, host: object) -> None:
    assert threads.threads_per_rank(ranks) == each


def test_a_rank_that_is_bound_to_its_share_keeps_it(host) -> None:
    host(range(2), range(16))
    assert threads.threads_per_rank(4) == 2, "two of eight cores for each of four ranks: not divided again"
    assert threads.threads_per_rank(2) == 2, "no more than it is bound to"
    host(range(4), range(4))
    assert threads.threads_per_rank(2) == 2, "the launcher itself is bound to four cores"


@pytest.mark.parametrize(
    ("limit", "of_sixteen", "of_two"), [("350000 100000\n", 3, 2), ("50000 100000\n", 1, 1), ("max 100000\n", 16, 2)]
)
def test_a_containers_share_of_the_time_counts(
    limit: str, of_sixteen: int, of_two: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    monkeypatch.setattr(limits, "ROOT", tmp_path)
    assert (threads._quota(16), threads._quota(2)) == (of_sixteen, of_two)


RANK = "from megazero.system import threads; print(threads.threads_set_by_user())"
# As torchrun does it: the variable is set for ranks where nobody has, and ranks know that they are some.
LAUNCHER = f"""
import os, subprocess, sys
os.environ.setdefault("OMP_NUM_THREADS", "1")
ranks = os.environ | {{"TORCHELASTIC_RUN_ID": "test"}}
wrapper = ["bash", "-c", '"$@"; true', "bash"] if sys.argv[1:] else []
subprocess.run([*wrapper, sys.executable, "-c", {RANK!r}], env=ranks, check=True)
"""


@pytest.mark.few(cases=3)
@pytest.mark.parametrize("wrapped", [False, True], ids=["", "behind a script"])
@pytest.mark.parametrize(("user", "given"), [(None, "None"), ("1", "1"), ("3", "3"), ("4,2", "4"), ("x", "None")])
def test_a_users_number_counts_and_torchruns_does_not(user: str | None, given: str, wrapped: bool) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in (threads.VARIABLE, threads.BY_TORCHRUN)
    }
    environment |= {"PYTHONPATH": str(ROOT)} | ({} if user is None else {threads.VARIABLE: user})
    words = [sys.executable, "-c", LAUNCHER, *["wrapped"] * wrapped]
    assert subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout.strip() == given


def test_without_torchrun_a_1_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(threads.BY_TORCHRUN, raising=False)
    monkeypatch.setenv(threads.VARIABLE, "1")
    assert threads.threads_set_by_user() == 1
