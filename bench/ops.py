"""Every op of fused_ops compared with torch's and with the limits of this machine.

    python -m bench.ops                      # every op
    python -m bench.ops --only attention     # some
    python -m bench.ops --quick              # tiny tensors: does everything run?

Forward and backward are timed together if an op has both; ours and torch's take turns. The limit of an op is the larger
of two times: its bytes to read and write at the rate of memory, and its products at the rate of the best large matrix
product. Both rates are measured in the same run. Tensors of a few MiB fit in the cache and may beat a limit of bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from bench import results
from bench.case import Case, Sizes
from bench.op_cases import CASES
from bench.script import add_turns, parser_of, report, say
from megazero.system.allocator import restart_with_settings


@dataclass(frozen=True)
class Limits:
    """copy, memory: bytes per second, reads and writes counted. matmul: FLOP/s of the best large product by dtype.

    memory is the better rate of a copy and of changing a large tensor in place, because a copy also reads the cache
    lines that it overwrites.
    """

    copy: float
    memory: float
    matmul: dict[str, float]

    def seconds(self, case: Case) -> float:
        return max(case.bytes / self.memory, case.flops / self.matmul[case.dtype])


@dataclass(frozen=True)
class Timing:
    """Seconds of every repetition; `error` if ours or theirs does not exist here."""

    ours: list[float]
    theirs: list[float]
    limit: float
    error: str = ""

    @property
    def ratio(self) -> float:
        return statistics.median(self.theirs) / statistics.median(self.ours)


def seconds_of(
    prepare: Callable[[], tuple[Tensor, ...]], run: Callable[..., object], least: float, fewest: int = 3
) -> list[float]:
    """Seconds of repetitions that together take `least` seconds; `prepare` is not timed."""
    taken: list[float] = []
    while len(taken) < fewest or sum(taken) < least:
        tensors = prepare()
        began = time.perf_counter()
        run(*tensors)
        taken.append(time.perf_counter() - began)
    return taken


def best_rate(amount: float, run: Callable[[], object], least: float) -> float:
    """The amount per second of the fastest repetition."""
    run()
    return amount / min(seconds_of(tuple, lambda: run(), least))


def measure_limits(quick: bool) -> Limits:
    least, elements, widths = (0.0, 1 << 20, (128,)) if quick else (0.3, 1 << 26, (1024, 2048, 4096))
    source = torch.ones(elements)
    target = torch.empty_like(source)
    copy = best_rate(2 * source.nbytes, lambda: target.copy_(source), least)
    in_place = best_rate(2 * source.nbytes, lambda: source.mul_(1.0), least)
    matmul = {}
    for dtype in (torch.bfloat16, torch.float32):
        squares = [torch.randn(width, width).to(dtype) for width in widths]
        rates = [best_rate(2 * len(x) ** 3, lambda x=x: x @ x, least) for x in squares]  # type: ignore[misc]
        matmul[str(dtype).removeprefix("torch.")] = max(rates)
    return Limits(copy, max(copy, in_place), matmul)


def measure(
    make: Callable[[Sizes], Case], sizes: Sizes, limits: Limits, rounds: int, least: float
) -> tuple[Case | None, Timing]:
    """Time ours and theirs in alternating turns, `least` seconds each."""
    try:
        case = make(sizes)
        for run in (case.ours, case.theirs):
            run(*case.prepare())
    except (ImportError, AttributeError) as reason:
        return None, Timing([], [], 0.0, f"{type(reason).__name__}: {reason}")
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        ours += seconds_of(case.prepare, case.ours, least)
        theirs += seconds_of(case.prepare, case.theirs, least)
    return case, Timing(ours, theirs, limits.seconds(case))


HEADINGS = ("op", "shape", "ms", "torch ms", "times faster", "limit ms", "of the limit")


def row(case: Case, timing: Timing) -> list[str]:
    ours, theirs = statistics.median(timing.ours), statistics.median(timing.theirs)
    ratios = (f"{timing.ratio:.2f}", f"{timing.limit * 1e3:.2f}", f"{timing.limit / ours:.0%}")
    return [case.name, case.shape, f"{ours * 1e3:.2f}", f"{theirs * 1e3:.2f}", *ratios]


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, "tiny tensors, one repetition: a smoke test")
    parser.add_argument("--only", default="", help="ops whose name contains this")
    parser.add_argument(
        "--threads", type=int, default=len(results.cores()), help="of torch and the kernels (%(default)s)"
    )
    add_turns(parser, 3, 0.25)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    restart_with_settings()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    sizes, rounds, least = (Sizes.tiny(), 1, 0.0) if args.quick else (Sizes(), args.rounds, args.seconds)
    limits = measure_limits(args.quick)
    rates = ", ".join(f"{dtype} {rate / 1e12:.2f} TFLOP/s" for dtype, rate in limits.matmul.items())
    say(
        f"{json.dumps(results.machine())}\nlimits with {args.threads} threads: copy {limits.copy / 1e9:.1f} GB/s, "
        f"memory {limits.memory / 1e9:.1f} GB/s, {rates}"
    )
    found: list[tuple[Case, Timing]] = []
    skipped: dict[str, str] = {}
    for name, make in CASES.items():
        if args.only not in name:
            continue
        case, timing = measure(make, sizes, limits, rounds, least)
        if case is None:
            skipped[name] = timing.error
            say(f"{name}: skipped, {timing.error}")
            continue
        found.append((case, timing))
        say("  ".join(row(case, timing)))
    finish(args, limits, found, skipped)


def finish(
    args: argparse.Namespace, limits: Limits, found: Sequence[tuple[Case, Timing]], skipped: dict[str, str]
) -> None:
    """Write the JSON, the table and the plot."""
    rows = [
        {"name": c.name, "shape": c.shape, "bytes": c.bytes, "flops": c.flops, **asdict(t), "ratio": t.ratio}
        for c, t in found
    ]
    settings = {"threads": args.threads, "rounds": args.rounds, "seconds": args.seconds}
    contents = {"limits": asdict(limits), "ops": rows, "skipped": skipped}
    text = results.table(HEADINGS, [row(case, timing) for case, timing in found])
    path = report(args, "ops", settings, contents, text)
    results.plot(
        path.with_suffix(".png"),
        "Ops: torch's time over ours",
        "times faster",
        {"": [(c.name, t.ratio) for c, t in found]},
    )
    say(f"\n{text}\n\n{path}")


if __name__ == "__main__":
    main()
