"""Attention with ALiBi on a GPU: FlexAttention with each set of its kernel's options, beside the other bodies.

    python -m bench.flex_options                 # b 8, s 2048, 16 heads of 128: half a minute, most of it compiling
    python -m bench.flex_options --rehearse      # on a CPU, tiny and uncompiled: does everything run?

Prints a line for each: milliseconds of forward and backward, and how far the context and the gradient are from those of
FlexAttention without options, in the norm. "flash, no ALiBi" computes less: it is what the bias costs at most.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bench.card import why_not
from bench.case import BothWays
from bench.gpu_ops import Bench
from fused_ops.attention.flex import CONTIGUOUS, causal_blocks, flex_body
from fused_ops.attention.reference import reference_attention
from fused_ops.attention.sdpa import FLASH, flash_attention
from fused_ops.softmax import alibi_slopes
from megazero.system import device as devices

Body = Callable[[Tensor], Tensor]
SAFE = "ROWS_GUARANTEED_SAFE"
"""Holds for one document: the first block that the kernel takes has a key that each row sees."""
SHAPE, TINY = (2048, 8, 16, 128), (256, 2, 2, 16)


def bodies(s: int, heads: int, width: int, device: torch.device) -> Iterator[tuple[str, Body]]:
    """(name, function from the projection to the context)."""
    on_card, scale = device.type == "cuda", 1 / math.sqrt(width)
    slopes, blocks = torch.tensor(alibi_slopes(heads), device=device), causal_blocks(s, device)
    function = torch.compile(flex_body, dynamic=False, fullgraph=True) if on_card else flex_body

    def flex(options: tuple[str, ...], mixed: Tensor) -> Tensor:
        return function(mixed, heads, 1, width, scale, slopes, None, blocks, options)

    def softmax(mixed: Tensor) -> Tensor:
        return reference_attention(mixed, heads, 1, width, scale=scale, slopes=slopes, documents=None, dropout=None)

    def flash(mixed: Tensor) -> Tensor:
        return flash_attention(mixed, heads, 1, width, scale=scale, backends=FLASH if on_card else ())

    for options in ((), (CONTIGUOUS,), (SAFE,), (CONTIGUOUS, SAFE)):
        yield f"flex {' '.join(options) or 'without options'}", partial(flex, options)
    yield "softmax", softmax
    yield "flash, no ALiBi", flash


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU with tiny tensors")
    args = parser.parse_args()
    missing = None if args.rehearse else why_not()
    if missing:
        parser.exit(2, f"{missing}\n")
    device = devices.resolve("cpu" if args.rehearse else "cuda", 0)
    s, b, heads, width = TINY if args.rehearse else SHAPE
    bench = Bench.on(device, args.rehearse)
    generator = torch.Generator(device).manual_seed(1)
    mixed, gradient = (
        torch.randn(s, b, heads * columns, generator=generator, device=device).to(torch.bfloat16)
        for columns in (3 * width, width)
    )
    first: tuple[Tensor, Tensor] | None = None
    for name, body in bodies(s, heads, width, device):
        recorded = mixed.detach().requires_grad_(device.type == "cuda" or not name.startswith("flex"))
        context = body(recorded)
        (grad,) = torch.autograd.grad(context, recorded, gradient) if recorded.requires_grad else (context,)
        first = first or (context.detach(), grad)
        off = ", ".join(f"{_distance(*pair):.1e}" for pair in zip((context.detach(), grad), first, strict=True))
        if not recorded.requires_grad:  # FlexAttention has no backward on a CPU
            print(f"{name:50} off by {off}; rehearsed forward only", flush=True)
            continue
        _, seconds = bench.seconds(partial(tuple, (recorded, gradient)), BothWays(body))
        times = ", ".join(f"{part} {1e3 * statistics.median(laps):.3f} ms" for part, laps in seconds.items())
        print(f"{name:50} {times}; off by {off}", flush=True)


def _distance(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return math.nan
    return float((one.double() - other.double()).norm() / other.double().norm())


if __name__ == "__main__":
    main()
