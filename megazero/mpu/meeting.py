"""How the ranks of a run find each other before there are process groups: the variables of a launcher, a key-value
store, and who has come to it. A rank that ends instead reports in the store why.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch.distributed as dist

from megazero.config.source import ConfigError
from megazero.mpu.shared_memory import PeerError
from megazero.system.status import FAILED, MISTAKEN
from megazero.system.words import counted

WAIT_FOR_READERS = 30.0
"""Seconds in which rank 0, where it serves the ranks' store, waits for the other ranks to read there why it ends."""
PATIENCE = timedelta(seconds=30)
"""How long a rank that has something to report waits for rank 0 to serve the store."""
LOOKS = 0.5
"""Seconds between two looks of a rank that waits for the others to come. Hundreds of ranks may wait."""
FIRST_REPORT = "megazero/first report"
"""A key in the launcher's store, set by the first rank that has reported why the run ends: a list in JSON of its rank,
its exit status, a sentence for the other ranks, and what it says is wrong.
"""
_OUTCOME = "megazero/outcome of the meeting"
"""A key of the ranks' store, for which ranks without a launcher wait: set by the last that comes, or by the first that
reports.
"""
_ALL_ARE_HERE, _REPORTED = "all are here", "one has reported"
_COME = "megazero/ranks that have come"
"""Three things of the ranks that have come: how many (the key itself), which, and from where the process of each is."""
SHORT = 160
"""Characters of what is wrong with another rank, in a line."""
NOTHING_WRONG = "nothing wrong"
NAMED = 8
"""Ranks that a message names."""
_PORTS = 1 << 16
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Environment:
    """Rank and world size as the launcher (torchrun, Slurm) put them into the environment; without one, one process."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def read(cls) -> Environment:
        """Raises ConfigError for variables that are no numbers, or contradict each other."""
        given = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        wrong = [
            f"{name} is {text!r} in the environment: no whole number"
            for name, text in given.items()
            if not text.strip().isdecimal()
        ]
        if wrong:
            raise ConfigError(wrong)
        world = int(given.get("WORLD_SIZE", 1))
        rank, local_rank, local_world = (
            int(given.get(name, missing))
            for name, missing in (("RANK", 0), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", world))
        )
        if not 0 <= rank < world:
            ranks = "ranks are 0 to WORLD_SIZE - 1"
            raise ConfigError([f"RANK is {rank} and WORLD_SIZE is {world} in the environment: {ranks}"])
        return cls(rank, local_rank, world, local_world)

    @property
    def ranks_here(self) -> range:
        """The ranks of this host, which have consecutive numbers."""
        first = self.rank - self.local_rank
        return range(max(0, first), min(self.world_size, first + self.local_world_size))


class RankEnded(PeerError):
    """A rank has ended before all ranks have met. status: its exit status, as far as that is known."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class MeetingError(RuntimeError):
    """Ranks do not meet, as far as this rank knows the first to notice why: it has told the others already.

    status: that of the program. readers: ranks that are there to read why, this one among them.
    """

    def __init__(self, message: str, status: int = FAILED, readers: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.status, self.readers = status, readers


def agent_serves() -> bool:
    """Whether torchrun serves the store, which then exists before any process group and after a rank has ended."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def attempt() -> str:
    """A prefix of keys in the launcher's store. torchrun's store still has the keys of ranks that it has restarted."""
    return f"megazero/attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def serves_the_store(environment: Environment) -> bool:
    """Whether this rank serves the ranks' store, because there is no launcher that does."""
    return environment.rank == 0 and not agent_serves()


def store_of(environment: Environment, patience: timedelta = PATIENCE) -> dist.Store:
    """The launcher's key-value store, before any process group exists. Without a launcher's, rank 0 serves one."""
    if dist.is_initialized() and not agent_serves():
        return dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(attempt(), ranks_store(environment, patience))


def ranks_store(environment: Environment, patience: timedelta) -> dist.Store:
    """torchrun's store; without torchrun, a store that rank 0 serves as long as its process lives.

    patience: how long a rank waits for rank 0 to serve it. Raises ConfigError if the environment does not say where, or
    if the port is in use, and MeetingError if rank 0 does not come.
    """
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ConfigError(
            [f"WORLD_SIZE is {environment.world_size}, but MASTER_ADDR and MASTER_PORT do not say where the ranks meet"]
        )
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not _is_port(port):
        raise ConfigError([f"MASTER_PORT is {port!r} in the environment: a port is 1 to {_PORTS - 1}"])
    return _connected_store(address, int(port), patience, serves=serves_the_store(environment))


@cache
def _connected_store(address: str, port: int, patience: timedelta, *, serves: bool) -> dist.Store:
    try:
        return dist.TCPStore(
            address,
            port,
            is_master=serves,
            timeout=patience,
            multi_tenant=True,  # the process of rank 0 may serve the ranks' meeting already
            wait_for_workers=False,  # rank 0 has something to say, whether or not all others come
        )
    except dist.DistError as error:
        place = f"MASTER_ADDR {address}, MASTER_PORT {port}"
        if "EADDRINUSE" in str(error):
            raise ConfigError(
                [
                    f"{place}: rank 0 serves the store of the ranks there, and the port is in use. Is RANK 0 in two "
                    "processes? Each rank needs a RANK of its own. Or does another run or program use the port? Then "
                    "give all ranks another MASTER_PORT"
                ]
            ) from error
        raise MeetingError(
            f"rank 0, which serves the store of the ranks, cannot be reached at {place} in {_minutes(patience)}: "
            f"is it started, and are both the same on all ranks? ({str(error).splitlines()[0][:SHORT]})"
        ) from error


def _is_port(text: str) -> bool:
    return text.strip().isdecimal() and 0 < int(text) < _PORTS


def _minutes(timeout: timedelta) -> str:
    return f"{timeout.total_seconds() / 60:g} minutes (--distributed-timeout-minutes)"


def are_set(store: dist.Store, keys: list[str], seconds: float, pause: float = 0.05) -> bool:
    """Wait until all these keys are set, and return whether they are. pause: seconds between two looks."""
    deadline = time.monotonic() + seconds  # `Store.wait` would write lines about a timeout to stderr
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def checks_of(rank: int, *, together: bool = False) -> str:
    """A key of the launcher's store, set when that rank's checks have ended: to `NOTHING_WRONG`, or to its exit status
    after it has reported what is wrong. together: of the checks that ranks make when they have met.
    """
    return f"megazero/checks {'together' if together else 'alone'}/{rank}"


def report_nothing_wrong(environment: Environment) -> None:
    """Tell the ranks that have found something wrong that this rank has not, and waits for them to meet."""
    with suppress(Exception):  # where the store is gone, the ranks do not meet either
        store_of(environment).set(checks_of(environment.rank), NOTHING_WRONG)


def report_first(store: dist.Store, rank: int, status: int, reason: str, problem: str) -> int:
    """Note that a rank has reported why the run ends, unless another was before, and wake the ranks that wait for all
    to come. Returns the rank that is noted.
    """
    report = json.dumps([rank, status, reason, problem[:SHORT]])
    first = int(json.loads(store.compare_set(FIRST_REPORT, "", report))[0])
    store.compare_set(_OUTCOME, "", _REPORTED)
    return first


def let_others_read(environment: Environment, status: int, readers: Sequence[int] | None = None) -> None:
    """Without a launcher: say in the store that this rank ends. The rank that serves the store stays until the readers
    have said so, for some time. readers: all ranks, if None.
    """
    if not agent_serves() and not dist.is_initialized():
        with suppress(Exception):  # the store may be gone, and rank 0 with it
            store = store_of(environment)
            store.set(checks_of(environment.rank), str(status))
            if serves_the_store(environment):
                others = set(range(environment.world_size) if readers is None else readers) - {0}
                are_set(store, [checks_of(other) for other in others], WAIT_FOR_READERS)


def meet(environment: Environment, timeout: timedelta) -> dist.Store:
    """The store of the ranks, when all have come to it. Raises RankEnded if one has reported why the run ends instead,
    and MeetingError if this rank is the first to notice that ranks are missing, or is there twice.

    torchrun ends the ranks that wait for one that has failed. Without it nobody does, and each rank has to look.
    """
    if agent_serves():
        report_nothing_wrong(environment)
        store, _, _ = next(dist.rendezvous("env://", environment.rank, environment.world_size, timeout=timeout))
        return store
    store, report = store_of(environment, timeout), None
    try:
        _come(store, environment)
        if not are_set(store, [_OUTCOME], timeout.total_seconds(), LOOKS):
            _end_without_missing(store, environment, timeout)
        # The outcome, and not the report, decides: a rank may report soon after all ranks have gone on from here.
        if store.get(_OUTCOME) == _REPORTED.encode():
            report = json.loads(store.get(FIRST_REPORT))
    except dist.DistError as error:
        raise RankEnded("rank 0, which serves the store of the ranks, has ended", FAILED) from error
    if report is not None:
        first, status, _, problem = report
        raise RankEnded(f"rank {first} says {problem}", status)
    return store


def _come(store: dist.Store, environment: Environment) -> None:
    """Take this rank's place among those that have come. Raises MeetingError if another process has it."""
    rank, process = environment.rank, f"process {os.getpid()} of {socket.gethostname()}"
    first = store.compare_set(f"{_COME}/process of {rank}", "", process).decode()
    if first != process:
        problem = f"RANK is {rank} in {first} and in {process}: each rank needs a RANK of its own"
        _end_meeting(store, rank, MISTAKEN, problem)
        port = f"; if these are two runs, give one another MASTER_PORT than {os.environ.get('MASTER_PORT')}"
        raise MeetingError(problem + port, MISTAKEN)
    if rank == 0:  # only for rank 0 do others wait before they report
        store.set(checks_of(0), NOTHING_WRONG)
    # One key, which is read at once: keys of many ranks would be read one by one. torch's stubs do not know `append`.
    store.append(f"{_COME}/which", f"{rank} ")  # type: ignore[attr-defined]
    if store.add(_COME, 1) == environment.world_size:
        store.compare_set(_OUTCOME, "", _ALL_ARE_HERE)


def _end_without_missing(store: dist.Store, environment: Environment, timeout: timedelta) -> None:
    """At the end of the wait: raise MeetingError with the ranks that have not come, unless another rank does so."""
    world, came = environment.world_size, {int(rank) for rank in store.get(f"{_COME}/which").split()}
    missing = [rank for rank in range(world) if rank not in came]
    named, others = ", ".join(map(str, missing[:NAMED])), missing[NAMED:]
    rest = f" and {counted(len(others), 'other')}" * bool(others)
    ranks, have = ("rank", "has") if len(missing) == 1 else ("ranks", "have")
    problem = f"{ranks} {named}{rest} of {world} {have} not come in {_minutes(timeout)}"
    if _end_meeting(store, environment.rank, FAILED, problem) == environment.rank:
        raise MeetingError(problem, readers=sorted(came))


def _end_meeting(store: dist.Store, rank: int, status: int, problem: str) -> int | None:
    """Report why ranks do not meet, by a process that need not be one of them, and return the rank whose report is the
    first. None, and nothing is reported, if they have met: their run is not this process's to end.
    """
    if store.compare_set(_OUTCOME, "", _REPORTED) != _REPORTED.encode():
        return None
    return report_first(store, rank, status, problem, problem)


def report_no_rank(problem: str) -> None:
    """Where the environment of a process says no rank, without a launcher: end the meeting of those that wait for it,
    if their store can be reached in some time. problem: what is wrong with the environment.
    """
    rank = os.environ.get("RANK", "").strip()
    # A process whose RANK is 0 would serve the store itself.
    if rank.isdecimal() and int(rank) > 0 and not agent_serves():
        with suppress(Exception):  # nobody may serve it
            environment = Environment(int(rank), 0, int(rank) + 1, 1)
            _end_meeting(store_of(environment), environment.rank, MISTAKEN, problem)
