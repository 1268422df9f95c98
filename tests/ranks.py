"""Run a function on several ranks, in a pool of processes that stays alive between tests.

    def body(rank: int, x: int) -> Tensor: ...          # at module level: it is sent by name
    results = run_ranks(4, body, 3)                     # one result per rank

Each call gets a fresh gloo world over its own store; it is torn down after the call. The first exception of any rank is
raised here with that rank's traceback, and the pool is discarded (its peers may hang in a collective). The workers are
forks (`tests.nursery`), so another one is there in a moment.

Results are sent as plain pickles, because torch's own way of sending tensors between processes takes two handshakes for
each tensor.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from megazero.config.source import ConfigError
from tests.nursery import Nursery

SECONDS = 300
KEPT = 16
"""The most workers that stay alive between calls; a call may have more."""


def serve(pipe: Connection) -> None:
    """Run the jobs that come through the pipe, until it is closed."""
    import torch
    import torch.distributed as dist

    new = True
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        rank, size, store_path, function, args = job
        torch.set_num_threads(1)
        seed_global_generators(0)
        be_deterministic(False)  # the job before may have asked for it
        try:
            store = dist.FileStore(store_path, size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS))
            result = function(rank, *args)
            dist.barrier()
            # Reference cycles of the function would keep its process groups alive. Their threads spin once the other
            # end of their connections is closed.
            gc.collect()
            dist.destroy_process_group()
            if new:  # later collections then pass over the modules that the first job has imported
                gc.freeze()
                new = False
            pipe.send_bytes(pickle.dumps((True, result)))
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))


def be_deterministic(strict: bool) -> None:
    """`torch.use_deterministic_algorithms`, called only if it changes the setting: a call imports all of torch.compile,
    which takes 0.9 s in a new process.
    """
    import torch

    if strict != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(strict)


def seed_global_generators(seed: int) -> None:
    """A test must not see what was drawn before it: which tests have run in its process depends on the others."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - what libraries draw from is meant
    torch.manual_seed(seed)


class _Pool:
    def __init__(self) -> None:
        self.nurseries: list[Nursery] = []
        self.workers: list[tuple[int, Connection]] = []

    def grow(self, size: int) -> None:
        if not self.nurseries:
            self.nurseries = [Nursery("1"), Nursery("2")]
        while len(self.workers) < size:
            here, there = multiprocessing.Pipe()
            self.workers.append((self.nurseries[len(self.workers) % 2].fork(there), here))

    def discard(self, first: int = 0) -> None:
        """End all workers, or those from index `first` on."""
        for pid, pipe in self.workers[first:]:
            with contextlib.suppress(ProcessLookupError):  # it has died
                os.kill(pid, signal.SIGKILL)
            pipe.close()
        del self.workers[first:]

    def close(self) -> None:
        self.discard()
        for nursery in self.nurseries:
            nursery.close()

    def run(
        self, size: int, function: Callable[..., Any], args: tuple[Any, ...], awaited: int | None = None
    ) -> list[Any]:
        """awaited: how many ranks are waited for, the first ones; None: all. The others end with the pool."""
        self.grow(size)
        with tempfile.TemporaryDirectory() as folder:
            pipes = {pipe: rank for rank, (_, pipe) in enumerate(self.workers[:size])}
            for pipe, rank in pipes.items():
                pipe.send_bytes(pickle.dumps((rank, size, os.path.join(folder, "store"), function, args)))
            results: list[Any] = [None] * size
            waiting = dict(list(pipes.items())[:awaited])
            while waiting:
                ready = wait(list(waiting), timeout=SECONDS)
                if not ready:
                    self.discard()
                    raise TimeoutError(f"ranks {sorted(waiting.values())} gave no result in {SECONDS} s")
                for end in ready:
                    assert isinstance(end, Connection)
                    rank = waiting.pop(end)
                    try:
                        good, results[rank] = pickle.loads(end.recv_bytes())
                    except (EOFError, OSError):
                        good, results[rank] = False, "the process died"
                    if not good:
                        self.discard()
                        raise RuntimeError(f"rank {rank} of {size} failed:\n{results[rank]}")
        self.discard(KEPT if awaited is None else 0)
        return results


_POOL = _Pool()
atexit.register(_POOL.close)


def run_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of function(rank, *args) on `size` ranks of a gloo world, in order of rank.

    Raises RuntimeError with the traceback of the first failing rank, TimeoutError after `SECONDS` without a result.
    """
    return _POOL.run(size, function, args)


def config_error(act: Callable[[], object]) -> str:
    """The words of the ConfigError that a function raises; "" if it raises none."""
    try:
        act()
    except ConfigError as error:
        return str(error)
    return ""


def last_words(size: int, function: Callable[..., Any], *args: Any) -> str:
    """The error with which function(0, *args) ends on rank 0, in words, whatever the other ranks do: they may die or
    never answer.
    """
    try:
        _POOL.run(size, function, args, awaited=1)
    except RuntimeError as error:
        return str(error).rstrip().rpartition("\n")[2]
    raise AssertionError("rank 0 ended without an error")
