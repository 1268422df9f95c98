"""Process groups for a run inside a program that goes on after it, and that may have groups of its own.

Nothing here ends the process: what is wrong on one rank becomes an error on all.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist

from megazero.config.schema import ParallelConfig
from megazero.config.source import ConfigError
from megazero.launch import Environment, World, agent_serves, begin
from megazero.mpu import collectives
from megazero.mpu.grid import ProcessGrid, build_grid
from megazero.system import threads

T = TypeVar("T")
PATIENCE = timedelta(minutes=ParallelConfig().distributed_timeout_minutes)
"""How long ranks wait for each other before the configuration, which might say otherwise, is agreed on."""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one run find each other.

    store  key-value store of this run alone; None in a world of one
    guest  whether torch has a default process group already, the program's, which is left as it is
    """

    environment: Environment
    store: dist.Store | None
    guest: bool


def meet() -> Meeting:
    """Called by all ranks of a run, once for each run. Communicates one number through the launcher's store.

    Ranks and world are those of torch's default process group where there is one, else what torchrun has put into the
    environment, else one process. Raises ConfigError where a world of several has no address.
    """
    here, guest = Environment.read(), dist.is_initialized()
    if guest:
        here = Environment(dist.get_rank(), here.local_rank, dist.get_world_size(), here.local_world_size)
    if here.world_size == 1:
        return Meeting(here, None, guest)
    if guest:
        store = dist.distributed_c10d._get_default_store()
    elif "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        store = _launchers_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), here)
    else:
        raise ConfigError(
            [f"WORLD_SIZE is {here.world_size}, but MASTER_ADDR and MASTER_PORT do not say where the ranks meet"]
        )
    # Restarted ranks have made no calls, but torchrun's store remembers those of the attempt before.
    base = f"megazero/attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    number = store.add(f"{base}/calls of rank {here.rank}", 1)
    return Meeting(here, dist.PrefixStore(f"{base}/call {number}", store), guest)


@cache
def _launchers_store(address: str, port: int, here: Environment) -> dist.Store:
    """torchrun's store; without torchrun one that rank 0 serves for as long as its process lives."""
    serves = here.rank == 0 and not agent_serves()
    return dist.TCPStore(
        address, port, here.world_size, serves, timeout=PATIENCE, wait_for_workers=False, multi_tenant=True
    )


def agreed(find: Callable[[], T], meeting: Meeting) -> T:
    """What `find` gives on this rank, once it has given something on every rank. Called by all ranks.

    Raises what it raises here. Where it has failed on other ranks only, raises ConfigError with the problems of one of
    them, or RuntimeError with its error. Each rank sends and reads a few numbers, whatever the world's size.
    """
    store, here = meeting.store, meeting.environment
    if store is None:
        return find()
    failure: Exception | None = None
    try:
        found = find()
    except Exception as error:
        failure = error
        problems = error.problems if isinstance(error, ConfigError) else None
        words = {"rank": here.rank, "problems": problems, "error": f"{type(error).__name__}: {error}"}
        store.compare_set("wrong", "", json.dumps(words))
    if store.add("arrived", 1) == here.world_size:
        store.set("all have arrived", "yes")
    store.wait(["all have arrived"], PATIENCE)
    if failure is not None:
        raise failure
    if store.check(["wrong"]):
        wrong = json.loads(store.get("wrong"))
        if wrong["problems"] is not None:
            raise ConfigError([f"rank {wrong['rank']}: {problem}" for problem in wrong["problems"]])
        raise RuntimeError(f"rank {wrong['rank']} could not begin: {wrong['error']}")
    return found


@contextmanager
def process_groups(world: World, meeting: Meeting, *, shared_memory: bool) -> Iterator[ProcessGrid]:
    """The grid of this rank for the length of the block; all groups are gone after it, the program's own excepted.

    A ConfigError that leaves the block is one that all ranks have agreed on. After any other error the groups are left
    as they are: tearing them down would wait for ranks that may be gone.
    """
    if world.axes.world_size == 1:
        yield build_grid(world.axes, world.device)
        return
    if not meeting.guest:
        here = meeting.environment
        begin(world, store=meeting.store, rank=here.rank, world_size=here.world_size)
    backend = world.backend if meeting.guest else None
    grid = build_grid(world.axes, world.device, world.timeout, shared_memory=shared_memory, guest_backend=backend)
    try:
        yield grid
    except ConfigError:
        _end(grid, meeting)
        raise
    _end(grid, meeting)


def _end(grid: ProcessGrid, meeting: Meeting) -> None:
    collectives.barrier(grid.world)
    gc.collect()  # what is left of a run in reference cycles would keep threads that wait for messages
    if not meeting.guest:
        dist.destroy_process_group()
    for handle in grid.made:
        dist.destroy_process_group(handle)


@contextmanager
def settings_of_torch(environment: Environment) -> Iterator[None]:
    """What a run sets for its whole process is as before after the block: threads, deterministic kernels."""
    number, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads.given() or threads.share(environment.local_world_size))
    try:
        yield
    finally:
        torch.set_num_threads(number)
        if torch.are_deterministic_algorithms_enabled() != strict:
            torch.use_deterministic_algorithms(strict)
