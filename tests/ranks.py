"""Run a function on several ranks, in a pool of processes that stays alive between tests.

    def body(rank: int, x: int) -> Tensor: ...          # at module level: it is sent by name
    results = run_ranks(4, body, 3)                     # one result per rank

Each call gets a fresh gloo world over its own store; it is torn down after the call. The first exception of any rank
is raised here with that rank's traceback, and the pool is discarded (its peers may hang in a collective).

Results travel as plain pickles: torch's own way of sending tensors between processes shakes hands twice for each of them.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

SECONDS = 300


def _serve(pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        rank, size, store_path, function, args = job
        try:
            store = dist.FileStore(store_path, size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS))
            result = function(rank, *args)
            dist.barrier()
            # What the function leaves in reference cycles would keep its process groups, whose threads turn in a busy loop
            # once the other end of their connections is closed.
            gc.collect()
            dist.destroy_process_group()
            pipe.send_bytes(pickle.dumps((True, result)))
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))


class _Pool:
    def __init__(self) -> None:
        self.workers: list[tuple[Any, Connection]] = []

    def grow(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        while len(self.workers) < size:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self.workers.append((process, here))

    def discard(self) -> None:
        for process, pipe in self.workers:
            process.kill()
            pipe.close()
        self.workers.clear()

    def run(self, size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        self.grow(size)
        with tempfile.TemporaryDirectory() as folder:
            pipes = {pipe: rank for rank, (_, pipe) in enumerate(self.workers[:size])}
            for pipe, rank in pipes.items():
                pipe.send_bytes(pickle.dumps((rank, size, os.path.join(folder, "store"), function, args)))
            results: list[Any] = [None] * size
            waiting = dict(pipes)
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
            return results


_POOL = _Pool()
atexit.register(_POOL.discard)


def run_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of function(rank, *args) on `size` ranks of a gloo world, in order of rank."""
    return _POOL.run(size, function, args)
