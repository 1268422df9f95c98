"""Row lookup, reference body."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_ops.blocks import wide


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
        grad = grads[0].reshape(-1, ctx.shape[1])
        found, which = torch.unique(ids.reshape(-1), return_inverse=True)
        sums = torch.zeros((found.numel(), ctx.shape[1]), dtype=torch.float32, device=grad.device)
        sums.index_add_(0, which, grad.float())
        result = torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad.device)
        result[found] = sums.to(ctx.dtype)
        return None, result


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """weight[ids]: ids int64 of any shape, weight [rows, h] -> [..., h]. On CUDA torch's own op sums in fp32."""
    if wide(weight.dtype) == weight.dtype or weight.device.type != "cpu":
        return F.embedding(ids, weight)
    result: Tensor = _WideEmbedding.apply(ids, weight)
    return result
