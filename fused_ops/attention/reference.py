"""Causal attention with grouped queries in plain torch and the fused softmax.

It is the specification of fused_ops/attention, and its body for every case on every device. s sequence, b micro-batch,
n heads, g key-value heads, r = n/g, d head dim. The projection `mixed` [s, b, g(r + 2)d] has for each key-value head
its r query heads, its key and its value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """As `causal_attention`, for any dtype and device."""
    s, b, _ = mixed.shape
    query, key, value = mixed.unflatten(2, (groups, repeats + 2, head_dim)).split([repeats, 1, 1], dim=3)
    context = _scored(query, key, value, scale, slopes, documents, dropout)
    return context.reshape(s, b, groups * repeats * head_dim)


def _scored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    slopes: Tensor | None,
    documents: Tensor | None,
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
    probabilities = scaled_causal_alibi_softmax(scores, 1.0, slopes, documents=documents)
    if dropout is not None:
        probabilities = dropout(probabilities)
    context = _product(probabilities.view(b * groups, repeats * s, s), values, 1.0)
    return context.view(b, groups, repeats, s, size).permute(3, 0, 1, 2, 4)


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale a b: a [batch, m, k], b [batch, k, n] -> [batch, m, n]."""
    if lacks_products(a):
        return product(a, b, scale)
    nothing = a.new_empty(()).expand(a.shape[0], a.shape[1], b.shape[2])
    return torch.baddbmm(nothing, a, b, beta=0, alpha=scale)
