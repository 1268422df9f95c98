"""Kernels of a GPU that are no row of `bench.gpu_ops`: the embedding's gradient, FP8 copies, Adam over many ranges.

    python -m bench.gpu_more                  # on a GPU
    python -m bench.gpu_more --rehearse       # tiny sizes on the CPU, with the emulated kernels: does everything run?

Prints microseconds, and the bytes that have to be moved in that time as a share of what a plain copy moves.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.card import why_not
from bench.gpu_ops import Bench, facts
from fused_ops import fp8
from fused_ops.adam import AdamRange, adam_steps
from fused_ops.embedding import embedding_gradient
from fused_ops.native import library
from megazero.system import device as devices

Timed = tuple[str, float, Callable[[], object]]
"""(what, bytes that it has to move, the function)."""


def embeddings(tiny: bool) -> Iterator[Timed]:
    """Each gradient row is read; each row of the table that occurs is read and written."""
    tokens, rows, h = (200, 50, 16) if tiny else (16384, 50304, 2048)
    grad, into = torch.randn(tokens, h).to(torch.bfloat16), torch.zeros(rows, h)
    uniform = torch.randint(rows, (tokens,))
    padded = torch.where(torch.rand(tokens) < 0.5, 3, uniform)
    for name, ids in (("each token once", uniform), ("one token is half", padded)):
        moved = grad.nbytes + 8 * h * len(ids.unique())
        yield f"embedding gradient, {name}", moved, partial(embedding_gradient, ids, grad, into)
        yield f"index_add of torch, {name}", moved, partial(add_by_torch, ids, grad, into)


def add_by_torch(ids: Tensor, grad: Tensor, into: Tensor) -> None:
    into.index_add_(0, ids, grad.float())


def copies(tiny: bool) -> Iterator[Timed]:
    """16 bits are read, and one or two bytes are written. A scale of its own has the matrix read before."""
    x = torch.randn(*((48, 64) if tiny else (16384, 8192))).to(torch.bfloat16)
    for transposed in (False, True):
        into = fp8.empty(x, fp8.E4M3, transposed)
        moved = x.nbytes + (1 + transposed) * x.numel()
        name = f"FP8 copy{' by rows and columns' if transposed else ''}"
        yield name, moved, partial(fp8.fill, "input", x, into, scale=torch.ones(()), amax=torch.ones(()))
        yield f"{name}, and its largest value", moved, partial(fp8.fill, "input", x, into, scale=torch.ones(()))
        yield f"{name}, with a scale of its own", moved + x.nbytes, partial(fp8.fill, "input", x, into)
    values = fp8.empty(x, fp8.E4M3, False).values
    yield "FP8 transposed", 2 * values.nbytes, partial(fp8.transpose, values)
    yield "FP8 transposed by torch", 2 * values.nbytes, lambda: values.t().contiguous()


def ranges(tiny: bool) -> Iterator[Timed]:
    """Forty buckets, each with a long and a short range, in one call and in one for each range."""
    state, numbers = [], dict[str, Any]()
    for length in [6000, 40] * 3 if tiny else [2_500_000, 40_000] * 40:
        master, grad, first, second = (torch.rand(length) for _ in range(4))
        state.append(AdamRange(master.to(torch.bfloat16), master, grad, first, second, 0.1))
    numbers |= {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decoupled": True}
    numbers |= {"step": torch.ones((), dtype=torch.float64), "multiplier": torch.ones((), dtype=torch.float64)}
    numbers["skip"] = torch.zeros((), dtype=torch.bool)
    moved = 30.0 * sum(own.master.numel() for own in state)
    yield f"Adam, {len(state)} ranges at once", moved, partial(adam_steps, state, **numbers)
    yield f"Adam, {len(state)} ranges one by one", moved, lambda: [adam_steps([own], **numbers) for own in state]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, tiny, with the emulated kernels")
    tiny = parser.parse_args().rehearse
    if tiny:
        os.environ["MEGAZERO_FUSED"] = library.EMULATED
    elif missing := why_not():
        sys.exit(f"bench.gpu_more: {missing}; nothing was measured")
    bench = Bench.on(devices.resolve("cpu" if tiny else "cuda", 0), tiny)
    torch.manual_seed(1)
    copy = facts(bench, tiny)["copy_bytes_per_second"]
    print(f"{'kernel':50} {'us':>9} {'of the copy':>11}")
    with torch.device(bench.device):
        timed = (*embeddings(tiny), *copies(tiny), *ranges(tiny))
    for what, moved, run in timed:
        _, seconds = bench.seconds(tuple, run)
        own = statistics.median(seconds["whole"])
        print(f"{what:50} {own * 1e6:9.1f} {moved / own / copy:11.0%}", flush=True)


if __name__ == "__main__":
    main()
