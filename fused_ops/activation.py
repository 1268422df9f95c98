"""Activation functions of the feed-forward layer, with an optional bias before them. 16-bit inputs are computed in
fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_ops.graph import apply_or_forward
from fused_ops.native.library import Library, kernels, suffix


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


_REFERENCES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"gelu": F.gelu, "gelu_tanh": _gelu_tanh, "relu": F.relu, "relu2": _relu2}
)


class _Activation(torch.autograd.Function):
    """The kernels. Saves x and the bias; backward computes x + bias again. The bias gradient is summed in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, name: str, library: Library) -> Tensor:
        x, bias = x.contiguous(), bias if bias is None else bias.contiguous()
        ctx.save_for_backward(x, bias)
        ctx.name, ctx.library = name, library
        y = torch.empty_like(x)
        library.call(f"{name}_{suffix(x.dtype)}", *_shape(x), y, x, bias)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, bias = ctx.saved_tensors
        dx = torch.empty_like(x)
        sums = None if bias is None else bias.new_empty(bias.shape, dtype=torch.float32)
        ctx.library.call(f"{ctx.name}_backward_{suffix(x.dtype)}", *_shape(x), dx, sums, grads[0].contiguous(), x, bias)
        return dx, None if sums is None else sums.to(x.dtype), None, None


def _shape(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]


def _activated(name: str, x: Tensor, bias: Tensor | None) -> Tensor:
    library = kernels(x) if bias is None else kernels(x, bias)
    if library is None or not x.numel() or not x.dim():
        return _REFERENCES[name](x if bias is None else x + bias)
    result: Tensor = apply_or_forward(_Activation, x, bias, name, library)
    return result


def gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """v * Phi(v) with v = x + bias and Phi the normal distribution function; x [..., f], bias [f] or None.

    (Hendrycks and Gimpel 2016, arXiv:1606.08415.)
    """
    return _activated("gelu", x, bias)


def gelu_tanh(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """v/2 * (1 + tanh(sqrt(2/pi) * (v + 0.044715 v^3))) with v = x + bias; x [..., f], bias [f] or None.

    (GPT-2, BLOOM; Hendrycks and Gimpel 2016, arXiv:1606.08415.)
    """
    return _activated("gelu_tanh", x, bias)


def relu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """max(x + bias, 0); x [..., f], bias [f] or None."""
    return _activated("relu", x, bias)


def relu2(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """max(x + bias, 0)^2; x [..., f], bias [f] or None. (So et al. 2021, arXiv:2109.08668.)"""
    return _activated("relu2", x, bias)


ACTIVATIONS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"gelu": gelu, "gelu-tanh": gelu_tanh, "relu": relu, "relu2": relu2}
)
"""--activation -> its function (x, bias=None) -> y. Those with two inputs are in `fused_ops.gated`."""
