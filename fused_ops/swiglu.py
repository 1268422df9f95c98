"""SwiGLU: silu(gate) * up (Shazeer 2020, arXiv:2002.05202), rounded once for 16-bit inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_ops.blocks import opmath_dtype
from fused_ops.compiled import compilable
from fused_ops.graph import apply_or_forward
from fused_ops.native.library import Library, kernels, suffix


class _Reference(torch.autograd.Function):
    """Reference body. Saves its two inputs only; backward computes silu(gate) again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate.to(opmath_dtype(gate.dtype))).mul_(up).to(gate.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        dtype = opmath_dtype(gate.dtype)
        grad, value = grads[0].to(dtype), gate.to(dtype)
        sigmoid = torch.sigmoid(value)
        grad_up = (value * sigmoid).mul_(grad)
        # d silu(x)/dx = s + x s (1 - s), s = sigmoid(x)
        slope = (1 - sigmoid).mul_(value).add_(1).mul_(sigmoid)
        return slope.mul_(grad).mul_(up).to(gate.dtype), grad_up.to(up.dtype)


@compilable
def _reference(gate: Tensor, up: Tensor) -> Tensor:
    result: Tensor = _Reference.apply(gate, up)
    return result


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """(x as rows with contiguous elements, stride between rows); a view if x is a slice of wider rows."""
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    return flat, flat.stride(0)


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, library: Library) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.library, ctx.shape = library, (gate.numel() // gate.shape[-1], gate.shape[-1])
        out = gate.new_empty(gate.shape)
        library.call(f"swiglu_{suffix(gate.dtype)}", *ctx.shape, out, *_rows(gate), *_rows(up))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = (gate.new_empty(gate.shape) for _ in range(2))
        name = f"swiglu_backward_{suffix(gate.dtype)}"
        ctx.library.call(
            name, *ctx.shape, grad_gate, grad_up, gate.shape[-1], grads[0].contiguous(), *_rows(gate), *_rows(up)
        )
        return grad_gate, grad_up, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up: both [..., f] -> [..., f]."""
    library = kernels(gate, up)
    if library is None or not gate.numel():
        return _reference(gate, up)
    result: Tensor = apply_or_forward(_Kernel, gate, up, library)
    return result
