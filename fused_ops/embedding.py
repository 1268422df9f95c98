"""Embedding lookup and its gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import increment_version

from fused_ops.blocks import opmath_dtype
from fused_ops.native.library import kernels, suffix


@torch.no_grad()
def embedding_gradient(ids: Tensor, grad: Tensor, into: Tensor, accumulate: bool = True) -> None:
    """Add each id's gradient rows to into[id]. accumulate=False: zero `into` first.

    ids int64 of any shape, grad [..., h], into [rows, h], fp32 (fp64 for fp64 gradients) and contiguous. The kernels
    add in the order of the tokens, whatever the number of threads. Raises IndexError for an id outside the table (on a
    CPU).
    """
    if not accumulate:
        into.zero_()
    ids, rows = ids.reshape(-1), grad.reshape(-1, into.shape[1])
    library = kernels(rows) if into.dtype == torch.float32 and into.is_contiguous() else None
    if library is None:
        into.index_add_(0, ids, rows.to(into.dtype))
    elif rows.numel():
        if ids.device.type == "cpu":
            _check(ids, into.shape[0])
        if library.on_device:  # the kernel wants sorted ids: one thread sums all rows of an id
            shape, (ids, order) = (ids.numel(), *into.shape), torch.sort(ids, stable=True)
            library.call(f"embedding_gradient_sorted_{suffix(rows.dtype)}", *shape, into, ids, order, rows.contiguous())
        else:
            library.call(
                f"embedding_gradient_{suffix(rows.dtype)}", *rows.shape, into, ids.contiguous(), rows.contiguous()
            )
        increment_version(into)


def _check(ids: Tensor, rows: int) -> None:
    """Raise IndexError for ids outside the table, since the CPU kernel does not check them.

    The GPU kernel skips such ids; a check here would wait for the device, and the lookup has already failed.
    """
    first, last = (int(bound) for bound in torch.aminmax(ids))
    if first < 0 or last >= rows:
        raise IndexError(f"ids {first} to {last} in a table of {rows} rows")


class _WideEmbedding(torch.autograd.Function):
    """A 16-bit lookup on the CPU whose gradient rows are summed in fp32 and rounded once.

    torch's own op sums them in 16 bits: the gradient of a token with 1,000 occurrences was wrong by 10 %. Only rows
    that occur are kept in fp32.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        return F.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (ids,) = ctx.saved_tensors
        found, which = torch.unique(ids.reshape(-1), return_inverse=True)
        sums = torch.zeros((found.numel(), ctx.shape[1]), dtype=torch.float32)
        embedding_gradient(which, grads[0], sums)
        result = torch.zeros(ctx.shape, dtype=ctx.dtype)
        result[found] = sums.to(ctx.dtype)
        return None, result


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """weight[ids]: ids int64 of any shape, weight [rows, h] -> [..., h]. 16-bit gradients are summed in fp32."""
    if opmath_dtype(weight.dtype) == weight.dtype or weight.device.type != "cpu":
        return F.embedding(ids, weight)
    result: Tensor = _WideEmbedding.apply(ids, weight)
    return result
