"""`megazero bench-nvme`: what a step takes whose state is on a disk, and the rates of that disk for a placement."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megazero.cli.exit_status import status_of
from megazero.cli.parser import command_parser, given_path
from megazero.config.options import bytes_of, whole_number

if TYPE_CHECKING:
    from torch import Tensor

FIO = (
    "fio --name=raw --directory=PATH --unlink=1 --size=4g --rw=read --bs=4m --iodepth=16 --ioengine=io_uring "
    "--direct=1 --overwrite=1 --time_based --runtime=10"
)
"""What measures a disk alone, with the requests of `disk.transports.DiskOptions`, over a file that is there already."""
DESCRIPTION = f"""
What a training with its optimizer state under PATH reaches there: parts are read, updated by Adam and written again as
in a step, with its buffers, checksums and requests. Also the rates that --placement auto measures at the start of a run
and a file of --placement-rates has: read and write. A file of --bytes is written there and removed.

With --parameters it says what a step takes whose optimizer state lies on this disk.

What the disk does without megazero is measured by fio (--rw=write --end_fsync=1 for writes, --rw=rw for both at once):
  {FIO[: FIO.index(" --ioengine")]}
      {FIO[FIO.index("--ioengine") :]}
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
"""Bytes of the file: enough for parts of some MB in all slots."""
LEAST_PARTS = 16
"""Of the file: more than there are slots, so that a part is not read while it is written."""
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
    add("--json", action="store_true", help="print one JSON object instead of sentences")
    add("--parameters", type=PARAMETERS, metavar="N", help="say what a step takes with the state of N parameters here")
    add("--share", type=SHARE, default=1.0, help="share of these parameters whose state is here (default 1)")
    add("--precision", choices=tuple(OPTIMIZER_BYTES), default="bf16", help="of the training (default bf16)")
    add("--backend", type=_gone, help=argparse.SUPPRESS)
    return flags


def _gone(value: str) -> NoReturn:
    """The type of a flag that is no more."""
    raise argparse.ArgumentTypeError(
        "is gone, because a training cannot choose how bytes are moved; the first line says which way it takes, and "
        "fio measures others (--ioengine=io_uring, libaio or psync)"
    )


def main(argv: Sequence[str]) -> int:
    flags = parser()
    args = flags.parse_args(argv)
    if not args.path.is_dir():
        flags.error(f"{args.path}: there is no such folder")
    if args.parameters is None and args.share != flags.get_default("share"):
        flags.error(f"--share {args.share} goes with --parameters")
    return status_of(lambda: run(args))


@dataclass(frozen=True)
class DiskSpeed:
    """What was measured in the folder `path`, by one process.

    backend      how megazero moves bytes there, and why
    part_bytes   of the parts of a step
    each_way     bytes that a step reads in a second, and writes in the same second
    updating     the share of a step's time in which the processor updated parts
    read, write  bytes per second of one lane alone, as in a file of --placement-rates
    """

    path: str
    backend: str
    part_bytes: int
    each_way: float
    updating: float
    read: float
    write: float


@dataclass(frozen=True)
class StepEstimate:
    """A step of Adam with the state of so many parameters on the disk, where it is read and written once.

    seconds: without computation. written_a_day: bytes, if one step follows the other.
    """

    parameters: int
    bytes_each_way: int
    seconds: float
    written_a_day: float


def run(args: argparse.Namespace) -> None:
    """Measure and print. Raises DiskError."""
    speed = measure(args.path, args.bytes, args.seconds, args.precision)
    state_bytes = OPTIMIZER_BYTES[args.precision]
    step = estimate(speed, args.parameters, args.share, state_bytes) if args.parameters is not None else None
    if args.json:
        print(json.dumps(asdict(speed) | {"step": asdict(step) if step else None}))
        return
    print("\n".join(sentences(speed, args.precision)))
    if step is not None:
        print(sentence(step, args.precision))


def measure(path: Path, total: int, seconds: float, precision: str) -> DiskSpeed:
    """Measure for about so many seconds with a file of `total` bytes. Raises DiskError."""
    from megazero.disk.measure import TRIAL, DiskTrial
    from megazero.disk.swap_file import remove_leftovers
    from megazero.disk.transports import DiskOptions

    remove_leftovers(path, jobs=TRIAL)  # not the state of a training, which may go on from it
    with DiskTrial(path, DiskOptions(), total, min(_part_bytes(precision), total // LEAST_PARTS)) as trial:
        trial.fill()
        step = trial.step(_adam(precision, trial.piece_bytes), seconds / 2)
        (read,), (write,) = trial.rates(False, seconds=seconds / 4), trial.rates(True, seconds=seconds / 4)
        return DiskSpeed(str(path), trial.backend, trial.piece_bytes, step.rate, step.updating, read, write)


def _part_bytes(precision: str) -> int:
    """Bytes of optimizer state of a part, in a run with --offload-optimizer nvme and no other flags about it."""
    from megazero.config.schema import OffloadConfig, OptimizerConfig, ParallelConfig
    from megazero.config.tiers import TierShare
    from megazero.zero.offload import most_elements
    from megazero.zero.shape import state_widths

    offload = OffloadConfig(offload_optimizer=TierShare.parsed("nvme"))
    widths = state_widths(OptimizerConfig(precision=precision), ParallelConfig(), offload)
    return most_elements(widths, offload) * widths.state


def _adam(precision: str, part_bytes: int) -> Callable[[Tensor], None]:
    """Adam on the bytes of a part: master weights, if there are any, and two moments, one behind the other."""
    import torch

    from fused_ops.adam import AdamRange, adam_steps
    from megazero.config.dtypes import compute_dtype, state_dtype

    dtype, count = state_dtype(precision), part_bytes // OPTIMIZER_BYTES[precision]
    gradient, parameters = torch.rand(count, dtype=dtype), torch.zeros(count, dtype=compute_dtype(precision))
    one, skip = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.bool)

    @torch.no_grad()
    def update(memory: Tensor) -> None:
        *master, first, second = memory[: count * OPTIMIZER_BYTES[precision]].view(dtype).split(count)
        rounded, weights = (parameters, master[0]) if master else (None, parameters)
        adam_steps(
            [AdamRange(rounded, weights, gradient, first, second, 0.0)],
            lr=1e-4,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            decoupled=True,
            step=one,
            multiplier=one,
            skip=skip,
        )

    return update


def estimate(speed: DiskSpeed, parameters: int, share: float, state_bytes: int) -> StepEstimate:
    """What a step takes beside which nothing is computed. state_bytes: of a parameter's optimizer state."""
    on_disk = round(parameters * share)
    bytes_each_way = on_disk * state_bytes
    seconds = bytes_each_way / speed.each_way
    return StepEstimate(on_disk, bytes_each_way, seconds, bytes_each_way / seconds * SECONDS_OF_A_DAY)


def sentences(speed: DiskSpeed, precision: str) -> Iterator[str]:
    """The lines about the disk. The last two are as in a file of --placement-rates."""
    yield f"{speed.path}: {speed.backend}"
    yield (
        f"a step ({precision}): {speed.each_way / 1e9:.2f} GB/s are read and as many written, in parts of "
        f"{speed.part_bytes / 1e6:.1f} MB; for {speed.updating:.0%} of the time one is updated"
    )
    yield "one lane alone, a second, for --placement-rates:"
    yield from (f"{lane}: {rate / 1e9:.3g}GB" for lane, rate in (("read", speed.read), ("write", speed.write)))


def sentence(step: StepEstimate, precision: str) -> str:
    return (
        f"a step of Adam with the state of {step.parameters:,} parameters here ({precision}): "
        f"{step.bytes_each_way / 1e9:,.2f} GB are read and as many written\n"
        f"in {step.seconds:,.2f} s; step after step that writes {step.written_a_day / 1e12:,.1f} TB a day"
    )
