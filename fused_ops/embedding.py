"""Row lookup, and the sum of its gradient rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import increment_version

from fused_ops.blocks import wide
from fused_ops.native.library import kernels, suffix


@torch.no_grad()
def embedding_gradient(ids: Tensor, grad: Tensor, into: Tensor, accumulate: bool = True) -> None:
    """into[id] += the gradient rows of that id, summed in fp32; not accumulate: `into` is zeroed before.

    ids int64 of any shape, grad [..., h], into [rows, h], fp32 (fp64 for fp64) and contiguous. The order of the
    additions is that of the tokens, whatever the number of threads.
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
        if library.on_device:  # a thread that meets the first token of an id adds up all of its rows
            shape, (ids, order) = (ids.numel(), *into.shape), torch.sort(ids, stable=True)
            library.call(f"embedding_gradient_sorted_{suffix(rows.dtype)}", *shape, into, ids, order, rows.contiguous())
        else:
            library.call(
                f"embedding_gradient_{suffix(rows.dtype)}", *rows.shape, into, ids.contiguous(), rows.contiguous()
            )
        increment_version(into)


def _check(ids: Tensor, rows: int) -> None:
    """The kernel writes where it is told to. (On a GPU, where a look would be a wait, it passes over what is outside;
    the lookup has failed by then.)
    """
    first, last = (int(bound) for bound in torch.aminmax(ids))
    if first < 0 or last >= rows:
        raise IndexError(f"ids {first} to {last} in a table of {rows} rows")


class _WideEmbedding(torch.autograd.Function):
    """16-bit lookup on the CPU whose gradient rows are added up in fp32 and rounded once.

    torch's own op there adds them one by one in 16 bit: a token that came up 1,000 times got a gradient wrong by 10%.
    Only rows that came up are held in fp32.
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
    """weight[ids]: ids int64 of any shape, weight [rows, h] -> [..., h]. On CUDA torch's own op sums in fp32."""
    if wide(weight.dtype) == weight.dtype or weight.device.type != "cpu":
        return F.embedding(ids, weight)
    result: Tensor = _WideEmbedding.apply(ids, weight)
    return result
