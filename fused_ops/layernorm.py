"""Normalisation over the last dimension, reference bodies."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_ops.blocks import wide


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias; x [..., h], weight and bias [h].

    torch's own op: statistics and products of 16-bit inputs are fp32, the result is rounded once.
    """
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class _RMSNorm(torch.autograd.Function):
    """Saves x and one reciprocal root per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        values = x.to(wide(x.dtype))
        scale = values.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (values * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, scale = ctx.saved_tensors
        grad = grads[0].to(scale.dtype)
        unit = x.to(scale.dtype) * scale
        grad_weight = (grad * unit).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * weight
        inner = (grad * unit).mean(-1, keepdim=True)
        return (grad - unit.mul_(inner)).mul_(scale).to(x.dtype), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight; x [..., h], weight [h]; computed in fp32 for 16-bit x, rounded once.

    (Zhang and Sennrich 2019, arXiv:1910.07467.)
    """
    result: Tensor = _RMSNorm.apply(x, weight, eps)
    return result
