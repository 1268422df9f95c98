"""Collectives between ranks of one host: through shared memory, compared with the backend.

    torchrun --nproc-per-node 2 -m bench.exchange

Milliseconds are those of the slowest rank, medians over alternating turns. GB/s are the tensor's bytes over that time.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from bench import results
from bench.script import parser_of, report
from megazero.mpu import collectives
from megazero.mpu.axes import Axes
from megazero.mpu.grid import Group, build_grid

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
    """Seconds of one call on the slowest rank."""
    collectives.barrier(group)
    begin = time.perf_counter()
    for _ in range(times):
        run()
    took = torch.tensor([(time.perf_counter() - begin) / times])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def compared(ours: Group, theirs: Group, size: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Seconds of each collective on a tensor of this size, for both ways in alternating turns."""
    others = cases(theirs, size)
    for name, run in cases(ours, size).items():
        ways = (run, ours), (others[name], theirs)
        times = [1 if quick else max(1, int(SECONDS / turn(way, 3, group))) for way, group in ways]
        taken = [
            [turn(way, n, group) for (way, group), n in zip(ways, times, strict=True)]
            for _ in range(1 if quick else TURNS)
        ]
        mine, gloo = (list(column) for column in zip(*taken, strict=True))
        yield {"collective": name, "bytes": size, "shared_memory": mine, "gloo": gloo}


def row(found: dict[str, Any]) -> list[str]:
    mine, gloo = (statistics.median(found[way]) for way in ("shared_memory", "gloo"))
    ratio = statistics.median(b / a for a, b in zip(found["shared_memory"], found["gloo"], strict=True))
    shown = f"{mine * 1e3:.3f}", f"{gloo * 1e3:.3f}", f"{found['bytes'] / mine / 1e9:.2f}", f"{ratio:.1f}"
    return [found["collective"], f"{found['bytes']:,}", *shown]


HEADINGS = ("collective", "bytes", "shared memory ms", "gloo ms", "GB/s", "times faster")


def main() -> None:
    """Print one table, and write its numbers to a file."""
    parser = parser_of(__doc__, "one call of each: a smoke test")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ours = build_grid(Axes(dp=dist.get_world_size())).world
    if ours.exchange is None:
        sys.exit("bench/exchange.py: these ranks share no memory; `python -m megazero.doctor` says what is missing")
    theirs = Group(ours.ranks, ours.index, ours.handle)
    found = [result for size in SIZES for result in compared(ours, theirs, size, args.quick)]
    if ours.index == 0:
        settings = {"ranks": ours.size, "turns": TURNS, "seconds": SECONDS}
        text = results.table(HEADINGS, [row(result) for result in found])
        path = report(args, "exchange", settings, {"collectives": found}, text)
        print(f"{text}\n\n{path}", flush=True)
    collectives.barrier(theirs)
    os._exit(0)  # gloo's threads may still wait for the other ranks


if __name__ == "__main__":
    main()
