"""Process groups of a process that exists for one run only, and the status with which it ends."""

from __future__ import annotations

import hashlib
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
from typing import NoReturn

import torch
import torch.distributed as dist

from fused_ops.native import library
from megazero.config.parse import ConfigError
from megazero.config.schema import ParallelConfig, Run
from megazero.mpu import meeting
from megazero.mpu.axes import Axes, axes_of
from megazero.mpu.connect import connect
from megazero.mpu.grid import ProcessGrid, build_grid, stream_options
from megazero.mpu.meeting import Environment, MeetingError, RankEnded
from megazero.mpu.p2p import message_ctas
from megazero.mpu.shared_memory import PeerError
from megazero.system import allocator, threads
from megazero.system import device as devices
from megazero.system.status import FAILED, INTERRUPTED
from megazero.telemetry.watchdog import die_with_parent

WAIT_FOR_OTHERS = 60.0
"""Seconds in which a rank that got a signal waits for the other ranks to get it. Each rank imports torch first, all on
one host.
"""
WAIT_FOR_RANK_0 = 5.0
"""Seconds in which a rank whose configuration is wrong waits for rank 0 to report it, before it does so itself."""
WAIT_FOR_CHECKS = 10.0
"""Seconds in which a rank that has reported what is wrong waits for the other ranks to end their checks."""
SAYS_HOW = "the configuration is wrong; rank {} says how"


@contextmanager
def launch(
    run: Run, environment: Environment, agree: Callable[[dist.Store], object] = lambda store: None
) -> Iterator[ProcessGrid]:
    """A context with this rank's process grid, in a process that exists for this run only.

    dp is world size / (tp * pp). agree: called with the ranks' key-value store before there are process groups, in a
    world of several ranks.
    Entering and leaving are collectives of the world. A world of one makes no process group. After a failure the groups
    are not destroyed, because that would wait for peers that may be gone. Raises ConfigError as `world_of` does, and
    without a launcher RankEnded or MeetingError if another rank does not come (`meeting.meet`).
    """
    die_with_parent()
    torch.set_num_threads(threads.threads_set_by_user() or threads.threads_per_rank(environment.local_world_size))
    world = world_of(run, environment)
    _take_heap(world.device)
    if world.axes.world_size == 1:
        yield build_grid(world.axes, world.device)
        return
    store = meeting.meet(environment, world.timeout)
    agree(dist.PrefixStore("before groups", store))
    init_default_group(world, dist.PrefixStore("default group", store), environment)
    yield connected_grid(world, run.parallel)
    dist.barrier()
    dist.destroy_process_group()


def _take_heap(device: torch.device) -> None:
    """Have the next tensors on a CPU take memory from the heap so that what they leave fits others of their size. Not
    where a user has settings of the heap, or where there are no kernels: torch's own way stays there.
    """
    kernels = library.torch_library(library.choice()) if device.type == "cpu" and allocator.are_ours() else None
    if kernels is not None:
        kernels.call("take_host_tensors")


def connected_grid(world: World, parallel: ParallelConfig, guest_backend: str | None = None) -> ProcessGrid:
    """This rank's grid, connected as `mpu.connect` says. guest_backend: as in `build_grid`. A collective of the world,
    which has several ranks.
    """
    shared_memory = parallel.shared_memory
    grid = build_grid(world.axes, world.device, world.timeout, shared_memory=shared_memory, guest_backend=guest_backend)
    connect(grid, quantised=parallel.zero_quantized_gradients != "none")
    return grid


@dataclass(frozen=True)
class World:
    """What process groups are created from: the axes, this rank's device, the backend and its timeout."""

    axes: Axes
    device: torch.device
    backend: str
    timeout: timedelta


def world_of(run: Run, environment: Environment) -> World:
    """The world of a run. Raises ConfigError for a device or backend that this machine or this torch does not have."""
    parallel = run.parallel
    try:
        device = devices.resolve(parallel.device, environment.local_rank)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    axes = axes_of(run, environment.world_size)
    if environment.world_size == 1:
        return World(axes, device, "gloo", timeout)
    backend = parallel.backend if parallel.backend != "auto" else _backend_for(device, environment)
    if not dist.is_backend_available(backend):
        raise ConfigError([f"--distributed-backend {backend}: this torch ({torch.__version__}) is built without it"])
    try:
        message_ctas()
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    if parallel.cuda_graphs and parallel.tp > 1 and backend != "nccl":
        reason = "which is chosen where ranks share a card" if parallel.backend == "auto" else "which sums on the host"
        raise ConfigError(
            [
                f"--cuda-graphs with --tp {parallel.tp} captures its collectives, which {backend} cannot ({reason}); "
                "nearest: --tp 1"
            ]
        )
    if parallel.cuda_graphs:
        # NCCL registers the memory of captured collectives as one piece. An expandable segment is not one piece, which
        # leads to hangs and accesses outside of it (pytorch/pytorch#158029).
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    return World(axes, device, backend, timeout)


def init_default_group(world: World, store: dist.Store, environment: Environment) -> None:
    """Create torch's default group through a store. A collective of the world."""
    # Without device_id: with one, torch splits the world's communicator for every further group (ncclCommSplit), which
    # waits for all ranks of the world. But a rank makes only its own groups, and uses them in its own order
    # (pytorch/pytorch#134314).
    options = stream_options(world.backend, world.timeout)
    dist.init_process_group(
        world.backend,
        timeout=world.timeout,
        pg_options=options,
        store=store,
        rank=environment.rank,
        world_size=environment.world_size,
    )


def _backend_for(device: torch.device, environment: Environment) -> str:
    """nccl on CUDA, unless ranks share a GPU, which nccl refuses; else gloo."""
    own_card = environment.local_world_size <= devices.device_count(device)
    return "nccl" if device.type == "cuda" and own_card else "gloo"


def exit_status(main: Callable[[], None], environment: Environment) -> int:
    """Run `main` and return the exit status: 0, a ConfigError's, 130 for KeyboardInterrupt, 1 for any other error.

    A ConfigError is printed once, by rank 0 if it has the same one (`_report_once`). Of other errors, the first rank to
    fail prints its traceback, or a sentence if ranks do not meet.
    """
    if environment.world_size > 1 and meeting.serves_the_store(environment):
        with suppress(Exception):  # from now on, so that ranks whose checks end earlier have where to report
            meeting.store_of(environment)
    try:
        main()
    except ConfigError as error:
        _report_once(error, environment, together=error.of_all_ranks or dist.is_initialized())
        return error.status
    except RankEnded as error:
        _say_last(f"rank {environment.rank} stopped: {error}", first=False)
        meeting.let_others_read(environment, error.status)
        return error.status
    except MeetingError as error:
        _say_last(f"rank {environment.rank} stopped: {error}", first=True)
        if error.readers:
            meeting.let_others_read(environment, error.status, error.readers)
        return error.status
    except PeerError as error:  # a consequence: the rank that failed first prints the reason, if it can
        _say_last(f"rank {environment.rank} stopped: {error}", first=False)
        return FAILED
    except KeyboardInterrupt:  # only in programs that save nothing; training handles the signal
        print("interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    except Exception:
        _report_failure(traceback.format_exc(), environment)
        return FAILED
    return 0


def exit_now(status: int) -> NoReturn:
    """End this process now, without finalising the interpreter.

    Threads that wait for messages are daemons, because a peer that died may never answer. If the interpreter is
    finalised while such a thread is in the backend's C++ code, the process aborts, and torchrun reports a successful
    run as failed (about one in ten on a busy machine). The state is saved and all files are closed before this call.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def exit_early(signal: str, environment: Environment, leave: Callable[[], None] = lambda: None) -> NoReturn:
    """End this process because of a signal before the first step, when there is nothing to save.

    The status is 0 if all ranks got the signal, as from launchers and schedulers. If only some ranks got it, they end
    with status 1, so that the launcher ends the others, which would wait for them. If a rank has reported why the run
    ends, the launcher sends the signal after that rank has ended, and the status is that rank's. leave: called before.
    Communicates through the launcher's store, if there is one.
    """
    world, told = environment.world_size, environment.world_size
    if meeting.agent_serves():
        with suppress(Exception):  # the launcher, and its store with it, may be gone once a rank has ended
            store, deadline = meeting.store_of(environment), time.monotonic() + WAIT_FOR_OTHERS
            told = store.add("megazero/told to stop", 1)
            while told < world and not store.check([meeting.FIRST_REPORT]) and time.monotonic() < deadline:
                time.sleep(0.05)
                told = store.add("megazero/told to stop", 0)
            if store.check([meeting.FIRST_REPORT]):
                _, status, reason, _ = json.loads(store.get(meeting.FIRST_REPORT))
                _record(reason, first=False)
                leave()
                exit_now(status)
    if told < world:
        _say_last(
            f"rank {environment.rank} stopped: {signal} came before the first step, and to {told} of {world} ranks "
            "only",
            first=True,
        )
        leave()
        exit_now(FAILED)
    if environment.rank == 0:
        print(f"stopped by {signal} before the first step: there is nothing to save", flush=True)
    leave()
    exit_now(0)


def _say_last(message: str, *, first: bool) -> None:
    """Print a rank's last message to stderr, and record it for its launcher."""
    print(message, file=sys.stderr, flush=True)
    _record(message, first=first)


def _record(message: str, *, first: bool) -> None:
    """Write a message into the file that torchrun reads when a rank has failed. torchrun's summary then ends with it.

    torchrun takes the earliest failure, by the timestamps in these files, as the root cause. first: False if another
    rank's failure is the cause; such a message does not replace one that this rank has recorded before.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and (first or not Path(path).exists()):
        more = {"py_callstack": message, "timestamp": str(int(time.time()) + (not first))}
        with suppress(OSError):  # its folder may be full or gone
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": more}}))


def _report_once(error: ConfigError, environment: Environment, *, together: bool) -> None:
    """Print what is wrong with the configuration once, before the launcher kills all ranks because one has ended.

    together: whether the ranks have met. Usually all ranks have the same
    message. Then rank 0 prints it, and the others wait for that. A rank whose message rank 0 does not have prints it:
    at once if rank 0 has found nothing wrong, else after `WAIT_FOR_RANK_0`, as rank 0 may read long data. No two
    ranks print the same message. A rank that has printed lets the others end their checks, so that different messages
    of several ranks are all printed. Communicates through the launcher's store.
    """
    message, rank, told_by, store = str(error), environment.rank, environment.rank, None
    if environment.world_size > 1:
        with suppress(Exception):
            store = meeting.store_of(environment)
    if store is None:
        _say_last(f"rank {rank}: {message}" if rank else message, first=True)
        return
    with suppress(Exception):  # the store may be gone, and rank 0 with it: then the message is this rank's to print
        of_rank_0 = meeting.checks_of(0, together=together)
        if rank and meeting.are_set(store, [of_rank_0], WAIT_FOR_RANK_0):
            told_by = rank if store.get(of_rank_0) == meeting.NOTHING_WRONG.encode() else 0
        if told_by == rank:
            key = f"megazero/message {hashlib.sha256(message.encode()).hexdigest()}"
            told_by = int(store.compare_set(key, "", str(rank)))
    if told_by == rank:
        _say_last(f"rank {rank}: {message}" if rank else message, first=True)
    else:
        _record(SAYS_HOW.format(told_by), first=False)
    with suppress(Exception):
        meeting.report_first(store, told_by, error.status, SAYS_HOW.format(told_by), error.problems[0])
        store.set(meeting.checks_of(rank, together=together), str(error.status))
        if told_by == rank and (together or not meeting.serves_the_store(environment)):
            others = (other for other in range(environment.world_size) if other != rank)
            meeting.are_set(store, [meeting.checks_of(other, together=together) for other in others], WAIT_FOR_CHECKS)
    if not together:
        meeting.let_others_read(environment, error.status)


def _report_failure(trace: str, environment: Environment) -> None:
    """Print the traceback if this rank is the first to fail; else print one line that names the first.

    The first rank is found by an atomic compare-and-set in the store.
    """
    first, reason = environment.rank, trace.strip().splitlines()[-1]
    with suppress(Exception):
        first = meeting.report_first(meeting.store_of(environment), first, FAILED, f"rank {first} failed first", reason)
    if first == environment.rank:
        _say_last(f"rank {environment.rank} of {environment.world_size} failed:\n{trace}", first=True)
    else:
        _say_last(
            f"rank {environment.rank} stopped because rank {first} failed first: {reason[: meeting.SHORT]}", first=False
        )
    meeting.let_others_read(environment, FAILED)
