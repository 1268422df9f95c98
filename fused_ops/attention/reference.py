"""Causal attention with grouped queries in plain torch and the fused softmax.

It is the specification of fused_ops/attention, and its body for every case on every device. s sequence, b micro-batch,
n heads, g key-value heads, r = n/g, d head dim. The projection `mixed` [s, b, g(r + 2)d] has for each key-value head
its r query heads, its key and its value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_ops.attention.reach import EVERYTHING, Reach, with_chunks
from fused_ops.blocks import opmath_dtype
from fused_ops.products import lacks_products, product
from fused_ops.softmax import scaled_causal_alibi_softmax


def reference_attention(
    mixed: Tensor,
    groups: int,
    repeats: int,
    head_dim: int,
    *,
    scale: float,
    slopes: Tensor | None,
    documents: Tensor | None,
    reach: Reach = EVERYTHING,
    cap: float | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """As `causal_attention`, for any dtype and device. A window saves no work here: its scores are hidden."""
    s, b, _ = mixed.shape
    documents = with_chunks(documents, reach.chunk, mixed)
    query, key, value = mixed.unflatten(2, (groups, repeats + 2, head_dim)).split([repeats, 1, 1], dim=3)
    context = _scored(query, key, value, scale, slopes, documents, reach.window, cap, dropout)
    return context.reshape(s, b, groups * repeats * head_dim)


def _scored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    slopes: Tensor | None,
    documents: Tensor | None,
    window: int | None,
    cap: float | None,
    dropout: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Scores, softmax in place, context: [s, b, g, r, d].

    A group's query heads are rows of one product, so keys and values are not repeated. The product applies the scale,
    since unscaled 16-bit scores could overflow.
    """
    s, b, groups, repeats, size = query.shape
    rows = query.permute(1, 2, 3, 0, 4).reshape(b * groups, repeats * s, size)
    keys = key.permute(1, 2, 3, 4, 0).reshape(b * groups, size, s)
    values = value.permute(1, 2, 3, 0, 4).reshape(b * groups, s, size)
    scores = _product(rows, keys, scale).view(b, groups * repeats, s, s)
    if cap is not None:
        scores = _Capped.apply(scores, cap)
    if window is not None and window < s:
        scores = _Windowed.apply(scores, window)
    probabilities = scaled_causal_alibi_softmax(scores, 1.0, slopes, documents=documents)
    if dropout is not None:
        probabilities = dropout(probabilities)
    context = _product(probabilities.view(b * groups, repeats * s, s), values, 1.0)
    return context.view(b, groups, repeats, s, size).permute(3, 0, 1, 2, 4)


class _Capped(torch.autograd.Function):
    """cap tanh(score / cap) in place on scores [b, n, s, s], sample by sample. Saves the slope of this, as large as the
    scores: the capped scores would not do, since the softmax overwrites them.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, cap: float) -> Tensor:
        scores = scores.detach()  # an alias instead of `mark_dirty`, as in the softmax: the scores are a view
        slopes = torch.empty_like(scores) if ctx.needs_input_grad[0] else None
        for sample, plane in enumerate(scores):
            share = plane.to(opmath_dtype(scores.dtype)) / cap
            plane.copy_(share.tanh() * cap)
            if slopes is not None:
                slopes[sample] = share.cosh_().pow_(-2)  # 1 - tanh^2 would lose its digits where tanh is near 1
        ctx.save_for_backward(slopes)
        return scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (slopes,) = ctx.saved_tensors
        return grads[0] * slopes, None


class _Windowed(torch.autograd.Function):
    """-inf in place of the scores [b, n, s, s] of keys before the window. The softmax makes their gradients 0, so that
    backward has nothing to hide.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, window: int) -> Tensor:
        scores = scores.detach()  # an alias, as above
        position = torch.arange(scores.shape[3], device=scores.device)
        return scores.masked_fill_(position <= position[:, None] - window, float("-inf"))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0], None


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale a b: a [batch, m, k], b [batch, k, n] -> [batch, m, n]."""
    if lacks_products(a):
        return product(a, b, scale)
    nothing = a.new_empty(()).expand(a.shape[0], a.shape[1], b.shape[2])
    return torch.baddbmm(nothing, a, b, beta=0, alpha=scale)
