"""Ranks that were started by hand, without a launcher: what each says, and its status, when they do not meet."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import pytest
import torch.distributed as dist

from megazero.cli.main import main
from megazero.config.source import ConfigError
from megazero.launch import exit_now
from megazero.mpu import meeting
from megazero.mpu.meeting import Environment, MeetingError, meet
from megazero.system.loopback import free_port

SHORT_WAIT = 0.1
"""Minutes for which a rank waits for one that never comes: the others have the time to come on a busy machine."""


@dataclass(frozen=True)
class End:
    """How a rank ended: its status, what it printed, and seconds since all were started."""

    status: int | None
    told: str
    seconds: float


@pytest.fixture
def port() -> int:
    return free_port()


def be_rank(variables: dict[str, str], words: list[str], output: str) -> NoReturn:
    """Be a process that a person started with these variables."""
    sink = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.environ.update(variables)
    meeting.WAIT_FOR_READERS = 5.0  # also of ranks that nobody has started
    try:
        status: int | None = main(words)
    except SystemExit as end:
        status = int(str(end.code))
    exit_now(status or 0)


def ends(
    ranks: Sequence[int],
    size: int,
    port: int,
    folder: Path,
    minutes: float = 1.0,
    command: str = "generate",
    wrong: Mapping[int, str] = MappingProxyType({}),
) -> list[End]:
    """Start a process for each rank, and let all come to their ends. wrong: a word that only this rank's flags have."""
    context, begin, started = multiprocessing.get_context("forkserver"), time.monotonic(), []
    context.set_forkserver_preload([__name__])
    (folder / "text").write_text("a")
    for number, rank in enumerate(ranks):
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        world = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": "1"}
        words = [command, str(folder), "--tp", str(size), "--distributed-timeout-minutes", str(minutes)]
        words += {"generate": ["--prompt", "a"], "evaluate": ["--input", str(folder / "text")]}[command]
        output = folder / f"{number}"
        words += [wrong[rank]] if rank in wrong else []
        process = context.Process(target=be_rank, args=(place | world, words, str(output)))
        process.start()
        started.append((process, output))
    result = []
    for process, output in started:
        process.join()
        result.append(End(process.exitcode, output.read_text(), time.monotonic() - begin))
        assert "Traceback" not in result[-1].told
    return result


@pytest.mark.slow
def test_a_rank_outside_the_world_ends_those_that_wait_for_it(port: int, tmp_path: Path) -> None:
    first, outside = ends([0, 2], 2, port, tmp_path)
    problem = "RANK is 2 and WORLD_SIZE is 2 in the environment: ranks are 0 to WORLD_SIZE - 1"
    assert (first.status, outside.status) == (2, 2)
    assert f"  1. {problem}" in outside.told
    assert first.told == f"rank 0 stopped: rank 2 says {problem}\n" and first.seconds < 30


@pytest.mark.slow
def test_the_wait_ends_with_the_ranks_that_have_not_come(port: int, tmp_path: Path) -> None:
    """Of two ranks that wait as long, one says it, and the other says what that one said."""
    both = ends([0, 3], 5, port, tmp_path, SHORT_WAIT)
    problem = "ranks 1, 2, 4 of 5 have not come in 0.1 minutes (--distributed-timeout-minutes)"
    told = [f"rank {rank} stopped: {problem}\n" for rank in (0, 3)]
    heard = [f"rank {rank} stopped: rank {other} says {problem}\n" for rank, other in ((0, 3), (3, 0))]
    assert [end.told for end in both] in ([told[0], heard[1]], [heard[0], told[1]])
    assert [end.status for end in both] == [1, 1]


@pytest.mark.parametrize(
    ("came", "size", "named"),
    [
        ("0 2 ", 3, "rank 1 of 3 has"),
        ("0 ", 10, "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 1 other of 10 have"),
        ("3 ", 2048, "ranks 0, 1, 2, 4, 5, 6, 7, 8 and 2,039 others of 2048 have"),
    ],
)
def test_a_message_names_some_of_many_missing_ranks(came: str, size: int, named: str) -> None:
    store, rank = dist.HashStore(), int(came.split()[0])
    store.set(f"{meeting._COME}/which", came)
    with pytest.raises(MeetingError, match=rf"^{named} not come in 3 minutes") as error:
        meeting._end_without_missing(store, Environment(rank, 0, size, 1), timedelta(minutes=3))
    assert error.value.readers == [int(other) for other in came.split()]


def test_nobody_is_missing_where_the_last_comes_at_the_end_of_the_wait() -> None:
    store = dist.HashStore()
    store.set(f"{meeting._COME}/which", "0 ")
    store.set(meeting._OUTCOME, meeting._ALL_ARE_HERE)
    meeting._end_without_missing(store, Environment(0, 0, 2, 1), timedelta(minutes=3))
    assert not store.check([meeting.FIRST_REPORT])


@pytest.mark.slow
def test_rank_0_in_two_processes_is_one_message_with_the_port(port: int, tmp_path: Path) -> None:
    """One of them serves the store, and waits for rank 1."""
    refused, waiting = sorted(ends([0, 0], 2, port, tmp_path, SHORT_WAIT), key=lambda end: end.status != 2)
    assert (refused.status, waiting.status) == (2, 1)
    assert refused.told.startswith("1 problem in the configuration:\n  1. MASTER_ADDR 127.0.0.1, MASTER_PORT")
    for part in (f"MASTER_PORT {port}", "the port is in use", "RANK 0 in two processes", "another MASTER_PORT"):
        assert part in refused.told
    assert waiting.told.startswith("rank 0 stopped: rank 1 of 2 has not come in 0.1 minutes")


@pytest.mark.slow
def test_another_rank_in_two_processes_ends_all_that_wait(port: int, tmp_path: Path) -> None:
    first, *twins = ends([0, 1, 1], 3, port, tmp_path)
    refused, other = sorted(twins, key=lambda end: "rank 1 says" in end.told)
    assert [end.status for end in (first, refused, other)] == [2, 2, 2] and first.seconds < 30
    problem, _, advice = refused.told.partition("; ")
    assert problem.startswith("rank 1 stopped: RANK is 1 in process ") and problem.endswith("a RANK of its own")
    assert problem.count(f" of {socket.gethostname()}") == 2 and f"another MASTER_PORT than {port}" in advice
    problem = problem.removeprefix("rank 1 stopped: ")
    assert first.told == f"rank 0 stopped: rank 1 says {problem}\n"
    assert other.told == f"rank 1 stopped: rank 1 says {problem}\n"


def test_a_second_run_at_the_port_of_one_that_has_met_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store, rank_1 = dist.HashStore(), Environment(1, 0, 2, 1)
    monkeypatch.setenv("MASTER_PORT", "29999")
    monkeypatch.setattr(meeting, "store_of", lambda *_: store)
    store.add(meeting._COME, 1)  # of rank 0
    assert meet(rank_1, timedelta(minutes=1)) is store
    monkeypatch.setattr("os.getpid", lambda: 77)
    with pytest.raises(MeetingError, match=r"RANK is 1 in process .* and in process 77 of .* MASTER_PORT than 29999"):
        meet(rank_1, timedelta(minutes=1))
    assert not store.check([meeting.FIRST_REPORT]), "a failure of the first run would be taken for its consequence"


@pytest.mark.slow
def test_a_rank_says_where_it_looked_for_rank_0(port: int, tmp_path: Path) -> None:
    (alone,) = ends([1], 2, port, tmp_path, SHORT_WAIT)
    said = f"cannot be reached at MASTER_ADDR 127.0.0.1, MASTER_PORT {port} in 0.1 minutes"
    assert f"rank 1 stopped: rank 0, which serves the store of the ranks, {said}" in alone.told and alone.status == 1


@pytest.mark.parametrize("number", ["29500a", "0", "65536", ""])
def test_a_port_that_is_none_is_a_mistake(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", number)
    with pytest.raises(ConfigError, match=f"MASTER_PORT is '{number}' in the environment: a port is 1 to 65535"):
        meet(Environment(0, 0, 2, 1), timedelta(minutes=1))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("command", "word", "problem"),
    [
        ("generate", "--top-k=-1", "--top-k (-1) is negative"),
        ("generate", "--top-k=x", "--top-k: 'x' is not a whole number (megazero generate --help lists the flags)"),
        ("evaluate", "--limit=-1", "--limit -1: must be at least 1"),
        (
            "evaluate",
            "--limits",
            "there is no --limits; did you mean --limit? (megazero evaluate --help lists the flags)",
        ),
    ],
)
def test_a_mistake_in_the_flags_of_one_rank_ends_the_others(
    command: str, word: str, problem: str, rank: int, port: int, tmp_path: Path
) -> None:
    """Its flags are wrong for the command's check, or for the parser before it."""
    both = ends([0, 1], 2, port, tmp_path, command=command, wrong={rank: word})
    assert [end.status for end in both] == [2, 2] and both[1 - rank].seconds < 30
    assert both[rank].told == f"{'rank 1: ' * rank}1 problem in the configuration:\n  1. {problem}\n"
    assert both[1 - rank].told == f"rank {1 - rank} stopped: rank {rank} says {problem}\n"
