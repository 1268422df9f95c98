"""Collectives between ranks of one host: through the memory they share, beside the backend's own way.

    torchrun --nproc-per-node 2 bench/exchange.py

Milliseconds are medians over turns A B A B of the slowest rank; GB/s are bytes of the tensor over them.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from bench import results
from megazero.mpu import collectives
from megazero.mpu.grid import Axes, Group, build_grid

SIZES = (64, 16 << 10, 2 << 20, 64 << 20)
TURNS, SECONDS = 7, 0.1


def cases(group: Group, bytes_of: int) -> dict[str, Callable[[], None]]:
    whole = torch.ones(max(bytes_of // 4, group.size) // group.size * group.size)
    part = whole.view(group.size, -1)[group.index]
    half = torch.ones(2 * whole.numel(), dtype=torch.bfloat16)
    return {
        "all-reduce fp32": lambda: collectives.all_reduce(whole, group).wait(),
        "all-reduce bf16": lambda: collectives.all_reduce(half, group).wait(),
        "reduce-scatter fp32": lambda: collectives.reduce_scatter(part, whole, group).wait(),
        "all-gather fp32": lambda: collectives.all_gather(whole, part, group).wait(),
    }


def turn(run: Callable[[], None], times: int, group: Group) -> float:
    """Seconds of one call, of the slowest rank."""
    collectives.barrier(group)
    begin = time.perf_counter()
    for _ in range(times):
        run()
    took = torch.tensor([(time.perf_counter() - begin) / times])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def main() -> None:
    """One table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ours = build_grid(Axes(dp=dist.get_world_size())).world
    assert ours.exchange is not None, "these ranks share no memory"
    theirs = Group(ours.ranks, ours.index, ours.handle)
    rows = []
    for size in SIZES:
        for name, run in cases(ours, size).items():
            other = cases(theirs, size)[name]
            times = [max(1, int(SECONDS / max(turn(way, 3, theirs), 1e-6))) for way in (run, other)]
            taken = [[turn(way, n, theirs) for way, n in zip((run, other), times, strict=True)] for _ in range(TURNS)]
            mine, gloo = (statistics.median(column) for column in zip(*taken, strict=True))
            ratio = statistics.median(pair[1] / pair[0] for pair in taken)
            rows.append([name, f"{size:,}", f"{mine * 1e3:.3f}", f"{gloo * 1e3:.3f}", f"{size / mine / 1e9:.2f}", f"{ratio:.1f}"])
    if ours.index == 0:
        print(results.table(["collective", "bytes", "shared memory ms", "gloo ms", "GB/s", "times faster"], rows), flush=True)
    collectives.barrier(theirs)
    os._exit(0)


if __name__ == "__main__":
    main()
