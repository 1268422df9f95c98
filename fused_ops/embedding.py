"""Embedding lookup and its gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import increment_version

from fused_ops.blocks import opmath_dtype
from fused_ops.native.binding import Library
from fused_ops.native.library import kernels, suffix
from fused_ops.native.stand_in import kind_of


@torch.no_grad()
def embedding_gradient(ids: Tensor, grad: Tensor, into: Tensor, accumulate: bool = True) -> None:
    """Add each id's gradient rows to into[id]. accumulate=False: zero `into` first.

    ids int64 or int32 of any shape, grad [..., h], into [rows, h], fp32 (fp64 for fp64 gradients) and contiguous. The
    CPU kernel adds in the order of the tokens, whatever the number of threads. The GPU kernel adds sums over pieces of
    them; the pieces depend on the ids only. Raises IndexError for an id outside the table (on a CPU).
    """
    if not accumulate:
        into.zero_()
    ids, rows = ids.reshape(-1).long(), grad.reshape(-1, into.shape[1])
    library = kernels(rows) if into.dtype == torch.float32 and into.is_contiguous() else None
    if library is None:
        into.index_add_(0, ids, rows.to(into.dtype))
    elif rows.numel():
        if ids.device.type == "cpu":
            _check(ids, into.shape[0])
        if library.on_device:
            _call_sorted(library, "embedding_gradient_sorted", ids, rows, into)
        else:
            library.call(
                f"embedding_gradient_{suffix(rows.dtype)}", *rows.shape, into, ids.contiguous(), rows.contiguous()
            )
            increment_version(into)


def _call_sorted(library: Library, name: str, ids: Tensor, rows: Tensor, into: Tensor) -> None:
    """Call a kernel that wants its tokens sorted by id: blocks share the tokens of one id without atomics."""
    sorted_ids, order = torch.sort(ids, stable=True)
    shape = (ids.numel(), *into.shape)
    library.call(f"{name}_{suffix(rows.dtype)}", *shape, into, sorted_ids, order, rows.contiguous())
    increment_version(into)


def _check(ids: Tensor, rows: int) -> None:
    """Raise IndexError for ids outside the table, since the CPU kernel does not check them.

    The GPU kernel skips such ids; a check here would wait for the device, and the lookup has already failed.
    """
    first, last = (int(bound) for bound in torch.aminmax(ids))
    if first < 0 or last >= rows:
        raise IndexError(f"ids {first} to {last} in a table of {rows} rows")


class _WideEmbedding(torch.autograd.Function):
    """A 16-bit lookup whose gradient rows are summed in fp32 and rounded once.

    torch's own op sums them in 16 bits on a CPU: the gradient of a token with 1,000 occurrences was wrong by 10 %. On a
    GPU it rounds sums of parts to 16 bits, and adds these. Here only rows that occur are ever kept in fp32.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return F.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (ids,) = ctx.saved_tensors
        return None, _rounded_gradient(ids.reshape(-1).long(), grads[0].reshape(-1, ctx.shape[1]), ctx.shape[0])


def _rounded_gradient(ids: Tensor, grad: Tensor, rows: int) -> Tensor:
    """The gradient [rows, h] of a 16-bit table in its dtype: ids int64 [tokens], grad [tokens, h]. A GPU is not waited
    for.
    """
    shape, library = (rows, grad.shape[1]), kernels(grad)
    result = torch.zeros(shape, dtype=grad.dtype, device=grad.device)
    if not grad.numel():
        return result
    if library is not None and library.on_device:
        _call_sorted(library, "embedding_gradient_rounded", ids, grad, result)
        return result
    if kind_of(grad.device) != "cpu":  # without kernels: how many ids occur cannot be asked without waiting
        return torch.zeros(shape, dtype=torch.float32, device=grad.device).index_add_(0, ids, grad.float()).to(grad)
    found, which = _occurring(ids, rows)
    sums = torch.zeros((found.numel(), grad.shape[1]), dtype=torch.float32, device=grad.device)
    embedding_gradient(which, grad, sums)
    result[found] = sums.to(grad.dtype)
    return result


def _occurring(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(the ids that occur, of each id its number among them); on the meta device as many as can occur in `rows`."""
    if ids.is_meta:
        return ids.new_empty(min(ids.numel(), rows)), torch.empty_like(ids)
    return torch.unique(ids, return_inverse=True)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """weight[ids]: ids int64 or int32 of any shape, weight [rows, h] -> [..., h].

    16-bit gradients are summed in fp32.
    """
    if opmath_dtype(weight.dtype) == weight.dtype:
        return F.embedding(ids, weight)
    result: Tensor = _WideEmbedding.apply(ids, weight)
    return result
