"""Sizes of requests, parts in a request and sizes of pages: which of them moves the state of a step on disks soonest.

    python -m bench.disk_step                                 # a file of 5 GB here; some three minutes
    python -m bench.disk_step --folder /mnt/nvme --rounds 20
    python -m bench.disk_step --quick                         # small parts, one round: does it start?

Every row moves parts of optimizer state as `megazero bench-nvme` does: each is read into a slot of memory, updated by
Adam on a thread of its own, and written over. Rows take turns with as many parts each, in another order in every round,
so that no row has always the same part of the disk or the same row before it. They share one file, and a turn goes on
where the turn before it has ended: a virtual disk may be a file in the cache of a host, and what was used last is
faster there. Each turn has new memory: in a virtual machine some of it is faster than other.

A share is the time of the first row, which is what a training does, over that of the row in the same round: above 100%
the row is faster. It is the median of all rounds, beside the quarters of them. The second row is the first one again,
and says what such a share may be worth.
"""

from __future__ import annotations

import mmap
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench import results
from bench.script import parser_of, report
from fused_ops.adam import AdamRange, adam_steps
from megazero.config.tiers import SLOTS
from megazero.disk import buffers
from megazero.disk.buffers import DirectMemory
from megazero.disk.lanes import DiskLanes, Need
from megazero.disk.opening import open_swap
from megazero.disk.swap import SwapSpace
from megazero.disk.transports import DiskOptions, open_backend

MIB = 1 << 20
PART = 29_822_976
"""Bytes of a part in bf16, as `megazero bench-nvme` says: of its weights and two moments, in fp32."""
PARTS = 24
"""That a turn moves."""
TURNS = 7
"""Turns until a part comes again."""


@dataclass(frozen=True)
class Way:
    """One row. direct: MiB of a request. grouped: parts in one request. pages: of the memory (`pages_of`)."""

    name: str
    direct: int = 4
    depth: int = 16
    grouped: int = 1
    pages: str = "huge"


WAYS = (
    Way("as a training: requests of 4 MiB, 16 in flight, a part at a time"),
    Way("the same again"),
    Way("shared memory, in pages of 4 KiB", pages="shared"),
    Way("private memory, in pages of 4 KiB", pages="small"),
    Way("two parts in a submission", grouped=2),
    Way("three parts in a submission", grouped=3),
    Way("requests of 1 MiB", direct=1),
    Way("requests of 16 MiB", direct=16),
    Way("requests of a part", direct=64),
    Way("64 in flight, 1 MiB", direct=1, depth=64),
)


def pages_of(kind: str, count: int) -> mmap.mmap:
    """As `buffers.own_pages`, of a kind: huge, small or shared."""
    flags = mmap.MAP_SHARED if kind == "shared" else mmap.MAP_PRIVATE
    memory = mmap.mmap(-1, count, flags=flags | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    memory.madvise(mmap.MADV_NOHUGEPAGE if kind == "small" else mmap.MADV_HUGEPAGE)
    return memory


def adam(part_bytes: int) -> Callable[[Tensor], None]:
    """Updates a part."""
    gradient = torch.rand(part_bytes // 12)
    parameters = torch.zeros(len(gradient), dtype=torch.bfloat16)
    betas: Any = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decoupled": True}
    one, skip = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.bool)

    @torch.no_grad()
    def update(part: Tensor) -> None:
        weights, first, second = part.view(torch.float32).split(len(gradient))
        adam_range = AdamRange(parameters, weights, gradient, first, second, 0.0)
        adam_steps([adam_range], lr=1e-4, **betas, step=one, multiplier=one, skip=skip)

    return update


@dataclass
class Row:
    """A way with memory and lanes of its own on the file that all share. seconds: of its turns."""

    way: Way
    space: SwapSpace
    part_bytes: int
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.options = DiskOptions(depth=self.way.depth, direct_bytes=self.way.direct * MIB)
        self.backend = open_backend(self.options, self.space._files)
        self.lanes = DiskLanes(self.backend.reads, self.backend.writes)
        self.update = adam(self.part_bytes)

    def allocated(self) -> list[Tensor]:
        """Slots of memory, all of whose pages exist."""
        self.space._direct = DirectMemory()
        with mock.patch.object(buffers, "own_pages", partial(pages_of, self.way.pages)):
            slots = [self.space.allocate(self.part_bytes) for _ in range(SLOTS)]
        for memory in slots:
            memory.view(torch.float32).uniform_()
        return slots

    def turn(self, names: Iterator[str], parts: int) -> None:
        """Move so many parts."""
        self.space._lanes, self.space._options = self.lanes, self.options
        memory = self.allocated()
        grouped, slots = self.way.grouped, cycle(memory)
        start, under_way = time.perf_counter(), deque[Need]()
        with ThreadPoolExecutor(1) as host:

            def updated(arrived: Need, group: Sequence[Tensor]) -> None:
                arrived()
                for part in group:
                    self.update(part)

            for _ in range(parts // grouped):
                if len(under_way) == SLOTS // grouped:
                    under_way.popleft()()
                group = {next(names): next(slots) for _ in range(grouped)}
                made = host.submit(updated, self.space.read(group).wait, [*group.values()]).result
                under_way.append(self.space.write(group, needs=[made]).wait)
            while under_way:
                under_way.popleft()()
        self.seconds.append(time.perf_counter() - start)

    def shares(self, first: Row) -> list[float]:
        """By round, from the smallest: the time of the first row over this row's."""
        return sorted(theirs / own for theirs, own in zip(first.seconds, self.seconds, strict=True))

    def cells(self, first: Row, moved: int) -> list[str]:
        """Of the table. moved: bytes of a turn, each way."""
        shares = self.shares(first)
        rate = moved / statistics.median(self.seconds) / 1e9
        quarters = f"{shares[len(shares) // 4]:.0%} to {shares[len(shares) * 3 // 4]:.0%}"
        return [self.way.name, f"{rate:.2f}", f"{statistics.median(shares):.1%}", quarters]


HEADINGS = ("", "GB/s each way", "of the first row", "half of the rounds")


def main() -> None:
    """Print one table and write its numbers to a file."""
    parser = parser_of(__doc__, "small parts, one round: a smoke test")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where the file is made and removed")
    parser.add_argument("--rounds", type=int, default=12, help="%(default)s")
    args = parser.parse_args()
    part_bytes, rounds = (3 * MIB, 1) if args.quick else (PART, args.rounds)
    torch.set_num_threads(1)  # the host's lane of a run is one thread beside the computation
    pieces = {str(number): part_bytes for number in range(PARTS * TURNS)}
    with ExitStack() as stack:
        space = open_swap([args.folder], pieces, job="bench-step", slots=1)
        lanes = space._lanes
        stack.callback(space.close, remove=True)
        rows = [Row(way, space, part_bytes) for way in WAYS]
        for row in rows:
            stack.callback(row.lanes.close)
        stack.callback(setattr, space, "_lanes", lanes)
        memory = rows[0].allocated()[0]
        for name in pieces:
            space.write({name: memory}).wait()
        names, order = cycle(pieces), random.Random(1)
        for number in range(rounds + 1):
            for row in order.sample(rows, len(rows)):
                row.turn(names, PARTS)
            if number == 0 and rounds > 1:  # in which memory is touched for the first time
                for row in rows:
                    row.seconds.clear()
            print(f"    round {number}/{rounds}: {rows[0].seconds[-1:]} s", file=sys.stderr, flush=True)
    text = results.table(HEADINGS, [row.cells(rows[0], PARTS * part_bytes) for row in rows])
    settings = {"parts": PARTS, "part": part_bytes, "rounds": rounds, "backend": rows[0].backend.words}
    path = report(args, "disk-step", settings, {"rows": {row.way.name: row.seconds for row in rows}}, text)
    print(f"{text}\n\n{path}", flush=True)


if __name__ == "__main__":
    main()
