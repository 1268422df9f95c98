"""Autograd collectives of tensor parallelism. The backward of each is its adjoint.

The group has one loss, not one per rank. A replicated tensor (equal on all ranks) has a replicated gradient. A sharded
tensor's gradient is sharded in the same way. Where each rank uses a replicated tensor differently, each rank's gradient
is a partial sum; `copy_to_tp` and `gather_sequence` add these up.
(Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053; sequence parallelism: Korthikanti et al. 2022, arXiv:2205.05198.)

s sequence, t = group size. Tensors of any dtype are communicated in their own dtype. In a group of one every function
returns its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_ops.graph import apply_or_forward
from megazero.mpu.collectives import all_gather, all_reduce, reduce_scatter
from megazero.mpu.grid import Group

Operation = Callable[[Tensor, Group], Tensor]


class _Adjoined(torch.autograd.Function):
    """`operation` in forward and `adjoint` in backward. The backward of the adjoint is the operation again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, operation: Operation, adjoint: Operation) -> Tensor:
        ctx.arguments = group, adjoint, operation
        return operation(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        result: Tensor = _Adjoined.apply(grads[0], *ctx.arguments)
        return result, None, None, None


def _adjoined(x: Tensor, group: Group, operation: Operation, adjoint: Operation) -> Tensor:
    if group.size == 1:
        return x
    result: Tensor = apply_or_forward(_Adjoined, x, group, operation, adjoint)
    return result


def _identity(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce(total, group).wait()
    return total


def _gather_first(x: Tensor, group: Group) -> Tensor:
    whole = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    all_gather(whole, x.contiguous(), group).wait()
    return whole


def _scatter_sum_first(x: Tensor, group: Group) -> Tensor:
    part = x.new_empty(_part(x.shape[0], group), *x.shape[1:])
    reduce_scatter(part, x.contiguous(), group).wait()
    return part


def _gather_last(x: Tensor, group: Group) -> Tensor:
    parts = x.new_empty(group.size, *x.shape)
    all_gather(parts, x.contiguous(), group).wait()
    return parts.movedim(0, -2).reshape(*x.shape[:-1], group.size * x.shape[-1])


def _split_last(x: Tensor, group: Group) -> Tensor:
    part = _part(x.shape[-1], group)
    return x.narrow(-1, group.index * part, part).clone(memory_format=torch.contiguous_format)


def _part(extent: int, group: Group) -> int:
    if extent % group.size:
        raise ValueError(f"a dimension of {extent} cannot be shared by tp={group.size} ranks")
    return extent // group.size


def copy_to_tp(x: Tensor, group: Group) -> Tensor:
    """The identity on a replicated tensor that each rank uses differently. Forward: nothing. Backward: all-reduce."""
    return _adjoined(x, group, _identity, _sum)


def reduce_from_tp(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' partial sums, replicated. Forward: all-reduce. Backward: nothing is communicated."""
    return _adjoined(x, group, _sum, _identity)


def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """[s/t, ...] -> [s, ...], which each rank uses differently. Forward: all-gather. Backward: reduce-scatter."""
    return _adjoined(x, group, _gather_first, _scatter_sum_first)


def reduce_scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """Partial sums [s, ...] -> this rank's part of the sum [s/t, ...]. Forward: reduce-scatter. Backward: all-gather.

    Raises ValueError when t does not divide s.
    """
    return _adjoined(x, group, _scatter_sum_first, _gather_first)


def gather_last(x: Tensor, group: Group) -> Tensor:
    """[..., k/t] -> [..., k], which all ranks use alike. Forward: all-gather. Backward: nothing is communicated."""
    return _adjoined(x, group, _gather_last, _split_last)


def split_last(x: Tensor, group: Group) -> Tensor:
    """[..., k], alike on all ranks -> this rank's [..., k/t]. Forward: nothing. Backward: all-gather.

    Raises ValueError when t does not divide k.
    """
    return _adjoined(x, group, _split_last, _gather_last)
