"""What attention with a window costs beside attention without one, on a CPU: the time follows the scores that are seen.

    python -m bench.window_attention            # 16 windows of 512 and of 1024 positions, on one thread: two minutes
    python -m bench.window_attention --quick    # 16 windows of 64 positions, one round: does it start?

A sequence has 16 windows. So a window leaves s W of s^2 / 2 scores, an eighth, and the time forward and backward would
be an eighth of that without a window, if no more scores than these were computed and nothing else took time. A factor
says how much more it is: 8 times the time with the window over that without it, in the same round. Every round has all
kinds of layers, in turns. The factor of a row is the median of all rounds. Times are of the thread's processor, so what
another program takes of it does not count.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import results
from bench.script import parser_of, report, say
from fused_ops.attention import causal_attention
from fused_ops.attention.reach import EVERYTHING, Reach
from fused_ops.known import known_numbers
from fused_ops.softmax import alibi_slopes

WINDOWS = 16
"""Windows in a sequence."""
HEADS, SIZE = 2, 64
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Kind(NamedTuple):
    """A layer of the table. windowed: with the window, whose time is compared with that of `EVERYTHING`."""

    windowed: bool
    options: dict[str, Any]


PLAIN: dict[str, Any] = {"slopes": None, "documents": None, "scale": SIZE**-0.5}
KINDS = {
    "no window": Kind(False, PLAIN),
    "a window": Kind(True, PLAIN),
    "a window, ALiBi": Kind(True, PLAIN | {"slopes": torch.tensor(alibi_slopes(HEADS))}),
    "no window, a cap": Kind(False, PLAIN | {"cap": 50.0}),
    "a window, a cap": Kind(True, PLAIN | {"cap": 50.0}),
}
BESIDE = {"a window": "no window", "a window, ALiBi": "no window", "a window, a cap": "no window, a cap"}
"""A row -> that without a window."""

Seconds = dict[str, list[tuple[float, float]]]
"""Kind -> forward and backward of each round."""


def step(mixed: Tensor, cotangent: Tensor, window: int, kind: Kind) -> tuple[float, float]:
    """Seconds of forward and backward, both on this thread."""
    begin = time.thread_time()
    reach = Reach(window) if kind.windowed else EVERYTHING
    context = causal_attention(mixed, HEADS, 1, SIZE, **kind.options, reach=reach)
    middle = time.thread_time()
    torch.autograd.grad(context, mixed, cotangent)
    return middle - begin, time.thread_time() - middle


def measure(dtype: torch.dtype, window: int, rounds: int) -> Seconds:
    """All kinds in turns, in the other order in every second round, after one round that does not count."""
    length = WINDOWS * window
    mixed = known_numbers(length, 1, HEADS * 3 * SIZE, seed=1, dtype=dtype).requires_grad_()
    cotangent = known_numbers(length, 1, HEADS * SIZE, seed=2, dtype=dtype)
    seconds: Seconds = {name: [] for name in KINDS}
    for number in range(-1, rounds):
        for name, kind in KINDS.items() if number % 2 else reversed(KINDS.items()):
            taken = step(mixed, cotangent, window, kind)
            if number >= 0:
                seconds[name].append(taken)
    return seconds


def factors(seconds: Seconds, row: str) -> list[float]:
    """Of forward, backward and both: the median of what the row takes over its share of the time without a window."""
    share, rounds = 2 / WINDOWS, list(zip(seconds[row], seconds[BESIDE[row]], strict=True))
    parts = [[own[part] / full[part] for own, full in rounds] for part in (0, 1)]
    return [statistics.median(quotients) / share for quotients in (*parts, [sum(a) / sum(b) for a, b in rounds])]


HEADINGS = "layer", "window", "dtype", "forward, ms", "backward, ms", "factor, forward", "backward", "both"


def lines(all_seconds: dict[str, Seconds]) -> list[list[str]]:
    """A line of the table for each kind of layer, dtype and window."""
    shown = []
    for case, seconds in all_seconds.items():
        window, dtype = case.split()
        for name, rounds in seconds.items():
            times = [f"{statistics.median(times) * 1e3:.1f}" for times in zip(*rounds, strict=True)]
            compared = [f"{factor:.2f}" for factor in factors(seconds, name)] if name in BESIDE else [""] * 3
            shown.append([name, window, dtype, *times, *compared])
    return shown


def main() -> None:
    """Print one table and write its numbers to a file."""
    parser = parser_of(__doc__, "small windows, one round: a smoke test")
    parser.add_argument("--rounds", type=int, default=7, help="%(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds, windows = (1, (64,)) if args.quick else (args.rounds, (512, 1024))
    seconds = {
        f"{window} {name}": measure(dtype, window, rounds) for window in windows for name, dtype in DTYPES.items()
    }
    text = results.table(HEADINGS, lines(seconds))
    settings = {"rounds": rounds, "windows": WINDOWS, "heads": HEADS, "head_dim": SIZE, "threads": 1}
    path = report(args, "window-attention", settings, {"seconds": seconds}, text)
    say(f"{text}\n\n{path}")


if __name__ == "__main__":
    main()
