"""Ops on a GPU, forward and backward apart: a program that prints one line of JSON for each measurement.

    python -m bench.gpu_ops ITEMS [--device cuda] [--tiny] [--seconds 130]

ITEMS: a list of [case, dtype, contestant] as JSON, in the order in which they are measured; contestants are ours, torch
and compiled, and ["facts", "", ""] measures the GPU's bandwidth and FLOP/s. If an item ends the program, the caller
(`bench/gpu.py`) starts it again without that item.

Each repetition has fresh inputs, and a large tensor is read before each timed part, so that the inputs are not in the
cache. The host does not wait between repetitions: it queues the timed kernels while the large tensor is read, so the
times contain no launch latency.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.case import BothWays, Case, Sizes
from bench.op_cases import CASES
from megazero.system import device as devices
from megazero.system.streams import Stopwatch

FLUSHED = 1 << 30
"""Bytes that are read before a timed part: 20 times the cache of an H100, and a third of a millisecond for the host to
run ahead.
"""
REPETITIONS, WARM_UP = 25, 3
# Sizes of a step of GPT 1.3B: 8 x 2048 tokens, 16 heads of 128, and a fifth of its parameters, so that rivals fit too.
LARGE = Sizes(b=8, s=2048, n=16, d=128, f=8192, v=50304, parameters=1 << 28)
TIMED = (
    "softmax",
    "layernorm",
    "residual + layernorm",
    "rmsnorm",
    "adam",
    "bias + tanh gelu",
    "cross-entropy",
    "cross-entropy, torch in fp32",
    "swiglu",
    "bias + dropout + residual",
    "rotary",
    "sum of squares",
    "adam against torch, equal work",
    "adam against apex",
)
IN_FP32 = ("softmax", "layernorm", "bias + tanh gelu")

Item = tuple[str, str, str]
"""(case, dtype, contestant)."""


def items() -> list[Item]:
    """All items. Those that compile come last, because they take longest."""
    cases = [(name, "bfloat16") for name in TIMED] + [(name, "float32") for name in IN_FP32]
    first = [(*case, who) for case in cases for who in ("ours", "torch")]
    last = [(*case, "compiled") for case in cases if case[0] != "adam against apex"]
    return [("facts", "", ""), *first, *last]


@dataclass
class Bench:
    """How something is timed on a device."""

    device: torch.device
    repetitions: int
    large: Tensor

    @classmethod
    def on(cls, device: torch.device, tiny: bool) -> Bench:
        large = torch.ones((1 << 16 if tiny else FLUSHED) // 4, dtype=torch.float32, device=device)
        return cls(device, 2 if tiny else REPETITIONS, large)

    def lap(self, run: Callable[[], Any]) -> tuple[Stopwatch, Any]:
        """Time one run from a cold cache, and return its result."""
        self.large.sum()
        watch = Stopwatch(self.device)
        watch.start()
        result = run()
        watch.stop()
        return watch, result

    def once(self, prepare: Callable[[], tuple[Tensor, ...]], run: Callable[..., object]) -> dict[str, Stopwatch]:
        """One repetition: forward and backward apart, if the op has both."""
        tensors = prepare()
        if not isinstance(run, BothWays):
            return {"whole": self.lap(lambda: run(*tensors))[0]}
        leaves = [tensor for tensor in tensors[:-1] if tensor.requires_grad]
        forward, out = self.lap(lambda: run.forward(*tensors[:-1]))
        gradient = tensors[-1].view(out.shape).to(out.dtype)
        backward, _ = self.lap(lambda: torch.autograd.grad(out, leaves, gradient, allow_unused=True))
        return {"forward": forward, "backward": backward}

    def seconds(
        self, prepare: Callable[[], tuple[Tensor, ...]], run: Callable[..., object]
    ) -> tuple[float, dict[str, list[float]]]:
        """(seconds of the first call, with all that is compiled in it; seconds of every repetition, by part)."""
        began = time.perf_counter()
        self.once(prepare, run)
        devices.synchronize(self.device)
        first = time.perf_counter() - began
        for _ in range(WARM_UP):
            self.once(prepare, run)
        laps = [self.once(prepare, run) for _ in range(self.repetitions)]
        return first, {part: [lap[part].seconds() for lap in laps] for part in laps[0]}


def facts(bench: Bench, tiny: bool) -> dict[str, Any]:
    """Bytes per second of a copy within the device, reads and writes counted, and FLOP/s of a square bf16 product."""
    elements, width = (1 << 16, 64) if tiny else (1 << 29, 8192)
    source = torch.randn(elements, device=bench.device)
    target = torch.empty_like(source)
    _, copies = bench.seconds(tuple, lambda: target.copy_(source))
    a, b = (torch.randn(width, width, device=bench.device).to(torch.bfloat16) for _ in range(2))
    _, products = bench.seconds(tuple, lambda: a @ b)
    return {
        "copy_bytes_per_second": 2 * source.nbytes / statistics.median(copies["whole"]),
        "copy_bytes": source.nbytes,
        "matmul_flops_per_second": 2 * width**3 / statistics.median(products["whole"]),
        "matmul_width": width,
        "seconds": {"copy": copies["whole"], "matmul": products["whole"]},
    }


def contestant(case: Case, who: str) -> Callable[..., object]:
    """The function that is timed."""
    if who == "ours":
        return case.ours
    if who == "torch":
        return case.theirs
    plain = case.to_compile or case.theirs
    if isinstance(plain, BothWays):
        return BothWays(torch.compile(plain.forward, dynamic=False))
    compiled: Callable[..., object] = torch.compile(plain, dynamic=False)
    return compiled


def measured(bench: Bench, item: Item, sizes: Sizes) -> dict[str, Any]:
    """Seconds of each part, the bytes that it has to move, and what the first call took."""
    name, dtype, who = item
    torch.manual_seed(1)
    with torch.device(bench.device):
        case = CASES[name](replace(sizes, dtype=getattr(torch, dtype)))
    first, seconds = bench.seconds(case.prepare, contestant(case, who))
    needed = {"whole": case.bytes, "forward": case.forward_bytes, "backward": case.bytes - case.forward_bytes}
    found = {"shape": case.shape, "moves": case.moves, "bytes": {part: needed[part] for part in seconds}}
    return found | {"seconds": seconds, "first_call_seconds": first}


def result_of(bench: Bench, item: Item, tiny: bool, late: bool) -> dict[str, Any]:
    """The result of an item, or {"skipped": why}. A CUDA error is raised, since no later result could be trusted."""
    if late:
        return {"skipped": "no time was left"}
    try:
        return facts(bench, tiny) if item[0] == "facts" else measured(bench, item, Sizes.tiny() if tiny else LARGE)
    except Exception as reason:
        if "CUDA error" in str(reason):
            raise
        traceback.print_exc()
        return {"skipped": f"{type(reason).__name__}: {reason}".splitlines()[0][:200]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", help="JSON")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny tensors, two repetitions: does everything run?")
    parser.add_argument("--seconds", type=float, default=130.0, help="after which no item is begun (%(default)s)")
    args = parser.parse_args()
    began = time.perf_counter()
    bench = Bench.on(devices.resolve(args.device, 0), args.tiny)
    for item in map(tuple, json.loads(args.items)):
        print(json.dumps({"begin": item}), flush=True)
        result = result_of(bench, item, args.tiny, time.perf_counter() - began > args.seconds)
        print(json.dumps({"item": item, **result}), flush=True)


if __name__ == "__main__":
    main()
