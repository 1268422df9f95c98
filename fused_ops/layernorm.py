"""LayerNorm and RMSNorm over the last dimension, alone or of a sum of two tensors.

16-bit inputs are computed in fp32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_ops.blocks import opmath_dtype
from fused_ops.compiled import compilable
from fused_ops.graph import apply_or_forward
from fused_ops.native.library import Library, kernels, suffix


class _WideLayerNorm(torch.autograd.Function):
    """Reference body of 16-bit LayerNorm, in fp32. Saves the 16-bit x and two statistics per row.

    torch's own op on the CPU sums 16-bit weight and bias gradients over rows in 16 bits: over 4,096 rows they were
    wrong by 10 %.
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


class _RMSNorm(torch.autograd.Function):
    """Reference body. Saves x and 1 / sqrt(mean(x^2) + eps) per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        values = x.to(opmath_dtype(x.dtype))
        scale = values.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (values * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, scale = ctx.saved_tensors
        grad = grads[0].to(scale.dtype)
        unit = x.to(scale.dtype) * scale
        grad_weight = (grad * unit).unsqueeze(0).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * weight
        inner = (grad * unit).mean(-1, keepdim=True)
        return (grad - unit.mul_(inner)).mul_(scale).to(x.dtype), grad_weight, None


def _normalised(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm, or RMSNorm if bias is None. fp32 and fp64 LayerNorm is torch's own op."""
    if bias is not None and opmath_dtype(x.dtype) == x.dtype:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    result: Tensor = _RMSNorm.apply(x, weight, eps) if bias is None else _WideLayerNorm.apply(x, weight, bias, eps)
    return result


_reference = compilable(_normalised)


@compilable
def _reference_of_sum(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(normalised, sum)."""
    total = x + residual
    return _normalised(total, weight, bias, eps), total


class _Norm(torch.autograd.Function):
    """The kernels: (x, residual, weight, bias) -> normalised, or with a residual (normalised, sum).

    Saves the normalised input and its statistics. The gradients of weight and bias are summed in fp32 over fixed blocks
    of rows, so they do not depend on the number of threads.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, library: Library
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.name, ctx.library = "rms_norm" if bias is None else "layer_norm", library
        x, h = x.contiguous(), x.shape[-1]
        rows = x.numel() // h
        y, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
        mean, scale = (
            None if bias is None else x.new_empty(rows, dtype=torch.float32),
            x.new_empty(rows, dtype=torch.float32),
        )
        added = residual if residual is None else residual.contiguous()
        parameters = weight.contiguous(), bias if bias is None else bias.contiguous()
        library.call(f"{ctx.name}_{suffix(x.dtype)}", rows, h, y, total, x, added, *parameters, mean, scale, float(eps))
        ctx.save_for_backward(total, weight, mean, scale)
        return y if residual is None else (y, total)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        grad, passed = grads[0], grads[1] if len(grads) > 1 else None
        if grad is None:
            return passed, passed, None, None, None, None
        h, dx = x.shape[-1], torch.empty_like(x)
        sums = x.new_empty((1 if mean is None else 2, h), dtype=torch.float32)
        incoming = grad.contiguous(), None if passed is None else passed.contiguous()
        name = f"{ctx.name}_backward_{suffix(x.dtype)}"
        ctx.library.call(name, scale.numel(), h, dx, sums, *incoming, x, weight.contiguous(), mean, scale)
        of_weight, of_bias = sums[0].to(weight.dtype), None if mean is None else sums[1].to(weight.dtype)
        return dx, dx if len(grads) > 1 else None, of_weight, of_bias, None, None


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(normalised, what was normalised)."""
    library = kernels(*(tensor for tensor in (x, residual, weight, bias) if tensor is not None))
    same_shape = residual is None or residual.shape == x.shape
    if library is None or not x.numel() or not same_shape or weight.shape != x.shape[-1:]:
        if residual is None:
            return _reference(x, weight, bias, eps), x
        return _reference_of_sum(x, residual, weight, bias, eps)
    result = apply_or_forward(_Norm, x, residual, weight, bias, eps, library)
    return (result, x) if residual is None else result


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias; x [..., h], weight and bias [h] (Ba et al. 2016,
    arXiv:1607.06450).
    """
    return _norm(x, None, weight, bias, eps)[0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight; x [..., h], weight [h] (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    return _norm(x, None, weight, None, eps)[0]


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual, layer_norm of this sum after its rounding to the tensors' dtype), all [..., h].

    Backward adds the sum's own gradient in the same pass. x and residual share one tensor as their gradient.
    """
    normalised, total = _norm(x, residual, weight, bias, eps)
    return total, normalised


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `add_layer_norm`, with RMSNorm."""
    normalised, total = _norm(x, residual, weight, None, eps)
    return total, normalised
