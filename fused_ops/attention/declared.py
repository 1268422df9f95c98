"""What attention's bodies of other libraries keep for their backward, and how much they multiply: a declaration, for
the meta device.

There no body of torch, of a package or of a compiler runs that is made for a card. b micro-batch, n heads, g key-value
heads, s sequence, d head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_ops.attention.reach import EVERYTHING, Reach
from fused_ops.blocks import opmath_dtype
from fused_ops.native.stand_in import AttentionWork, witness

ROWS = 32
"""The memory-efficient body rounds up the number of queries of its sums to a multiple of this."""


class _Attended(torch.autograd.Function):
    """Saves queries, keys, values, the context, and one number for each head and query (rounded up: `rounded`).

    The context has the order of memory of the queries, [s, b, n, d]; by_sample: [b, s, n, d]. Backward makes three
    gradients. Forward multiplies for scores and context, backward for the scores again and four gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, by_sample: bool, rounded: int, reach: Reach
    ) -> Tensor:
        b, n, s, d = query.shape
        if by_sample:
            context = query.new_empty(b, s, n, d).permute(0, 2, 1, 3)
        else:
            context = query.new_empty(s, b, n, d).permute(1, 2, 0, 3)
        norms = query.new_empty(b, n, -(-s // rounded) * rounded, dtype=opmath_dtype(query.dtype))
        ctx.save_for_backward(query, key, value, context, norms)
        ctx.seen = reach.seen(s)
        _tell((query, key, value, context, norms), 2, ctx.seen)
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, context, norms = ctx.saved_tensors
        made = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        _tell((query, key, value, context, norms, grads[0], *made), 5, ctx.seen)
        return *made, None, None, None


def _tell(tensors: tuple[Tensor, ...], products: int, seen: float) -> None:
    """tensors: all that are read and written, the queries first."""
    told, query = witness(), tensors[0]
    if told is not None:
        b, n, s, d = query.shape
        moved = sum(tensor.nbytes for tensor in tensors)
        told.attended(AttentionWork(b * n, s, d, products, seen, query.dtype, moved))


def declared_flash(query: Tensor, key: Tensor, value: Tensor, reach: Reach = EVERYTHING) -> Tensor:
    """Flash attention, torch's and the package's, and FlexAttention: query [b, n, s, d], key and value [b, g, s, d] ->
    [b, n, s, d]. Keys out of reach are not computed.
    """
    context: Tensor = _Attended.apply(query, key, value, False, 1, reach)
    return context


def declared_efficient(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Torch's memory-efficient attention: all [b, n, s, d]."""
    context: Tensor = _Attended.apply(query, key, value, True, ROWS, EVERYTHING)
    return context
