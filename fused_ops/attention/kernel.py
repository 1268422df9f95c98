"""Attention's C++ kernel (csrc/torch/attention_*.cpp) as an autograd function, and a trial of its results before its
use.

s sequence, b micro-batch, g key-value heads, r query heads of each, d head dim.
"""

from __future__ import annotations

import math
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fused_ops.attention.reach import EVERYTHING, Reach
from fused_ops.attention.reference import reference_attention
from fused_ops.graph import apply_or_forward
from fused_ops.known import disagreement, known_numbers
from fused_ops.native.library import Library, suffix
from fused_ops.native.stand_in import AttentionWork, witness
from fused_ops.softmax import alibi_slopes

ALLOWED = MappingProxyType({torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2})
"""Largest relative error against float64, in the norm: twice that of rounding, and a hundredth of that of a wrong
layout.
"""
_TRIED = 150, 2, 2, 2, 20
"""s, b, g, r, d of the trial. They are no multiples of blocks, tiles or pairs; s is two blocks of keys."""


class _Attention(torch.autograd.Function):
    """Saves the projection, the context, and for each query and head log2 of the sum of 2^score."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        library: Library,
        sizes: tuple[int, ...],
        slopes: Tensor | None,
        documents: Tensor | None,
        numbers: tuple[float | int, ...],
    ) -> Tensor:
        out, norms = _context(library, mixed, sizes, slopes, documents, numbers)
        ctx.save_for_backward(mixed, out, norms, slopes, documents)
        ctx.library, ctx.sizes, ctx.numbers = library, sizes, numbers
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        mixed, out, norms, slopes, documents = ctx.saved_tensors
        gradient = _gradient(
            ctx.library, mixed, out, grads[0].contiguous(), norms, ctx.sizes, slopes, documents, ctx.numbers
        )
        return gradient, None, None, None, None, None


def _numbers(scale: float, reach: Reach, cap: float | None) -> tuple[float | int, ...]:
    """The last arguments of the C functions, which take 0 for what is not set."""
    return float(scale), *reach.numbers, float(cap or 0.0)


def _context(
    library: Library,
    mixed: Tensor,
    sizes: tuple[int, ...],
    slopes: Tensor | None,
    documents: Tensor | None,
    numbers: tuple[float | int, ...],
) -> tuple[Tensor, Tensor]:
    s, b, groups, repeats, head_dim = sizes
    out = mixed.new_empty((s, b, groups * repeats * head_dim))
    norms = mixed.new_empty((b, groups * repeats, s), dtype=torch.float32)
    _tell(mixed, sizes, 2, numbers)
    library.call(f"attention_forward_{suffix(mixed.dtype)}", mixed, out, norms, slopes, documents, *sizes, *numbers)
    return out, norms


def _gradient(
    library: Library,
    mixed: Tensor,
    out: Tensor,
    grad: Tensor,
    norms: Tensor,
    sizes: tuple[int, ...],
    slopes: Tensor | None,
    documents: Tensor | None,
    numbers: tuple[float | int, ...],
) -> Tensor:
    gradient = torch.empty_like(mixed)
    _tell(mixed, sizes, 5, numbers)
    name, bounds = f"attention_backward_{suffix(mixed.dtype)}", (slopes, documents)
    library.call(name, mixed, out, grad, norms, gradient, *bounds, *sizes, *numbers)
    return gradient


def _tell(mixed: Tensor, sizes: tuple[int, ...], products: int, numbers: tuple[float | int, ...]) -> None:
    """Tell the witness of the meta device what the kernel multiplies."""
    told = witness()
    if told is not None and mixed.is_meta:
        s, b, groups, repeats, head_dim = sizes
        reach = Reach(int(numbers[1]) or None, int(numbers[2]) or None)
        told.attended(AttentionWork(b * groups * repeats, s, head_dim, products, reach.seen(s), mixed.dtype))


def kernel_attention(
    library: Library,
    mixed: Tensor,
    *heads: int,
    scale: float,
    slopes: Tensor | None,
    documents: Tensor | None,
    reach: Reach = EVERYTHING,
    cap: float | None = None,
) -> Tensor:
    """As `causal_attention`, by the kernel of `library`. heads: g, r, d."""
    slopes = None if slopes is None else slopes.to(torch.float32).contiguous()
    documents = None if documents is None else documents.contiguous()
    result: Tensor = apply_or_forward(
        _Attention,
        mixed.contiguous(),
        library,
        (*mixed.shape[:2], *heads),
        slopes,
        documents,
        _numbers(scale, reach, cap),
    )
    return result


@cache
def refusal(library: Library, dtype: torch.dtype) -> str:
    """Why the kernel is not used for a dtype on this machine, in a line; empty if its results agree with float64.

    It is tried once in a process: context and gradient of random numbers, with ALiBi and documents. The kernel uses
    matrix products of torch's library, which chooses instructions by the processor.
    """
    s, b, groups, repeats, head_dim = sizes = _TRIED
    scale, slopes = 1 / math.sqrt(head_dim), torch.tensor(alibi_slopes(groups * repeats), device="cpu")
    documents = (torch.arange(s, device="cpu") >= torch.tensor([[s], [s // 3]], device="cpu")).long()
    with torch.inference_mode(False), torch.enable_grad():
        mixed = known_numbers(s, b, groups * (repeats + 2) * head_dim, seed=1, dtype=dtype)
        grad = known_numbers(s, b, groups * repeats * head_dim, seed=2, dtype=dtype)
        numbers = _numbers(scale, EVERYTHING, None)
        out, norms = _context(library, mixed, sizes, slopes, documents, numbers)
        gradient = _gradient(library, mixed, out, grad, norms, sizes, slopes, documents, numbers)
        leaf = mixed.double().requires_grad_()
        exact = reference_attention(leaf, groups, repeats, head_dim, scale=scale, slopes=slopes, documents=documents)
        (exact_gradient,) = torch.autograd.grad(exact, leaf, grad.double())
    off = disagreement(out, exact, ALLOWED[dtype]) or disagreement(gradient, exact_gradient, ALLOWED[dtype])
    return f"{off} on this machine" if off else ""
