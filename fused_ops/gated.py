"""Gated activations f(gate) * up (Shazeer 2020, arXiv:2002.05202), rounded once for 16-bit inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_ops.blocks import opmath_dtype
from fused_ops.compiled import compilable
from fused_ops.graph import apply_or_forward
from fused_ops.native.library import Library, kernels, suffix


def _silu_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """(silu(x), its slope s + x s (1 - s)), s = sigmoid(x)."""
    sigmoid = torch.sigmoid(x)
    return x * sigmoid, (1 - sigmoid).mul_(x).add_(1).mul_(sigmoid)


def _gelu_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x Phi(x), its slope Phi(x) + x Phi'(x)), Phi the normal distribution function."""
    # erfc keeps the digits of the tail, of which 1 + erf has none.
    phi = torch.special.erfc(x * -math.sqrt(0.5)).mul_(0.5)
    bell = (x * x).mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
    return F.gelu(x), phi + x * bell


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_tanh_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x s, its slope s + x s (1 - s) u'), s = sigmoid(u), u = 2 sqrt(2/pi) (x + 0.044715 x^3)."""
    linear, square = 2 * math.sqrt(2 / math.pi), x * x
    cubic = linear * 0.044715
    u = x * (linear + cubic * square)
    own = torch.sigmoid(u)
    return _gelu_tanh(x), own + x * own * torch.sigmoid(-u) * (linear + 3 * cubic * square)


@dataclass(frozen=True)
class _Gate:
    """name: of its kernels. value: f. with_slope: x -> (f(x), f'(x))."""

    name: str
    value: Callable[[Tensor], Tensor]
    with_slope: Callable[[Tensor], tuple[Tensor, Tensor]]


_GATES: Mapping[str, _Gate] = MappingProxyType(
    {
        "swiglu": _Gate("swiglu", F.silu, _silu_slope),
        "geglu": _Gate("geglu", F.gelu, _gelu_slope),
        "geglu-tanh": _Gate("geglu_tanh", _gelu_tanh, _gelu_tanh_slope),
    }
)


class _Reference(torch.autograd.Function):
    """Reference body. Saves its two inputs only; backward computes f(gate) again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return _GATES[kind].value(gate.to(opmath_dtype(gate.dtype))).mul_(up).to(gate.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        dtype = opmath_dtype(gate.dtype)
        value, slope = _GATES[ctx.kind].with_slope(gate.to(dtype))
        grad = grads[0].to(dtype)
        return slope.mul_(grad).mul_(up).to(gate.dtype), value.mul_(grad).to(up.dtype), None


@compilable
def _reference(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    result: Tensor = _Reference.apply(gate, up, kind)
    return result


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """(x as rows with contiguous elements, stride between rows); a view if x is a slice of wider rows."""
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    return flat, flat.stride(0)


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, name: str, library: Library) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.name, ctx.library, ctx.shape = name, library, (gate.numel() // gate.shape[-1], gate.shape[-1])
        out = gate.new_empty(gate.shape)
        library.call(f"{name}_{suffix(gate.dtype)}", *ctx.shape, out, *_rows(gate), *_rows(up))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = (gate.new_empty(gate.shape) for _ in range(2))
        name = f"{ctx.name}_backward_{suffix(gate.dtype)}"
        ctx.library.call(
            name, *ctx.shape, grad_gate, grad_up, gate.shape[-1], grads[0].contiguous(), *_rows(gate), *_rows(up)
        )
        return grad_gate, grad_up, None, None


def gated(kind: str, gate: Tensor, up: Tensor) -> Tensor:
    """f(gate) * up of a kind of `GATED`: both [..., f] -> [..., f]."""
    library = kernels(gate, up)
    if library is None or not gate.numel():
        return _reference(gate, up, kind)
    result: Tensor = apply_or_forward(_Kernel, gate, up, _GATES[kind].name, library)
    return result


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up: both [..., f] -> [..., f]."""
    return gated("swiglu", gate, up)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up with the exact gelu: both [..., f] -> [..., f]."""
    return gated("geglu", gate, up)


def geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up with the gelu of a tanh (Gemma): both [..., f] -> [..., f]."""
    return gated("geglu-tanh", gate, up)


GATED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"swiglu": swiglu, "geglu": geglu, "geglu-tanh": geglu_tanh}
)
"""--activation -> its function (gate, up) -> y, for those with a second input."""
