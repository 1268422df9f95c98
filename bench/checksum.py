"""Rates of the checksum of state on disks, on one thread: by instruction set, from the cache and from memory.

    python -m bench.checksum            # half a minute, and as much to compile each instruction set for the first time
    python -m bench.checksum --quick    # little memory, one round: does it start?

A turn takes the checksum of one request of 4 MiB again and again, of many such requests, or of many while they are
copied to one of 16 buffers. The memory is that of a step's slots, and each turn has the part of it that was used
longest ago, so no cache has it. The first row reads the same bytes (torch's sum of floats) and copies them (memmove),
and computes no checksum. A share is the rate of a row over that of the first row, of the same round: the median of all
rounds.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from bench import results
from bench.script import parser_of, report, say
from fused_ops.native import library
from fused_ops.native.compile import LEVELS
from megazero.disk.buffers import DirectMemory
from megazero.disk.checksum import BLOCK, Copier, copier

MIB = 1 << 20
REQUEST = 4 * MIB
AREAS = 7
"""Turns until a turn has the same memory again. A round has three turns of each row, so every row comes to all areas:
in a virtual machine some memory is faster than other.
"""
BUFFERS = 16
PLAIN = "a plain read, or copy"


class Turn(NamedTuple):
    """What a turn is given: the memory of its own, and buffers to copy to."""

    area: Tensor
    buffers: Tensor


def plain(to: int, source: int, count: int, block: int) -> int:
    """What the first row does in place of a `Copier`."""
    if to:
        ctypes.memmove(to, source, count)
    else:
        torch.frombuffer((ctypes.c_float * (count // 4)).from_address(source), dtype=torch.float32).sum()
    return 0


def from_cache(copy: Copier, turn: Turn) -> int:
    """The first request of the area, as often as the area has requests. Returns the bytes."""
    for _ in range(0, turn.area.nbytes, REQUEST):
        copy(0, turn.area.data_ptr(), REQUEST, 0)
    return turn.area.nbytes


def from_memory(copy: Copier, turn: Turn) -> int:
    """All of the area. Returns the bytes."""
    for first in range(0, turn.area.nbytes, REQUEST):
        copy(0, turn.area.data_ptr() + first, REQUEST, first // BLOCK)
    return turn.area.nbytes


def copied(copy: Copier, turn: Turn) -> int:
    """All of the area, to one buffer after the other. Returns the bytes."""
    for first in range(0, turn.area.nbytes, REQUEST):
        to = turn.buffers.data_ptr() + first % turn.buffers.nbytes
        copy(to, turn.area.data_ptr() + first, REQUEST, first // BLOCK)
    return turn.area.nbytes


KINDS: dict[str, Callable[[Copier, Turn], int]] = {
    "from the cache": from_cache,
    "from memory": from_memory,
    "copied": copied,
}

Rates = dict[str, dict[str, list[float]]]
"""GB/s of each round, by row and kind."""


def copiers() -> Iterator[tuple[str, Copier]]:
    """The rows: the plain one, the instruction sets of this processor from the best, and numpy."""
    yield PLAIN, plain
    for level in list(LEVELS)[list(LEVELS).index(library.level()) :]:
        if kernels := library.cpu_library(level):
            yield level, copier(kernels)
    yield "numpy", copier(None)


def measure(rounds: int, area_bytes: int) -> Rates:
    """All rows in turns, in the other order in every second round."""
    memory, rows = DirectMemory(), dict(copiers())
    areas = cycle([memory.allocate(area_bytes) for _ in range(AREAS)])
    for _ in range(AREAS):
        next(areas).view(torch.float32).uniform_()
    buffers = memory.allocate(BUFFERS * REQUEST).fill_(1)
    rates: Rates = {row: {kind: [] for kind in KINDS} for row in rows}
    for number in range(rounds):
        for kind, take in KINDS.items():
            for row, copy in rows.items() if number % 2 else reversed(rows.items()):
                turn = Turn(next(areas), buffers)
                begin = time.perf_counter()
                count = take(copy, turn)
                rates[row][kind].append(count / (time.perf_counter() - begin) / 1e9)
    return rates


def lines(rates: Rates) -> list[list[str]]:
    """A line of the table for each row."""
    shown = []
    for row, kinds in rates.items():
        cells = [row]
        for kind, of_rounds in kinds.items():
            shares = (own / first for own, first in zip(of_rounds, rates[PLAIN][kind], strict=True))
            cells += [f"{statistics.median(of_rounds):.1f}", f"{statistics.median(shares):.0%}"]
        shown.append(cells)
    return shown


HEADINGS = ("GB/s", *(cell for kind in KINDS for cell in (kind, "of the first row")))


def main() -> None:
    """Print one table and write its numbers to a file."""
    parser = parser_of(__doc__, "little memory, one round: a smoke test")
    parser.add_argument("--rounds", type=int, default=15, help="%(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds, area_bytes = (1, REQUEST) if args.quick else (args.rounds, 16 * REQUEST)
    rates = measure(rounds, area_bytes)
    text = results.table(HEADINGS, lines(rates))
    path = report(args, "checksum", {"rounds": rounds, "area": area_bytes, "request": REQUEST}, {"rows": rates}, text)
    say(f"{text}\n\n{path}")


if __name__ == "__main__":
    main()
