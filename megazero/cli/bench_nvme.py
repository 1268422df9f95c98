"""`megazero bench-nvme`: what a disk reads and writes as training uses it, and a step whose state is there."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser, given_path
from megazero.config.options import bytes_of, whole_number

DESCRIPTION = """
What the disk under PATH reads and writes in a second, the way that training uses it: which size of requests and how
many in flight are best. Beside it a plain loop of one request at a time, as of dd with O_DIRECT, and fio where it is
installed. A file of --bytes is written there and removed.

With --parameters it says what a step takes whose optimizer state lies on this disk.
"""
EXAMPLES = (
    "megazero bench-nvme /mnt/nvme",
    "megazero bench-nvme /mnt/nvme --bytes 16GB --seconds 60 --json",
    "megazero bench-nvme /mnt/nvme --parameters 7e9 --share 0.5",
    "python tools/bench_nvme.py /mnt/nvme --parameters 1.3B",
)
COUNT_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}
OPTIMIZER_BYTES = {"bf16": 12, "fp16": 12, "fp32": 8, "fp64": 16}
"""Of a parameter, by --precision: two moments, and in 16 bits the master weight, in the dtype of the state."""
SMALLEST_FILE = 64 << 20
"""Bytes of the file: enough for the largest request in both of its areas."""
MIB = 1 << 20
REQUESTS = 1 * MIB, 2 * MIB, 4 * MIB
IN_FLIGHT = 4, 8, 16
PLAIN_REQUEST = 4 * MIB
"""Bytes of a request of the plain loop."""
SECONDS_OF_A_DAY = 86_400


def count_of(text: str) -> int:
    """A number of parameters: 1300000000, 1.3e9, 1.3B. Raises ValueError."""
    unit = COUNT_UNITS.get(text[-1:].lower())
    return whole_number(text) if unit is None else round(float(text[:-1]) * unit)


def _checked(kind: str, read: Callable[[str], float], fits: Callable[[float], bool]) -> Callable[[str], float]:
    """argparse's type for a number that must be of some kind."""

    def read_checked(text: str) -> float:
        with suppress(ValueError, OverflowError):
            if fits(number := read(text)):
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind}")

    return read_checked


SECONDS = _checked("a number of seconds from 1 to 3600", float, lambda number: 1 <= number <= 3600)
BYTES = _checked("at least 64MiB, such as 4GB", bytes_of, lambda number: SMALLEST_FILE <= number < 1 << 60)
PARAMETERS = _checked("a number of parameters, such as 1.3e9 or 1.3B", count_of, lambda number: 0 < number < 1 << 53)
SHARE = _checked("a share above 0 and up to 1", float, lambda number: 0 < number <= 1)


def parser() -> argparse.ArgumentParser:
    flags = command_parser("bench-nvme", DESCRIPTION, EXAMPLES)
    add = flags.add_argument
    add("path", type=given_path, metavar="PATH", help="a folder on the disk")
    add("--seconds", type=SECONDS, default=20.0, metavar="S", help="time of all measurements together (default 20)")
    add("--bytes", type=BYTES, default=4_000_000_000, metavar="SIZE", help="size of the file (default 4GB)")
    add("--backend", choices=("auto", "io_uring", "threads"), default="auto", help="how bytes are moved (default auto)")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add("--parameters", type=PARAMETERS, metavar="N", help="say what a step takes with the state of N parameters here")
    add("--share", type=SHARE, default=1.0, help="share of these parameters whose state is here (default 1)")
    add("--precision", choices=tuple(OPTIMIZER_BYTES), default="bf16", help="of that training (default bf16)")
    return flags


def main(argv: Sequence[str]) -> int:
    flags = parser()
    args = flags.parse_args(argv)
    if not args.path.is_dir():
        flags.error(f"{args.path}: there is no such folder")
    if args.parameters is None:
        for flag in ("share", "precision"):
            if getattr(args, flag) != flags.get_default(flag):
                flags.error(f"--{flag} {getattr(args, flag)} goes with --parameters")
    return status_of(lambda: run(args))


@dataclass(frozen=True)
class SpeedRow:
    """A row of the table. way: what moves the bytes. in_flight: requests at a time. read, write: bytes per second."""

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
    """What was measured in the folder `path`.

    backend  how megazero moves bytes there, and why
    rows     of megazero: every size and number of requests. best: the row that moves a byte there and back soonest
    others   the plain loop, and fio, beside the best
    reads_beside, writes_beside: bytes per second of the best row's requests while both lanes run at once, as in a step
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
    """A step of Adam with the state of so many parameters on the disk, where it is read and written once.

    seconds: of the disk, reading and writing at once. written_a_day: bytes, if one step follows the other.
    """

    parameters: int
    bytes_each_way: int
    seconds: float
    written_a_day: float


def run(args: argparse.Namespace) -> None:
    """Measure and print. Raises DiskError."""
    speed = measure(args.path, args.bytes, args.seconds, args.backend)
    state_bytes = OPTIMIZER_BYTES[args.precision]
    step = estimate(speed, args.parameters, args.share, state_bytes) if args.parameters is not None else None
    if args.json:
        print(json.dumps(asdict(speed) | {"step": asdict(step) if step else None}))
        return
    print("\n".join(table(speed)))
    if step is not None:
        print(sentence(step, args.precision))


def measure(path: Path, total: int, seconds: float, backend: str) -> DiskSpeed:
    """Measure for about so many seconds with a file of `total` bytes. Raises DiskError."""
    from megazero.disk.backend import DiskOptions
    from megazero.disk.measure import TRIAL, DiskTrial
    from megazero.disk.swap_file import remove_leftovers

    def options(request_bytes: int, in_flight: int) -> DiskOptions:
        return DiskOptions(request_bytes, in_flight, backend, direct_bytes=request_bytes)

    remove_leftovers(path, jobs=TRIAL)  # not the state of a training, which may go on from it
    fio = shutil.which("fio")
    grid = [(size, depth) for size in REQUESTS for depth in IN_FLIGHT]
    # Shares of the time: a row has two, both lanes at once two, the plain loop two, fio four.
    seconds_each = seconds / (2 * len(grid) + 4 + (4 if fio else 0))
    with DiskTrial(path, options(*grid[0]), total) as trial:
        moved_by = trial.words
        trial.fill()
        rows = []
        for size, depth in grid:
            trial.use(options(size, depth))
            (read,), (write,) = trial.rates(False, seconds=seconds_each), trial.rates(True, seconds=seconds_each)
            rows.append(SpeedRow("megazero", size, depth, read, write))
        best = max(rows, key=lambda row: row.both_ways)
        trial.use(options(best.request_bytes, best.in_flight))
        reads_beside, writes_beside = trial.rates(False, True, seconds=2 * seconds_each)
        plain = [trial.plain_rate(write, PLAIN_REQUEST, seconds_each) for write in (False, True)]
    others = [SpeedRow("plain loop", PLAIN_REQUEST, 1, *plain)]
    if fio:
        others += _fio(fio, path, best, total, seconds_each)
    return DiskSpeed(str(path), moved_by, rows, best, others, reads_beside, writes_beside)


def _fio(program: str, path: Path, best: SpeedRow, total: int, seconds: float) -> Iterator[SpeedRow]:
    """What fio reaches with the requests of the best row; nothing where it fails."""
    file = path / "megazero-fio.bin"
    flags = (
        f"--name=megazero-fio --bs={best.request_bytes} --iodepth={best.in_flight} --size={total} --output-format=json "
        f"--runtime={max(1, round(2 * seconds))} --time_based --end_fsync=1 --direct=1 --ioengine=io_uring"
    )
    rates = []
    for kind in ("read", "write"):
        # The path is a word of its own, because it may have blanks.
        command = [program, *f"{flags} --rw={kind}".split(), f"--filename={file}"]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            break
        report = json.loads(finished.stdout[finished.stdout.index("{") :])  # fio may print notes before its JSON
        rates.append(float(report["jobs"][0][kind]["bw_bytes"]))
    file.unlink(missing_ok=True)
    if len(rates) == 2:
        yield SpeedRow("fio", best.request_bytes, best.in_flight, *rates)


def estimate(speed: DiskSpeed, parameters: int, share: float, state_bytes: int) -> StepEstimate:
    """What a step takes: as many bytes are read as written, and both lanes run at once until the slower lane is done.

    state_bytes: of a parameter's optimizer state.
    """
    on_disk = round(parameters * share)
    bytes_each_way = on_disk * state_bytes
    seconds = bytes_each_way / min(speed.reads_beside, speed.writes_beside)
    return StepEstimate(on_disk, bytes_each_way, seconds, bytes_each_way / seconds * SECONDS_OF_A_DAY)


def table(speed: DiskSpeed) -> Iterator[str]:
    """The lines of the table; the best row has a mark."""
    yield f"{speed.path}: {speed.backend}"
    yield f"{'':2}{'':12}{'request':>9}{'in flight':>11}{'read GB/s':>11}{'write GB/s':>12}"
    for row in (*speed.rows, *speed.others):
        mark = "*" if row == speed.best else ""
        request = f"{row.request_bytes // MIB} MiB"
        yield f"{mark:2}{row.way:12}{request:>9}{row.in_flight:>11}{row.read / 1e9:>11.2f}{row.write / 1e9:>12.2f}"
    yield f"best: requests of {speed.best.request_bytes // MIB} MiB, {speed.best.in_flight} in flight"
    yield f"reading and writing at once: {speed.reads_beside / 1e9:.2f} and {speed.writes_beside / 1e9:.2f} GB/s"


def sentence(step: StepEstimate, precision: str) -> str:
    return (
        f"a step of Adam with the state of {step.parameters:,} parameters here ({precision}): "
        f"{step.bytes_each_way / 1e9:,.2f} GB are read and as many written\n"
        f"in {step.seconds:,.2f} s; step after step that writes {step.written_a_day / 1e12:,.1f} TB a day"
    )
