"""Swap files against fio on one disk: bytes per second of reads and of writes, in turns.

    python -m bench.disk                                 # two files of 3.5 GB here; some three minutes
    python -m bench.disk --folder /mnt/nvme --bytes 16GB
    python -m bench.disk --quick                         # small files, one round: does it start?

megazero moves pieces as a training step does (`disk.swap`): parts of optimizer state in as many slots of memory as a
step has, on the lanes beside the program, with checksums. Every row of fio has a way, a size of requests and a number
of them in flight, with O_DIRECT. In a round every row reads an area, then every row writes one; the order of rows turns
around from round to round. Nothing is made durable in between, as in a step without --nvme-checkpoint.

All rows share one file for reads and one for writes, and each turn takes the next area of it. So when a turn comes to
an area, as many bytes have been moved since its last use, whoever has the turn: a virtual disk may be a file in the
cache of a host, and what was used last is faster there.

A share is ours over fio's of the same round, the median of all rounds. The best row of fio is the one with the largest
median, chosen after the fact, reads and writes each.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from bench import results
from bench.script import parser_of, report
from megazero.config.lengths import bytes_of
from megazero.config.tiers import SLOTS
from megazero.disk.lanes import DiskLanes, Need
from megazero.disk.layout import HEADER_BYTES
from megazero.disk.opening import open_swap
from megazero.disk.swap import SwapSpace
from megazero.disk.transports import DiskOptions, open_backend

MIB = 1 << 20
PIECE = 48 * MIB
"""Optimizer state of a part, about as large as with --nvme-buffer-bytes 256 MiB."""
AREAS = 7
LIMIT = 0.85
"""The least share of fio."""
OURS = (("io_uring", 4, 16), ("io_uring", 1, 16), ("threads", 4, 16))
"""Ways of megazero, the default first: backend, MiB of a request, requests in flight."""
FIO = (
    ("io_uring", 1, 4),
    *(("io_uring", size, 16) for size in (1, 4, 16)),
    *(("libaio", size, 16) for size in (1, 4)),
    *(("psync", size, 1) for size in (1, 4, 16)),
)
"""Ways of fio: engine, MiB of a request, requests in flight."""


class Files:
    """The two files that all rows share. They are removed with `stack`.

    turn   bytes of an area
    space  by whether it is written; the pieces of an area lie one behind the other
    """

    def __init__(self, folder: Path, turn: int, stack: ExitStack) -> None:
        self.turn, self.names = turn, [f"piece {number}" for number in range(AREAS * turn // PIECE)]
        self.space: dict[bool, SwapSpace] = {}
        self._next = {False: 0, True: 0}
        for write, job in ((False, "bench-reads"), (True, "bench-writes")):
            space = open_swap([folder], dict.fromkeys(self.names, PIECE), job=job, slots=1)
            stack.callback(space.close, remove=True)
            self.space[write] = space
            memory = space.allocate(PIECE).random_(256)
            for name in self.names:
                space.write({name: memory}).wait()

    def area(self, write: bool) -> int:
        """The area of the next turn."""
        self._next[write] += 1
        return self._next[write] % AREAS


class Row(Protocol):
    """What moves bytes. move: those of one area, True writes. Returns (wall, processor) seconds."""

    name: str

    def move(self, write: bool) -> tuple[float, float]: ...


class Swap:
    """megazero's swap files with one way of moving bytes."""

    def __init__(self, files: Files, way: str, size: int, depth: int) -> None:
        self.files, self.name = files, f"megazero: {way}, {size} MiB, {depth} in flight"
        self.options = options = DiskOptions(MIB, depth, way, direct_bytes=size * MIB)
        self.lanes: dict[bool, DiskLanes] = {}
        self.slots: dict[bool, list[Tensor]] = {}
        for write, space in files.space.items():
            backend = open_backend(options, space._files)
            assert backend.words.startswith(way), backend.words
            self.lanes[write] = DiskLanes(backend.reads, backend.writes)
            self.slots[write] = [space.allocate(PIECE).random_(256) for _ in range(SLOTS)]

    def move(self, write: bool) -> tuple[float, float]:
        """As a step does: a piece waits on its lane for the one that has had its slot before."""
        space, area, count = self.files.space[write], self.files.area(write), self.files.turn // PIECE
        space._lanes, space._options = self.lanes[write], self.options
        begin, spent, ends = time.perf_counter(), processor(), list[Need]()
        for number in range(area * count, (area + 1) * count):
            piece = {self.files.names[number]: self.slots[write][number % SLOTS]}
            needs = ends[-SLOTS:][:1] if len(ends) >= SLOTS else []
            ends.append((space.write if write else space.read)(piece, needs=needs).wait)
        for end in ends:
            end()
        return time.perf_counter() - begin, processor() - spent


class Fio:
    """A way of fio."""

    def __init__(self, files: Files, engine: str, size: int, depth: int) -> None:
        self.files, self.name = files, f"fio: {engine}, {size} MiB, {depth} in flight"
        words = f"--name=row --direct=1 --ioengine={engine} --bs={size}m --iodepth={depth} --size={files.turn}"
        self.words = ["fio", *words.split(), "--output-format=json", "--allow_file_create=0"]

    def move(self, write: bool) -> tuple[float, float]:
        kind, turn = "write" if write else "read", self.files.turn
        where = f"--offset={HEADER_BYTES + self.files.area(write) * turn} --filename={self.files.space[write].paths[0]}"
        done = subprocess.run([*self.words, f"--rw={kind}", *where.split()], capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        assert job[kind]["io_bytes"] == turn, f"{job[kind]['io_bytes']} bytes, not {turn}"
        seconds = turn / job[kind]["bw_bytes"]
        return seconds, (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds


def processor() -> float:
    """Processor seconds of this process so far, in the program and in the kernel for it."""
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime + found.ru_stime


@dataclass
class Found:
    """Of a row, by round: bytes per second, and processor seconds for each GB."""

    rates: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


Table = dict[str, dict[bool, Found]]
"""By the name of a row, and whether it writes."""


def play(rows: Sequence[Row], rounds: int, turn: int) -> Table:
    """All rows in turns."""
    found: Table = {row.name: {False: Found(), True: Found()} for row in rows}
    for number in range(rounds):
        for write in (False, True):
            for row in rows if number % 2 else reversed(rows):
                seconds, spent = row.move(write)
                found[row.name][write].rates.append(turn / seconds)
                found[row.name][write].processor.append(spent / turn * 1e9)
        shown = ", ".join(f"{own[w].rates[-1] / 1e9:.2f}" for own in list(found.values())[:2] for w in (False, True))
        print(f"    round {number + 1}/{rounds}: {shown} GB/s", file=sys.stderr, flush=True)
    return found


def share(ours: Found, theirs: Found) -> float:
    """The median over the rounds of our rate over theirs."""
    return statistics.median(a / b for a, b in zip(ours.rates, theirs.rates, strict=True))


def best_of(found: Table, write: bool) -> str:
    """The row of fio with the largest median."""
    return max((name for name in found if name.startswith("fio")), key=lambda name: found[name][write].median)


def lines(found: Table) -> list[list[str]]:
    """A row of the table for each row."""
    best = {write: best_of(found, write) for write in (False, True)}
    shown = []
    for name, own in found.items():
        cells = [name]
        for write in (False, True):
            ratio = share(own[write], found[best[write]][write])
            spent = statistics.median(own[write].processor)
            cells += [f"{own[write].median / 1e9:.2f}", f"{ratio:.0%}", f"{spent:.2f}"]
        shown.append(cells)
    return shown


HEADINGS = ("", "read GB/s", "of the best fio", "s/GB", "write GB/s", "of the best fio", "s/GB")


def main() -> None:
    """Print one table and write its numbers to a file; status 1 if io_uring has less than the limit."""
    parser = parser_of(__doc__, "small files, one round: a smoke test")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where the files are made and removed")
    parser.add_argument("--bytes", type=bytes_of, default=70 * PIECE, help="of each of two files: %(default)s")
    parser.add_argument("--rounds", type=int, default=6, help="%(default)s")
    args = parser.parse_args()
    turn = PIECE if args.quick else args.bytes // AREAS // PIECE * PIECE
    rounds = 1 if args.quick else args.rounds
    with ExitStack() as stack:
        files = Files(args.folder, turn, stack)
        rows: list[Row] = [Swap(files, *way) for way in OURS]
        rows += [Fio(files, *way) for way in FIO]
        found = play(rows, rounds, turn)
    text = results.table(HEADINGS, lines(found))
    settings = {"bytes": AREAS * turn, "turn": turn, "rounds": rounds, "piece": PIECE, "limit": LIMIT}
    data: dict[str, Any] = {
        name: {("write" if write else "read"): vars(one) for write, one in own.items()} for name, own in found.items()
    }
    path = report(args, "disk", settings, {"rows": data}, text)
    print(f"{text}\n\n{path}", flush=True)
    ours = found[rows[0].name]
    shares = [share(ours[write], found[best_of(found, write)][write]) for write in (False, True)]
    met = min(shares) >= LIMIT
    print(f"{shares[0]:.0%} of fio's reads, {shares[1]:.0%} of its writes; at least {LIMIT:.0%}: {met}", flush=True)
    sys.exit(0 if met or args.quick else 1)


if __name__ == "__main__":
    main()
