"""Process groups for a run inside a program, which continues after the run and may have groups of its own.

Nothing here ends the process. An error of one rank is raised on all ranks.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from megazero.config.schema import ParallelConfig
from megazero.config.source import ConfigError
from megazero.launch import World, connected_grid, init_default_group
from megazero.mpu import collectives
from megazero.mpu.grid import ProcessGrid, build_grid
from megazero.mpu.meeting import Environment, are_set, attempt, ranks_store, serves_the_store
from megazero.system import threads

T = TypeVar("T")
PATIENCE = timedelta(minutes=ParallelConfig().distributed_timeout_minutes)
"""How long ranks wait for each other until they agree on the configuration, which has a time limit of its own."""
WAIT_AFTER_FAILURE = 5.0
"""Seconds in which a rank that has failed waits for the others, so that those that fail too do so together."""


@dataclass(frozen=True)
class Rendezvous:
    """How the ranks of one run reach each other.

    environment  rank, world size and their local counterparts
    store        key-value store with a prefix of this run's own; None in a world of one
    guest        whether torch has a default process group already. It belongs to the program and is left as it is
    """

    environment: Environment
    store: dist.Store | None
    guest: bool


def rendezvous() -> Rendezvous:
    """Find the ranks of a run. Every rank calls it once for each run; it adds to one number in the launcher's store.

    Rank and world size are those of torch's default process group if there is one, else those that torchrun put into
    the environment, else of one process. Raises ConfigError if several ranks have no MASTER_ADDR and MASTER_PORT.
    """
    environment, guest = Environment.read(), dist.is_initialized()
    if guest:
        environment = Environment(
            dist.get_rank(), environment.local_rank, dist.get_world_size(), environment.local_world_size
        )
    if environment.world_size == 1:
        return Rendezvous(environment, None, guest)
    store = dist.distributed_c10d._get_default_store() if guest else ranks_store(environment, PATIENCE)
    # Restarted ranks count their calls from one again, but torchrun's store still has the counts of the last attempt.
    number = store.add(f"{attempt()}/calls of rank {environment.rank}", 1)
    return Rendezvous(environment, dist.PrefixStore(f"{attempt()}/call {number}", store), guest)


def result_on_all_ranks(
    find: Callable[[], T], meeting: Rendezvous, occasion: str = "begin", patience: timedelta = PATIENCE
) -> T:
    """Call `find` on every rank, and return its result on this rank if no rank has failed.

    occasion: for what the ranks meet; a run may have each occasion once. patience: how long ranks wait for each other.

    Raises what `find` raises here, after `WAIT_AFTER_FAILURE` at the latest: other ranks may prepare data for minutes.
    If it failed only on other ranks, raises a ConfigError with the problems of one of them, or a RuntimeError with its
    error. Each rank sets and reads a few keys of the store, at any world size.
    """
    environment = meeting.environment
    if meeting.store is None:
        return find()
    store = dist.PrefixStore(occasion, meeting.store)
    failure: Exception | None = None
    try:
        result = find()
    except Exception as error:
        failure = error
        problems = error.problems if isinstance(error, ConfigError) else None
        report = {"rank": environment.rank, "problems": problems, "error": f"{type(error).__name__}: {error}"}
        store.compare_set("wrong", "", json.dumps(report))
    if store.add("arrived", 1) == environment.world_size:
        store.set("all have arrived", "yes")
    # a rank that serves the store stays: the others need its process to know of the failure
    if failure is None or serves_the_store(environment):
        store.wait(["all have arrived"], patience)
    else:
        with suppress(Exception):  # rank 0 may serve the store, and has ended
            are_set(store, ["all have arrived"], WAIT_AFTER_FAILURE)
    if isinstance(failure, ConfigError):
        arrived = False
        with suppress(Exception):
            arrived = store.check(["all have arrived"])
        raise ConfigError(failure.problems, failure.notes, of_all_ranks=arrived) from failure
    if failure is not None:
        raise failure
    if store.check(["wrong"]):
        wrong = json.loads(store.get("wrong"))
        if wrong["problems"] is not None:
            raise ConfigError([f"rank {wrong['rank']}: {problem}" for problem in wrong["problems"]], of_all_ranks=True)
        raise RuntimeError(f"rank {wrong['rank']} could not begin: {wrong['error']}")
    return result


def result_of_rank_0(find: Callable[[], T], meeting: Rendezvous, occasion: str) -> T:
    """What `find` returns on rank 0, which alone calls it, on every rank: as JSON holds it. Otherwise as
    `result_on_all_ranks`.
    """
    store = None if meeting.store is None else dist.PrefixStore(f"result of {occasion}", meeting.store)

    def of_this_rank() -> str:
        if meeting.environment.rank:
            return ""
        text = json.dumps(find())
        if store is not None:
            store.set("result", text)
        return text

    text = result_on_all_ranks(of_this_rank, meeting, occasion)
    if not text and store is not None:
        text = store.get("result").decode()
    result: T = json.loads(text)
    return result


@contextmanager
def process_groups(world: World, meeting: Rendezvous, parallel: ParallelConfig) -> Iterator[ProcessGrid]:
    """A context with this rank's grid. Its groups are destroyed at the end of the block; the program's own stay.

    Creating and destroying groups are collectives of the world. A ConfigError that leaves the block must be raised on
    all ranks. After any other exception the groups stay, because destroying them would wait for ranks that may be gone.
    """
    if world.axes.world_size == 1:
        yield build_grid(world.axes, world.device)
        return
    if not meeting.guest:
        assert meeting.store is not None, "several ranks have a store"
        init_default_group(world, meeting.store, meeting.environment)
    grid = connected_grid(world, parallel, world.backend if meeting.guest else None)
    try:
        yield grid
    except ConfigError:
        _end(grid, meeting)
        raise
    _end(grid, meeting)


def _end(grid: ProcessGrid, meeting: Rendezvous) -> None:
    collectives.barrier(grid.world)
    gc.collect()  # frees reference cycles of the run, which would keep threads waiting for messages
    if not meeting.guest:
        dist.destroy_process_group()
    for handle in grid.made:
        dist.destroy_process_group(handle)


@contextmanager
def settings_of_torch(environment: Environment) -> Iterator[None]:
    """Restore process-wide settings of torch after the block: number of threads, deterministic algorithms."""
    number, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads.threads_set_by_user() or threads.threads_per_rank(environment.local_world_size))
    try:
        yield
    finally:
        torch.set_num_threads(number)
        if torch.are_deterministic_algorithms_enabled() != strict:
            torch.use_deterministic_algorithms(strict)
