"""Creates the process groups of a process that is there for one run, and decides with what status it ends."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megazero.config.parse import ConfigError
from megazero.config.schema import ParallelConfig
from megazero.mpu.grid import Axes, ProcessGrid, axes_of, build_grid, stream_options
from megazero.mpu.shared_memory import PeerError
from megazero.system import device as devices
from megazero.system import threads
from megazero.system.status import FAILED, INTERRUPTED, MISTAKEN
from megazero.telemetry.watchdog import die_with_parent

WAIT_FOR_OTHERS = 60.0
"""Seconds within which all ranks that a launcher stops have said that they were told: each imports torch first, on a
host where all do so.
"""
WRONG = "megazero/configuration"
"""In the launcher's store once rank 0 has told what is wrong with the configuration; with a rank behind it, once that
rank knows.
"""
RANK_0_SAYS = "the configuration is wrong; rank 0 says how"


@dataclass(frozen=True)
class Environment:
    """What torchrun (or Slurm, or nobody) told this process. Without a launcher the world is this process."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def read(cls) -> Environment:
        rank, local_rank, world = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
        )
        return cls(rank, local_rank, world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))


@contextmanager
def launch(parallel: ParallelConfig, environment: Environment) -> Iterator[ProcessGrid]:
    """The process grid of this rank for the length of the block, in a process that is there for it alone. dp is world
    size / (tp * pp).

    A world of one needs no process group and makes none. After a failure the groups are left as they are: tearing them
    down would wait for peers that may be gone.
    """
    die_with_parent()
    torch.set_num_threads(threads.given() or threads.share(environment.local_world_size))
    world = world_of(parallel, environment)
    if world.axes.world_size == 1:
        yield build_grid(world.axes, world.device)
        return
    begin(world)
    yield build_grid(world.axes, world.device, world.timeout, shared_memory=parallel.shared_memory)
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class World:
    """What process groups are made of."""

    axes: Axes
    device: torch.device
    backend: str
    timeout: timedelta


def world_of(parallel: ParallelConfig, environment: Environment) -> World:
    """Raises ConfigError for what this machine or this torch does not have."""
    try:
        device = devices.resolve(parallel.device, environment.local_rank)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    axes = axes_of(parallel, environment.world_size)
    if environment.world_size == 1:
        return World(axes, device, "gloo", timeout)
    backend = parallel.backend if parallel.backend != "auto" else _backend_for(device, environment)
    if not dist.is_backend_available(backend):
        raise ConfigError([f"--distributed-backend {backend}: this torch ({torch.__version__}) is built without it"])
    if parallel.cuda_graphs and parallel.tp > 1 and backend != "nccl":
        reason = "which is chosen where ranks share a card" if parallel.backend == "auto" else "which sums on the host"
        raise ConfigError(
            [
                f"--cuda-graphs with --tp {parallel.tp} captures its collectives, which {backend} cannot ({reason}); "
                "nearest: --tp 1"
            ]
        )
    if parallel.cuda_graphs:
        # NCCL registers the memory of captured collectives and takes it for one piece, which a segment that grows is
        # not: hangs and accesses outside of it (pytorch/pytorch#158029).
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    return World(axes, device, backend, timeout)


def begin(world: World, **store: Any) -> None:
    """torch's default group, found through the launcher's environment, or through a store that is given."""
    # Without device_id: given one, torch splits the world's communicator for every further group (ncclCommSplit), and
    # waits for all ranks of the world; but ranks make their own groups only, and use them in their own order
    # (pytorch/pytorch#134314).
    options = stream_options(world.backend, world.timeout)
    dist.init_process_group(world.backend, timeout=world.timeout, pg_options=options, **store)


def _backend_for(device: torch.device, environment: Environment) -> str:
    """nccl on CUDA, but not where ranks share a card, which it refuses."""
    own_card = environment.local_world_size <= devices.device_count(device)
    return "nccl" if device.type == "cuda" and own_card else "gloo"


def exit_status(main: Callable[[], None], environment: Environment) -> int:
    """Run `main` and turn how it ends into the status of the process: 0, 2 for a wrong configuration, 130 for Ctrl-C
    where nothing else hears it, 1 for the rest.
    """
    try:
        main()
    except ConfigError as error:
        _report_once(str(error), environment)
        return MISTAKEN
    except PeerError as error:  # a consequence; who failed first says why, if it still can
        _say_last(f"rank {environment.rank} stopped: {error}", first=False)
        return FAILED
    except KeyboardInterrupt:  # of a program that saves nothing
        print("interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    except Exception:
        _report_failure(traceback.format_exc(), environment)
        return FAILED
    return 0


def leave(status: int) -> NoReturn:
    """End this process now, without tearing the interpreter down.

    Threads that wait for messages are daemons, because a peer that died may never answer. When the interpreter takes
    itself down under a thread that is in the backend's C++ code, the process aborts, and torchrun reports a run that
    ended well as failed (about one in ten on a busy machine). By now the state is saved and every file closed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def stop_early(signal: str, environment: Environment) -> NoReturn:
    """End this process because of a signal that came before the first step, when there is nothing to save.

    Status 0 where all ranks were told, as launchers and schedulers do. A rank that is alone with it has status 1: the
    others would wait for it, and so the launcher ends them. Where rank 0 has told that the configuration is wrong, the
    launcher ends whoever leaves after the first: the status is 2 all the same. Communicates through the launcher's
    store, if it has one.
    """
    world, told = environment.world_size, environment.world_size
    if agent_serves():
        with suppress(Exception):  # the store goes with the launcher, which goes when its ranks have gone
            store, deadline = _store(environment), time.monotonic() + WAIT_FOR_OTHERS
            if store.check([WRONG]):
                if environment.rank:
                    _record(RANK_0_SAYS, first=False)
                leave(MISTAKEN)
            told = store.add("megazero/told to stop", 1)
            while told < world and time.monotonic() < deadline:
                time.sleep(0.05)
                told = store.add("megazero/told to stop", 0)
    if told < world:
        _say_last(
            f"rank {environment.rank} stopped: {signal} came before the first step, and to {told} of {world} ranks "
            "only",
            first=True,
        )
        leave(FAILED)
    if environment.rank == 0:
        print(f"stopped by {signal} before the first step: there is nothing to save", flush=True)
    leave(0)


def agent_serves() -> bool:
    """Whether torchrun keeps the store, so that it is there before any process group and after a rank has gone."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(environment: Environment) -> dist.Store:
    """The launcher's key-value store, before any process group exists."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        environment.world_size,
        is_master=environment.rank == 0 and not agent_serves(),
        timeout=timedelta(seconds=30),
    )


def _say_last(message: str, *, first: bool) -> None:
    """A rank's last words, on the screen and for its launcher."""
    print(message, file=sys.stderr, flush=True)
    _record(message, first=first)


def _record(message: str, *, first: bool) -> None:
    """Leave a message where torchrun looks for it when a rank has failed: its summary, which is the last on the screen,
    then ends with it.

    Its root cause is the earliest failure by the clock in these files; `first` is false where another rank's failure is
    the cause.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        more = {"py_callstack": message, "timestamp": str(int(time.time()) + (not first))}
        with suppress(OSError):  # its folder may be full or gone
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": more}}))


def _report_once(message: str, environment: Environment) -> None:
    """Rank 0 prints; the others leave only after it has, for the launcher kills every rank once one is gone."""
    if environment.world_size == 1:
        _say_last(message, first=True)
        return
    store = None
    with suppress(Exception):
        store = _store(environment)
    if environment.rank == 0:
        _say_last(message, first=True)
        if store is not None:
            store.set(WRONG, "reported")
            with suppress(Exception):
                store.wait([f"{WRONG}/{rank}" for rank in range(1, environment.world_size)], timedelta(seconds=10))
        return
    try:
        assert store is not None
        store.wait([WRONG], timedelta(seconds=30))
        _record(RANK_0_SAYS, first=False)
        store.set(f"{WRONG}/{environment.rank}", "seen")
    except Exception:  # rank 0 found nothing wrong, or is gone: what is wrong is wrong here
        _say_last(f"rank {environment.rank}: {message}", first=True)


def _report_failure(trace: str, environment: Environment) -> None:
    """The first rank to fail prints its traceback, the ranks that fail because it is gone print a line."""
    first = environment.rank
    with suppress(Exception):
        store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else _store(environment)
        first = int(store.compare_set("megazero/failure", "", str(environment.rank)))
    if first == environment.rank:
        _say_last(f"rank {environment.rank} of {environment.world_size} failed:\n{trace}", first=True)
    else:
        reason = trace.strip().splitlines()[-1]
        _say_last(f"rank {environment.rank} stopped because rank {first} failed first: {reason[:160]}", first=False)
