"""What a step takes whose optimizer state lies on disks, beside what its computation and its I/O take alone.

    python -m bench.offload_step                         # one rank with one thread, on two cores; six minutes
    python -m bench.offload_step --ranks 2               # ZeRO-1
    python -m bench.offload_step --threads 2             # the computation wants both cores
    python -m bench.offload_step --micro-batches 1 4 16 --samples 1 --ways "in memory;late;late, gradients too"
    python -m bench.offload_step --samples 1 --sequence 1024 --folder /mnt/nvme      # a single size of a step
    python -m bench.offload_step --quick                 # a tiny model: does it start?

All ways are runs of the same model that take turns (`bench.harness`). There is a table for each of `--samples`: the
I/O of a step is the same with more tokens, and the computation is longer. Medians of the turns, seconds of a step:

computation  of the run whose state is all in memory, without its updates
I/O          the bytes that the way reads and writes in a step, at the rate of its own swap files in the same turn, with
             nothing beside them
bound        the larger of the two
order        max(forward, I/O) + the rest of the computation: an update needs the norm, which comes behind the last
             backward, and the forward needs the update, so that I/O beside the backward is only that of the last slots
Adam         on the host, as long as it ran; of the run in memory, its updates
early        before the norm is known; no step is clipped, as most of a training are not
beside       the share of Adam that ran while the program computed
hidden       the share of Adam, as long as it takes in the run in memory, by which the step is not longer than the bound
cores        processor seconds of all ranks over the cores' seconds: 100 % is a machine that cannot do more
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import results
from bench.contestants.megazero_lanes import COMPUTES, COPIES, MAIN, READS, UPDATES, WRITES
from bench.field import megazero
from bench.harness import Contestant
from bench.overlap import Span, merged, shared
from bench.script import parser_of, report
from bench.workload import Workload
from megazero.program.instruction import UPDATE, UPDATE_HOST, Op

MEMORY, LATE = "in memory", "late"
_NVME = ("--offload-optimizer", "nvme")
_PARAMETERS_TOO = (*_NVME, "--offload-params", "nvme")
_ALL = (*_PARAMETERS_TOO, "--offload-gradients", "nvme")
_LATE, _EARLY = "--late-update", "--early-update"
WAYS: dict[str, tuple[str, ...]] = {
    MEMORY: (),
    "on time": _NVME,
    LATE: (*_NVME, _LATE),
    "late, parameters too": (*_PARAMETERS_TOO, _LATE),
    "late, gradients too": (*_ALL, _LATE),
    "late, gradients too, vertical": (*_ALL, "--micro-batch-order", "vertical", _LATE),
    "early": (*_NVME, _EARLY),
    "early, parameters too": (*_PARAMETERS_TOO, _EARLY),
    "early, gradients too": (*_ALL, _EARLY),
    "early, gradients too, vertical": (*_ALL, "--micro-batch-order", "vertical", _EARLY),
}
LIMIT, LEAST_HIDDEN = 1.10, 0.90
"""The most that a late step may take over its bound, and the least share of Adam that is hidden."""
LANES = (MAIN, COPIES, READS, UPDATES, WRITES)


@dataclass(frozen=True)
class Turn:
    """One way in one turn, seconds of a step. busy: by lane, of the first rank."""

    step: float
    computation: float
    forward: float
    io: float
    adam: float
    beside: float
    processor: float
    busy: dict[str, float]


def turn_of(reports: list[dict[str, Any]]) -> Turn:
    """From the reports of all ranks. The first step does not count: nothing of the step before is left to it."""
    every = len(reports[0]["steps"])
    count = every - 1
    lengths = ([end - begin for begin, end in one["steps"][1:]] for one in reports)
    step = statistics.mean(max(ranks) for ranks in zip(*lengths, strict=True))
    adam, computation, forward, beside = list[float](), list[float](), list[float](), list[float]()
    for one in reports:
        began, ended = one["steps"][1][0], one["steps"][-1][1]
        spans = [span for span in one["spans"] if began <= (span[2] + span[3]) / 2 <= ended]
        updates, computing = of(spans, UPDATE.value, UPDATE_HOST.value), of(spans, *COMPUTES)
        adam.append(length(updates) / count)
        computation.append((ended - began - length(of(spans, UPDATE.value))) / count)
        forward.append(length(of(spans, Op.FORWARD.value)) / count)
        beside.append(shared(updates, computing) / max(length(updates), 1e-9))
    seconds, alone = max(one["alone"][0] for one in reports), sum(one["alone"][1] for one in reports)
    moved = sum(sum(one["moved"]) for one in reports) / every
    return Turn(
        step,
        max(computation),
        max(forward),
        moved / alone * seconds if alone else 0.0,
        statistics.mean(adam),
        statistics.mean(beside),
        sum(one["processor"] for one in reports) / every,
        {lane: length(merged((a, b) for on, _, a, b in reports[0]["spans"] if on == lane)) / every for lane in LANES},
    )


def of(spans: Iterable[tuple[str, str, float, float]], *what: str) -> list[Span]:
    """The union of these spans."""
    return merged((begin, end) for _, name, begin, end in spans if name in what)


def length(spans: Iterable[Span]) -> float:
    """Seconds of disjoint spans."""
    return sum(end - begin for begin, end in spans)


def measure(
    work: Workload, ways: list[str], flags: list[str], rounds: int, steps: int, trace: Path | None
) -> dict[str, list[Turn]]:
    """These ways in turns. trace: a file for the lanes of the last turn of the last way."""
    replicas = work.ranks
    layout = ("--zero-stage", "1" if work.ranks > 1 else "0")
    found: dict[str, list[Turn]] = {way: [] for way in ways}
    running: dict[str, Contestant] = {}
    try:
        for way in ways:
            own = WAYS[way]
            words = (*layout, *own, *(flags if own else ()))
            one = Contestant(work, replace(megazero(way, *words, replicas=replicas), module="megazero_lanes"))
            running[way] = one
            one.prepare(2)
            one.ask("report")
        for number in range(rounds):
            for way in ways if number % 2 else reversed(ways):
                running[way].steps(1 + steps)
                reports = running[way].ask("report")
                found[way].append(turn_of(reports))
                if trace and way == ways[-1]:
                    trace.write_text(json.dumps(chrome(reports)))
            said = ", ".join(f"{way} {found[way][-1].step:.2f}" for way in ways)
            print(f"    round {number + 1}/{rounds}: {said}", file=sys.stderr, flush=True)
    finally:
        for one in running.values():
            one.stop()
    return found


def chrome(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The spans as chrome://tracing and Perfetto show them: a process for each rank, a thread for each lane."""
    return [
        {
            "name": what,
            "tid": f"{LANES.index(lane)} {lane}",
            "pid": rank,
            "ph": "X",
            "ts": a * 1e6,
            "dur": (b - a) * 1e6,
        }
        for rank, one in enumerate(reports)
        for lane, what, a, b in one["spans"]
    ]


@dataclass(frozen=True)
class Row:
    """A way: medians over the turns."""

    step: float
    computation: float
    forward: float
    io: float
    over: float
    over_order: float
    adam: float
    beside: float
    hidden: float
    cores: float


def row_of(turns: list[Turn], memory: list[Turn], cores: int) -> Row:
    """memory: the run in memory, of the same rounds."""
    pairs = list(zip(turns, memory, strict=True))
    bounds = [max(base.computation, own.io) for own, base in pairs]
    orders = [max(base.forward, own.io) + base.computation - base.forward for own, base in pairs]

    def median(values: Iterable[float]) -> float:
        return statistics.median(values)

    return Row(
        median(own.step for own in turns),
        median(base.computation for base in memory),
        median(base.forward for base in memory),
        median(own.io for own in turns),
        median(own.step / bound for own, bound in zip(turns, bounds, strict=True)),
        median(own.step / order for own, order in zip(turns, orders, strict=True)),
        median(own.adam for own in turns),
        median(own.beside for own in turns),
        median(1 - (own.step - b) / base.adam for own, b, base in zip(turns, bounds, memory, strict=True)),
        median(own.processor / own.step / cores for own in turns),
    )


HEADINGS = (
    "",
    "step",
    "computation",
    "forward",
    "I/O",
    "of the bound",
    "of the order",
    "Adam",
    "beside",
    "hidden",
    "cores",
)


def shown(way: str, row: Row) -> list[str]:
    parts = row.step, row.computation, row.forward, row.io, row.over, row.over_order, row.adam
    cells = [f"{part:.2f}" for part in parts]
    beside, hidden = ("", "") if way == MEMORY else (f"{row.beside:.0%}", f"{row.hidden:.0%}")
    return [way, *cells, beside, hidden, f"{row.cores:.0%}"]


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("."), help="where swap files are made")
    parser.add_argument("--ranks", type=int, default=1, help="%(default)s")
    parser.add_argument("--threads", type=int, default=1, help="of a rank: %(default)s")
    parser.add_argument("--layers", type=int, default=24, help="%(default)s")
    parser.add_argument("--hidden", type=int, default=512, help="%(default)s")
    parser.add_argument("--sequence", type=int, default=512, help="%(default)s")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 2], help="of a micro-batch: %(default)s")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1], help="of a step: %(default)s")
    parser.add_argument("--ways", default=";".join(WAYS), help="with semicolons, the first in memory: %(default)s")
    parser.add_argument("--rounds", type=int, default=4, help="%(default)s")
    parser.add_argument("--steps", type=int, default=3, help="of a turn: %(default)s")
    parser.add_argument("--nvme-buffer-bytes", default="256MB", help="%(default)s")
    parser.add_argument(
        "--bucket-size", type=int, help="of the ways on disks (default: a block, which a unit waits for)"
    )
    parser.add_argument("--trace", type=Path, help="a JSON file for the lanes of the last way's last turn")
    return parser.parse_args()


def measured(work: Workload, args: argparse.Namespace) -> bool:
    """Print the table of a workload, write its numbers to a file, and say whether a late step is within the limits."""
    flags = ["--nvme-path", str(args.folder.resolve()), "--nvme-buffer-bytes", args.nvme_buffer_bytes]
    flags += ["--bucket-size", str(args.bucket_size or 12 * work.hidden**2 + 13 * work.hidden)]
    found = measure(work, args.ways.split(";"), flags, 1 if args.quick else args.rounds, args.steps, args.trace)
    cores = len(results.cores())
    rows = {way: row_of(turns, found[MEMORY], cores) for way, turns in found.items()}
    text = results.table(HEADINGS, [shown(way, row) for way, row in rows.items()])
    settings = {"workload": asdict(work), "buffer": args.nvme_buffer_bytes, "limit": LIMIT, "hidden": LEAST_HIDDEN}
    data = {"ways": {way: [asdict(turn) for turn in turns] for way, turns in found.items()}}
    path = report(args, "offload-step", settings, data, text)
    print(f"{work.samples * work.sequence:,} tokens of a rank, {work.micro_batches} micro-batches\n\n{text}\n\n{path}")
    if LATE not in rows:
        return True
    late = rows[LATE]
    met = late.over <= LIMIT and late.hidden >= LEAST_HIDDEN
    print(
        f"late: {late.over:.2f} times the bound, at most {LIMIT}; {late.hidden:.0%} of Adam hidden, at least "
        f"{LEAST_HIDDEN:.0%}: {'met' if met else 'MISSED'}\n",
        flush=True,
    )
    return met


def main() -> None:
    """Status 1 if a late step of any size exceeds the limits."""
    args = arguments()
    heads = args.hidden // 64
    works = [
        Workload(
            "offload", args.layers, args.hidden, heads, args.sequence, 8192, *batch, args.ranks, args.threads, clip=1e3
        )
        for batch in itertools.product(args.samples, args.micro_batches)
    ]
    if args.quick:
        works = [Workload("tiny", 2, 64, 2, 32, 256, 1, 1, args.ranks, 1)]
    met = [measured(work, args) for work in works]
    sys.exit(0 if all(met) or args.quick else 1)


if __name__ == "__main__":
    main()
