"""Normalisation over the last dimension, reference bodies."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_ops.blocks import wide


class _WideLayerNorm(torch.autograd.Function):
    """16-bit LayerNorm in fp32 throughout; saves the 16-bit x and two statistics per row.

    torch's own op on the CPU adds up the 16-bit weight and bias gradients row by row in 16 bit: over 4,096 rows they
    came out wrong by 10%.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, mean, scale = torch.native_layer_norm(x.float(), list(weight.shape), weight.float(), bias.float(), eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return y.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        arguments = x.float(), list(weight.shape), mean, scale, weight.float(), bias.float(), wanted
        found = torch.ops.aten.native_layer_norm_backward(grads[0].float(), *arguments)
        return (*(gradient if gradient is None else gradient.to(x.dtype) for gradient in found), None)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias; x [..., h], weight and bias [h].

    16-bit: computed in fp32, result and gradients rounded once; fp32 and fp64: torch's own op.
    """
    if wide(x.dtype) == x.dtype:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    result: Tensor = _WideLayerNorm.apply(x, weight, bias, eps)
    return result


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
