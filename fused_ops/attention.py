"""Causal self-attention from the fused projection to the context, with grouped queries, ALiBi and document boundaries.

s sequence, b micro-batch, n heads, g key-value heads, r = n/g, d head dim. On the CPU a blocked kernel on the matrix units
(csrc/torch/attention_*.cpp) whose memory is linear in s: it reads queries, keys and values where they lie and writes their
gradients into one tensor of the same layout. Otherwise the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_ops.attention_reference import reference_attention
from fused_ops.native.library import Library, matrix_kernels, suffix


class _Attention(torch.autograd.Function):
    """Saves the projection, the context and a number per query and head: log2 of the sum of its 2^score."""

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, library: Library, sizes: tuple[int, ...], scale: float, slopes: Tensor | None, documents: Tensor | None
    ) -> Tensor:
        s, b, groups, repeats, head_dim = sizes
        out = mixed.new_empty((s, b, groups * repeats * head_dim))
        norms = mixed.new_empty((b, groups * repeats, s), dtype=torch.float32)
        library.call(f"attention_forward_{suffix(mixed.dtype)}", mixed, out, norms, slopes, documents, *sizes, scale)
        ctx.save_for_backward(mixed, out, norms, slopes, documents)
        ctx.library, ctx.sizes, ctx.scale = library, sizes, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        mixed, out, norms, slopes, documents = ctx.saved_tensors
        gradient, grad = torch.empty_like(mixed), grads[0].contiguous()
        name = f"attention_backward_{suffix(mixed.dtype)}"
        ctx.library.call(name, mixed, out, grad, norms, gradient, slopes, documents, *ctx.sizes, ctx.scale)
        return gradient, None, None, None, None, None


def causal_attention(
    mixed: Tensor, groups: int, repeats: int, head_dim: int, *, scale: float, slopes: Tensor | None, documents: Tensor | None
) -> Tensor:
    """softmax(scale query key^T + slope * key position) value over the visible keys: [s, b, g(r + 2)d] -> [s, b, nd].

    mixed: a key-value head's r query heads, then its key, then its value. A query sees keys up to its own position, and with
    documents (int64 [b, s], equal numbers adjacent) those of its own document only. slopes: [n] or None. 16-bit tensors are
    multiplied with sums in fp32; the gradient of `mixed` is one tensor. What is not finite reaches all that depends on it,
    and may reach more of the same sample and key-value head. The kernel's results do not depend on the number of threads.
    """
    library = matrix_kernels(mixed)
    if library is None or mixed.numel() == 0:
        return reference_attention(mixed, groups, repeats, head_dim, scale=scale, slopes=slopes, documents=documents)
    sizes = (mixed.shape[0], mixed.shape[1], groups, repeats, head_dim)
    slopes = None if slopes is None else slopes.to(torch.float32).contiguous()
    documents = None if documents is None else documents.contiguous()
    result: Tensor = _Attention.apply(mixed.contiguous(), library, sizes, scale, slopes, documents)
    return result
