"""The products of linear layers. The backward of column-parallel ones overlaps communication with the GEMMs.

Tensor parallel: the all-reduce of the input gradient runs while the weight gradient is computed.
Sequence parallel: x is gathered again while the input gradient is computed, and the reduce-scatter of the input
gradient runs while the weight gradient is computed. Between forward and backward a rank keeps only its own part of x.
Weight and bias gradients go to the parameters' gradient targets (`mpu.gradient`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_ops.graph import apply_or_forward
from fused_ops.linear import add_bias_gradient, add_weight_gradient, input_gradient, linear
from megazero.mpu.collectives import CommunicationHandle, all_gather, all_reduce, reduce_scatter
from megazero.mpu.gradient import route_gradient, target_of
from megazero.mpu.grid import Group


def adjacent_view(weights: tuple[Tensor, ...]) -> Tensor | None:
    """All weights [n_i, k] as one view [sum n_i, k], if they are adjacent in one storage; else None."""
    first = weights[0]
    if len(weights) == 1:
        return first
    end = first.storage_offset()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and weight.dtype == first.dtype
        if not (
            same and weight.is_contiguous() and weight.shape[1:] == first.shape[1:] and weight.storage_offset() == end
        ):
            return None
        end += weight.numel()
    rows = sum(weight.shape[0] for weight in weights)
    return first.detach().as_strided((rows, first.shape[1]), (first.shape[1], 1), first.storage_offset())


def as_tuple(bias: Tensor | None) -> tuple[Tensor, ...]:
    """The bias as a tuple of one; an empty tuple for None."""
    return () if bias is None else (bias,)


def concatenated_bias(biases: tuple[Tensor, ...]) -> Tensor | None:
    """The biases [n_i] as one [sum n_i]; None if there are none."""
    return None if not biases else biases[0] if len(biases) == 1 else torch.cat(biases)


def _product(x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...]) -> Tensor:
    """x [..., k] -> [..., sum n_i]."""
    merged = adjacent_view(weights)
    if merged is not None:
        return linear(x, merged, concatenated_bias(biases))
    each = biases or (None,) * len(weights)
    return torch.cat([linear(x, weight, bias) for weight, bias in zip(weights, each, strict=True)], dim=-1)


def _input_gradient(grad: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    """grad [..., sum n_i] -> [..., k], contiguous, in a storage of its own."""
    merged = adjacent_view(weights)
    if merged is not None:
        return input_gradient(grad, merged)
    pieces = grad.split([weight.shape[0] for weight in weights], dim=-1)
    total = input_gradient(pieces[0], weights[0])
    for piece, weight in zip(pieces[1:], weights[1:], strict=True):
        total += input_gradient(piece, weight)
    return total


def _parameter_gradients(
    ctx: Any, grad: Tensor, x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """Gradients of the weights and biases for autograd: None where a target takes the gradient or none is needed."""
    flat, rows = grad.view(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    needed = ctx.needs_input_grad[-len(ctx.targets) :]
    parts = flat.split([weight.shape[0] for weight in weights], dim=-1)
    found: list[Tensor | None] = []
    for part, parameter, target, wanted in zip(
        (*parts, *parts), (*weights, *biases), ctx.targets, needed, strict=False
    ):
        write = partial(add_weight_gradient, part, rows) if parameter.dim() == 2 else partial(add_bias_gradient, part)
        found.append(route_gradient(parameter, target, write) if wanted else None)
    return found


class _Linear(torch.autograd.Function):
    """(x, group, sp, count of weights, *weights, *biases) -> [s, b, sum n_i]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group | None, sequence_parallel: bool, count: int, *parameters: Tensor
    ) -> Tensor:
        weights, biases = parameters[:count], parameters[count:]
        ctx.group, ctx.count = group, count
        ctx.gathers = group is not None and sequence_parallel and group.size > 1
        ctx.targets = [target_of(parameter) for parameter in parameters]
        # A frozen layer's backward does not need x.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[4:]) else None, *parameters)
        if group is not None and ctx.gathers:
            part, x = x, x.new_empty(group.size * x.shape[0], *x.shape[1:])
            all_gather(x, part.contiguous(), group).wait()
        return _product(x, weights, biases)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        group: Group | None = ctx.group
        x, *parameters = ctx.saved_tensors
        weights, biases = tuple(parameters[: ctx.count]), tuple(parameters[ctx.count :])
        grad = grads[0].contiguous()
        needs_input, needs_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[4:])
        gathering, reducing = CommunicationHandle(), CommunicationHandle()
        if group is not None and ctx.gathers and needs_weights:
            part, x = x, x.new_empty(group.size * x.shape[0], *x.shape[1:])
            gathering = all_gather(x, part.contiguous(), group)
        grad_x = None
        if needs_input:
            grad_x = whole = _input_gradient(grad, weights)
            if group is not None and ctx.gathers:
                grad_x = whole.new_empty(whole.shape[0] // group.size, *whole.shape[1:])
                reducing = reduce_scatter(grad_x, whole, group)
            elif group is not None:
                reducing = all_reduce(whole, group)
        # The gather was launched before the reduction, so that this wait leaves the reduction running.
        gathering.wait()
        parameter_grads = (
            _parameter_gradients(ctx, grad, x, weights, biases) if needs_weights else [None] * len(parameters)
        )
        reducing.wait()
        return grad_x, None, None, None, *parameter_grads


class _BiasBehind(torch.autograd.Function):
    """(y, bias) -> y + bias, for a row-parallel layer, which adds its bias after the sum over tp."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        ctx.target = target_of(bias)
        ctx.save_for_backward(bias)
        return y + bias

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (bias,) = ctx.saved_tensors
        rows = grads[0].contiguous().view(-1, bias.shape[0])
        wanted = ctx.needs_input_grad[1]
        return grads[0], route_gradient(bias, ctx.target, partial(add_bias_gradient, rows)) if wanted else None


def with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """y [..., n] + bias [n] (None: y). The bias gradient goes to its target. Nothing is communicated."""
    if bias is None:
        return y
    result: Tensor = apply_or_forward(_BiasBehind, y, bias)
    return result


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., k], weight [n, k], bias [n] or None -> [..., n]. Nothing is communicated."""
    result: Tensor = apply_or_forward(_Linear, x, None, False, 1, weight, *as_tuple(bias))
    return result


def column_parallel_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence_parallel: bool
) -> Tensor:
    """x [s(/t), b, k], weight [n/t, k], bias [n/t] or None -> [s, b, n/t].

    Communicates over `group` as `mpu.layers.ColumnParallelLinear` does.
    """
    result: Tensor = apply_or_forward(_Linear, x, group, sequence_parallel, 1, weight, *as_tuple(bias))
    return result


def column_parallel_linear_pair(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    group: Group,
    sequence_parallel: bool,
) -> tuple[Tensor, Tensor]:
    """Two column-parallel products of one x: x [s(/t), b, k], weights [n_i/t, k] -> ([s, b, n_0/t], [s, b, n_1/t]).

    Both have a bias or none has. There is one gather, one reduction, and one GEMM where the weights are adjacent.
    """
    given = tuple(bias for bias in biases if bias is not None)
    assert len(given) in (0, 2), "both have a bias, or none"
    both = apply_or_forward(_Linear, x, group, sequence_parallel, 2, *weights, *given)
    first, second = both.split([weight.shape[0] for weight in weights], dim=-1)
    return first, second
