"""What attention's bodies of other libraries keep for their backward: a declaration, for the meta device.

There no body of torch, of a package or of a compiler runs that is made for a card. b micro-batch, n heads, g key-value
heads, s sequence, d head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_ops.blocks import opmath_dtype

ROWS = 32
"""The memory-efficient body rounds up the number of queries of its sums to a multiple of this."""


class _Attended(torch.autograd.Function):
    """Saves queries, keys, values, the context, and one number for each head and query (rounded up: `rounded`).

    The context has the order of memory of the queries, [s, b, n, d]; by_sample: [b, s, n, d]. Backward makes three
    gradients.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, by_sample: bool, rounded: int) -> Tensor:
        b, n, s, d = query.shape
        if by_sample:
            context = query.new_empty(b, s, n, d).permute(0, 2, 1, 3)
        else:
            context = query.new_empty(s, b, n, d).permute(1, 2, 0, 3)
        norms = query.new_empty(b, n, -(-s // rounded) * rounded, dtype=opmath_dtype(query.dtype))
        ctx.save_for_backward(query, key, value, context, norms)
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None


def declared_flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Flash attention, torch's and the package's, and FlexAttention: query [b, n, s, d], key and value [b, g, s, d] ->
    [b, n, s, d].
    """
    context: Tensor = _Attended.apply(query, key, value, False, 1)
    return context


def declared_efficient(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Torch's memory-efficient attention: all [b, n, s, d]."""
    context: Tensor = _Attended.apply(query, key, value, True, ROWS)
    return context
