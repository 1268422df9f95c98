"""A differentiable split that only tests need: a replicated tensor is cut over tp, and its gradient is whole again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megazero.mpu.collectives import all_gather
from megazero.mpu.grid import Group


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.chunk(group.size)[group.index].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        whole = grad.new_empty(ctx.group.size * grad.shape[0], *grad.shape[1:])
        all_gather(whole, grad.contiguous(), ctx.group).wait()
        return whole, None


def split_sequence(x: Tensor, group: Group) -> Tensor:
    """Replicated [s, ...] -> this rank's part [s/t, ...]. Forward communicates nothing; backward is an all-gather."""
    assert x.shape[0] % group.size == 0, (x.shape, group.size)
    return _Split.apply(x, group)
