"""`megazero bench-nvme`: its flags; `disk_speed` measures."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

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
COUNTS = {"k": 10**3, "m": 10**6, "b": 10**9}
OPTIMIZER_BYTES = {"bf16": 12, "fp16": 12, "fp32": 8, "fp64": 16}
"""Of a parameter, by --precision: two moments, and in 16 bits the master weight, in the dtype of the state."""
SMALLEST = 64 << 20
"""Bytes of the file: enough for the largest request in both of its areas."""


def count_of(words: str) -> int:
    """A number of parameters: 1300000000, 1.3e9, 1.3B. Raises ValueError."""
    unit = COUNTS.get(words[-1:].lower())
    return whole_number(words) if unit is None else round(float(words[:-1]) * unit)


def _checked(kind: str, read: Callable[[str], float], fits: Callable[[float], bool]) -> Callable[[str], float]:
    """argparse's type for a number that must be of some kind."""

    def read_checked(words: str) -> float:
        try:
            found = read(words)
        except (ValueError, OverflowError):
            found = math.nan
        if not fits(found):
            raise argparse.ArgumentTypeError(f"{words!r} is not {kind}")
        return found

    return read_checked


SECONDS = _checked("a number of seconds from 1 to 3600", float, lambda found: 1 <= found <= 3600)
BYTES = _checked("at least 64MiB, such as 4GB", bytes_of, lambda found: SMALLEST <= found < 1 << 60)
PARAMETERS = _checked("a number of parameters, such as 1.3e9 or 1.3B", count_of, lambda found: 0 < found < 1 << 53)
SHARE = _checked("a share above 0 and up to 1", float, lambda found: 0 < found <= 1)


def parser() -> argparse.ArgumentParser:
    made = command_parser("bench-nvme", DESCRIPTION, EXAMPLES)
    add = made.add_argument
    add("path", type=given_path, metavar="PATH", help="a folder on the disk")
    add("--seconds", type=SECONDS, default=20.0, metavar="S", help="time of all measurements together (default 20)")
    add("--bytes", type=BYTES, default=4_000_000_000, metavar="SIZE", help="size of the file (default 4GB)")
    add("--backend", choices=("auto", "io_uring", "threads"), default="auto", help="how bytes are moved (default auto)")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add("--parameters", type=PARAMETERS, metavar="N", help="say what a step takes with the state of N parameters here")
    add("--share", type=SHARE, default=1.0, help="share of these parameters whose state is here (default 1)")
    add("--precision", choices=tuple(OPTIMIZER_BYTES), default="bf16", help="of that training (default bf16)")
    return made


def main(argv: Sequence[str]) -> int:
    made = parser()
    args = made.parse_args(argv)
    if not args.path.is_dir():
        made.error(f"{args.path}: there is no such folder")
    if args.parameters is None:
        for flag in ("share", "precision"):
            if getattr(args, flag) != made.get_default(flag):
                made.error(f"--{flag} {getattr(args, flag)} goes with --parameters")
    from megazero.cli.disk_speed import run

    return status_of(lambda: run(args, OPTIMIZER_BYTES[args.precision]))
