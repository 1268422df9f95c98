"""The column-parallel product x [W_1; W_2; ...]^T with its backward's communication overlapped with its GEMMs.

Backward, tensor parallel: the all-reduce of the input gradient travels while the weight gradient is computed.
Under sequence parallelism: x is gathered again while the input gradient is computed, and the reduce-scatter of the
input gradient travels while the weight gradient is computed; only this rank's part of x is kept between.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.mpu.collectives import Pending, all_gather, all_reduce, reduce_scatter
from megazero.mpu.grid import Group


def adjacent(weights: tuple[Tensor, ...]) -> Tensor | None:
    """All weights [n_i, k] as one view [sum n_i, k], if they lie one behind the other in one storage, else None."""
    first = weights[0]
    if len(weights) == 1:
        return first
    end = first.storage_offset()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and weight.dtype == first.dtype
        if not (same and weight.is_contiguous() and weight.shape[1:] == first.shape[1:] and weight.storage_offset() == end):
            return None
        end += weight.numel()
    rows = sum(weight.shape[0] for weight in weights)
    return first.detach().as_strided((rows, first.shape[1]), (first.shape[1], 1), first.storage_offset())


def _product(x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...]) -> Tensor:
    """x [..., k] -> [..., sum n_i]."""
    merged = adjacent(weights)
    if merged is not None:
        bias = None if not biases else biases[0] if len(biases) == 1 else torch.cat(biases)
        return F.linear(x, merged, bias)
    each = biases or (None,) * len(weights)
    return torch.cat([F.linear(x, weight, bias) for weight, bias in zip(weights, each, strict=True)], dim=-1)


def _input_gradient(grad: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    """grad [..., sum n_i] -> [..., k], contiguous and of its own storage."""
    merged = adjacent(weights)
    if merged is not None:
        return torch.matmul(grad, merged)
    pieces = grad.split([weight.shape[0] for weight in weights], dim=-1)
    total = torch.matmul(pieces[0], weights[0])
    for piece, weight in zip(pieces[1:], weights[1:], strict=True):
        total += torch.matmul(piece, weight)
    return total


class _ColumnParallel(torch.autograd.Function):
    """(x, group, sp, count of weights, *weights, *biases) -> [s, b, sum n_i]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sequence_parallel: bool, count: int, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:count], parameters[count:]
        ctx.group, ctx.gathers, ctx.has_bias = group, sequence_parallel and group.size > 1, bool(biases)
        ctx.save_for_backward(x, *weights)
        if ctx.gathers:
            part, x = x, x.new_empty(group.size * x.shape[0], *x.shape[1:])
            all_gather(x, part.contiguous(), group).wait()
        return _product(x, weights, biases)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        group: Group = ctx.group
        x, *rest = ctx.saved_tensors
        weights = tuple(rest)
        grad = grads[0].contiguous()
        needs_input, needs_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[4:])
        part, gathering = x, Pending()
        if ctx.gathers and needs_weights:
            x = part.new_empty(group.size * part.shape[0], *part.shape[1:])
            gathering = all_gather(x, part.contiguous(), group)
        grad_x, reducing = None, Pending()
        if needs_input:
            grad_x = whole = _input_gradient(grad, weights)
            if ctx.gathers:
                grad_x = torch.empty_like(part, memory_format=torch.contiguous_format)
                reducing = reduce_scatter(grad_x, whole, group)
            else:
                reducing = all_reduce(whole, group)
        # The gather was posted before the reduction, so waiting here for it alone keeps the reduction in flight.
        gathering.wait()
        parameter_grads: list[Tensor | None] = []
        if needs_weights:
            rows = [weight.shape[0] for weight in weights]
            flat = grad.view(-1, grad.shape[-1])
            parameter_grads += torch.mm(flat.t(), x.reshape(-1, x.shape[-1])).split(rows)
            if ctx.has_bias:
                parameter_grads += flat.sum(0).split(rows)
        else:
            parameter_grads += [None] * (len(ctx.needs_input_grad) - 4)
        reducing.wait()
        return grad_x, None, None, None, *parameter_grads


def column_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence_parallel: bool) -> Tensor:
    """x [s(/t), b, k], weight [n/t, k], bias [n/t] -> [s, b, n/t]. Also the tied head's product. Communication as above."""
    if group.size == 1:
        return F.linear(x, weight, bias)
    biases = () if bias is None else (bias,)
    result: Tensor = _ColumnParallel.apply(x, group, sequence_parallel, 1, weight, *biases)
    return result


def column_parallel_linear_pair(
    x: Tensor, weights: tuple[Tensor, Tensor], biases: tuple[Tensor | None, Tensor | None], group: Group, sequence_parallel: bool
) -> tuple[Tensor, Tensor]:
    """Two column-parallel products of one x, with one gather, one reduction, and one GEMM where weights are adjacent."""
    given = tuple(bias for bias in biases if bias is not None)
    assert len(given) in (0, 2), "both have a bias, or none"
    both = _ColumnParallel.apply(x, group, sequence_parallel, 2, *weights, *given)
    first, second = both.split([weight.shape[0] for weight in weights], dim=-1)
    return first, second
