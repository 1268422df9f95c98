"""What `megazero bench-nvme` does."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from megazero.disk.backend import DiskOptions
from megazero.disk.measure import TRIAL, DiskTrial
from megazero.disk.swap_file import remove_leftovers

MIB = 1 << 20
REQUESTS = 1 * MIB, 2 * MIB, 4 * MIB
IN_FLIGHT = 4, 8, 16
PLAIN = 4 * MIB
"""Bytes of a request of the plain loop."""
SECONDS_OF_A_DAY = 86_400


@dataclass(frozen=True)
class SpeedRow:
    """A row of the table.

    way           what moves the bytes
    request_bytes of one request
    in_flight     requests at a time
    read, write   bytes per second
    """

    way: str
    request_bytes: int
    in_flight: int
    read: float
    write: float

    @property
    def both_ways(self) -> float:
        """Bytes per second, of a byte that is read and then written."""
        return 1 / (1 / self.read + 1 / self.write)


@dataclass(frozen=True)
class DiskSpeed:
    """What was measured.

    path     the folder
    backend  how megazero moves bytes there, and why
    rows     of megazero: every size and number of requests
    best     the row of them that moves a byte there and back soonest
    others   the plain loop, and fio, beside the best
    reads_beside, writes_beside
             bytes per second of the best row's requests while both lanes run at once, as in a step
    """

    path: str
    backend: str
    rows: list[SpeedRow]
    best: SpeedRow
    others: list[SpeedRow]
    reads_beside: float
    writes_beside: float


@dataclass(frozen=True)
class StepEstimate:
    """A step of Adam whose optimizer state is read and written once.

    parameters     whose state is on the disk
    bytes_each_way that are read, and that are written
    seconds        of the disk, reading and writing at once
    written_a_day  bytes, if one step follows the other
    """

    parameters: int
    bytes_each_way: int
    seconds: float
    written_a_day: float


def measure(path: Path, total: int, seconds: float, backend: str) -> DiskSpeed:
    """Measure for about so many seconds with a file of `total` bytes. Raises DiskError."""
    remove_leftovers(path, jobs=TRIAL)  # not the state of a training, which may go on from it
    fio = shutil.which("fio")
    grid = [(size, depth) for size in REQUESTS for depth in IN_FLIGHT]
    each = seconds / (2 * len(grid) + 4 + (4 if fio else 0))
    with DiskTrial(path, _options(*grid[0], backend), total) as trial:
        words = trial.words
        trial.fill()
        rows = []
        for size, depth in grid:
            trial.use(_options(size, depth, backend))
            (read,), (write,) = trial.rates(False, seconds=each), trial.rates(True, seconds=each)
            rows.append(SpeedRow("megazero", size, depth, read, write))
        best = max(rows, key=lambda row: row.both_ways)
        trial.use(_options(best.request_bytes, best.in_flight, backend))
        reads_beside, writes_beside = trial.rates(False, True, seconds=2 * each)
        plain = [trial.plain_rate(write, PLAIN, each) for write in (False, True)]
    others = [SpeedRow("plain loop", PLAIN, 1, *plain)]
    if fio:
        others += _fio(fio, path, best, total, each)
    return DiskSpeed(str(path), words, rows, best, others, reads_beside, writes_beside)


def _options(request_bytes: int, in_flight: int, backend: str) -> DiskOptions:
    return DiskOptions(request_bytes, in_flight, backend, direct_bytes=request_bytes)


def _fio(program: str, path: Path, best: SpeedRow, total: int, seconds: float) -> Iterator[SpeedRow]:
    """What fio reaches with the requests of the best row; nothing where it fails."""
    rates = []
    for kind, key in (("read", "read"), ("write", "write")):
        words = f"--name=megazero-fio --rw={kind} --bs={best.request_bytes} --iodepth={best.in_flight} --size={total}"
        more = f"--runtime={max(1, round(2 * seconds))} --time_based --end_fsync=1 --direct=1 --ioengine=io_uring"
        command = [
            program,
            *words.split(),
            *more.split(),
            f"--filename={path}/megazero-fio.bin",
            "--output-format=json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            break
        rates.append(float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][key]["bw_bytes"]))
    (path / "megazero-fio.bin").unlink(missing_ok=True)
    if len(rates) == 2:
        yield SpeedRow("fio", best.request_bytes, best.in_flight, *rates)


def estimate(speed: DiskSpeed, parameters: int, share: float, state_bytes: int) -> StepEstimate:
    """What a step takes: as many bytes are read as written, and both lanes run at once until the slower one is done."""
    here = round(parameters * share)
    each_way = here * state_bytes
    seconds = each_way / min(speed.reads_beside, speed.writes_beside)
    return StepEstimate(here, each_way, seconds, each_way / seconds * SECONDS_OF_A_DAY)


def run(args: argparse.Namespace, state_bytes: int) -> None:
    """Measure and print. state_bytes: of a parameter's optimizer state. Raises DiskError."""
    speed = measure(args.path, args.bytes, args.seconds, args.backend)
    step = estimate(speed, args.parameters, args.share, state_bytes) if args.parameters else None
    if args.json:
        print(json.dumps(asdict(speed) | {"step": asdict(step) if step else None}))
    else:
        print("\n".join(table(speed)))
        if step is not None:
            print(sentence(step, args.precision))


def table(speed: DiskSpeed) -> Iterator[str]:
    """The lines of the table; the best row has a mark."""
    yield f"{speed.path}: {speed.backend}"
    yield f"{'':2}{'':12}{'request':>9}{'in flight':>11}{'read GB/s':>11}{'write GB/s':>12}"
    for row in (*speed.rows, *speed.others):
        mark = "*" if row == speed.best else ""
        request = f"{row.request_bytes // MIB} MiB"
        yield f"{mark:2}{row.way:12}{request:>9}{row.in_flight:>11}{row.read / 1e9:>11.2f}{row.write / 1e9:>12.2f}"
    size, beside = speed.best.request_bytes // MIB, (speed.reads_beside / 1e9, speed.writes_beside / 1e9)
    yield f"best: requests of {size} MiB, {speed.best.in_flight} in flight"
    yield f"reading and writing at once: {beside[0]:.2f} and {beside[1]:.2f} GB/s"


def sentence(step: StepEstimate, precision: str) -> str:
    return (
        f"a step of Adam with the state of {step.parameters:,} parameters here ({precision}): "
        f"{step.bytes_each_way / 1e9:,.2f} GB are read and as many written\n"
        f"in {step.seconds:,.2f} s; step after step that writes {step.written_a_day / 1e12:,.1f} TB a day"
    )
