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
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
        values = x.to(opmath_dtype(x.dtype))
        scale = values.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = offset
        unit = values * scale
        return (unit if weight is None else unit.mul_(_gain(weight, offset))).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, scale = ctx.saved_tensors
        grad = grads[0].to(scale.dtype)
        unit, grad_weight = x.to(scale.dtype) * scale, None
        if weight is not None:
            grad_weight = (grad * unit).unsqueeze(0).flatten(0, -2).sum(0).to(weight.dtype)
            grad = grad * _gain(weight, ctx.offset)
        inner = (grad * unit).mean(-1, keepdim=True)
        return (grad - unit.mul_(inner)).mul_(scale).to(x.dtype), grad_weight, None, None


def _gain(weight: Tensor, offset: float) -> Tensor:
    """What the normalised x is multiplied by: an offset is added in the dtype of the computation."""
    return weight.to(opmath_dtype(weight.dtype)) + offset if offset else weight


def _normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float) -> Tensor:
    """LayerNorm, or RMSNorm if bias is None. fp32 and fp64 LayerNorm is torch's own op."""
    if bias is None or weight is None:
        result: Tensor = _RMSNorm.apply(x, weight, eps, offset)
    elif opmath_dtype(x.dtype) == x.dtype:
        result = F.layer_norm(x, weight.shape, weight, bias, eps)
    else:
        result = _WideLayerNorm.apply(x, weight, bias, eps)
    return result


_reference = compilable(_normalised)


@compilable
def _reference_of_sum(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """(normalised, sum)."""
    total = x + residual
    return _normalised(total, weight, bias, eps, offset), total


class _Norm(torch.autograd.Function):
    """The kernels: (x, residual, weight, bias) -> normalised, or with a residual (normalised, sum).

    Saves the normalised input and its statistics. The gradients of weight and bias are summed in fp32 over fixed blocks
    of rows, so they do not depend on the number of threads. Without a weight the kernels get zeros and an offset of 1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        offset: float,
        library: Library,
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
        gain, ctx.offset = added_gain(x, weight, offset, h)
        parameters = gain, bias if bias is None else bias.contiguous()
        numbers = float(eps), ctx.offset
        library.call(f"{ctx.name}_{suffix(x.dtype)}", rows, h, y, total, x, added, *parameters, mean, scale, *numbers)
        ctx.save_for_backward(total, weight, mean, scale)
        return y if residual is None else (y, total)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        grad, passed = grads[0], grads[1] if len(grads) > 1 else None
        if grad is None:
            return passed, passed, None, None, None, None, None
        h, dx = x.shape[-1], torch.empty_like(x)
        sums = x.new_empty((1 if mean is None else 2, h), dtype=torch.float32)
        incoming = grad.contiguous(), None if passed is None else passed.contiguous()
        name, gain = f"{ctx.name}_backward_{suffix(x.dtype)}", added_gain(x, weight, ctx.offset, h)[0]
        ctx.library.call(name, scale.numel(), h, dx, sums, *incoming, x, gain, mean, scale, ctx.offset)
        of_weight, of_bias = (
            None if weight is None else sums[0].to(x.dtype),
            None if mean is None else sums[1].to(x.dtype),
        )
        return dx, dx if len(grads) > 1 else None, of_weight, of_bias, None, None, None


def added_gain(x: Tensor, weight: Tensor | None, offset: float, size: int) -> tuple[Tensor, float]:
    """(weight [size], offset) for a kernel, which multiplies by weight + offset.

    Without an offset -0.0 is added: 0.0 would change the sign of a weight of -0.0.
    """
    if weight is None:
        return x.new_zeros(size), 1.0
    return weight.contiguous(), float(offset) if offset else -0.0


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(normalised, what was normalised)."""
    library = kernels(*(tensor for tensor in (x, residual, weight, bias) if tensor is not None))
    same_shape = residual is None or residual.shape == x.shape
    if library is None or not x.numel() or not same_shape or (weight is not None and weight.shape != x.shape[-1:]):
        if residual is None:
            return _reference(x, weight, bias, eps, offset), x
        return _reference_of_sum(x, residual, weight, bias, eps, offset)
    result = apply_or_forward(_Norm, x, residual, weight, bias, eps, offset, library)
    return (result, x) if residual is None else result


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias; x [..., h], weight and bias [h] (Ba et al. 2016,
    arXiv:1607.06450).
    """
    return _norm(x, None, weight, bias, eps)[0]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight); x [..., h], weight [h] or None: without one.

    (Zhang and Sennrich 2019, arXiv:1910.07467.) offset 1: Gemma's norm. It is added in fp32 to 16-bit weights.
    """
    return _norm(x, None, weight, None, eps, offset)[0]


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual, layer_norm of this sum after its rounding to the tensors' dtype), all [..., h].

    Backward adds the sum's own gradient in the same pass. x and residual share one tensor as their gradient.
    """
    normalised, total = _norm(x, residual, weight, bias, eps)
    return total, normalised


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As `add_layer_norm`, with `rms_norm`."""
    normalised, total = _norm(x, residual, weight, None, eps, offset)
    return total, normalised
