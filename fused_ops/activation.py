"""Non-linearities of the feed-forward layer, reference bodies. Elementwise; 16-bit inputs are computed in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_ops.blocks import wide


def gelu(x: Tensor) -> Tensor:
    """x * Phi(x), Phi the normal distribution function."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) (GPT-2, BLOOM; Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return F.gelu(x, approximate="tanh")


def bias_gelu_tanh(x: Tensor, bias: Tensor | None) -> Tensor:
    """gelu_tanh(x + bias); x [..., f], bias [f] or None."""
    return gelu_tanh(x if bias is None else x + bias)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return F.relu(x)


class _SwiGLU(torch.autograd.Function):
    """Saves its two inputs only; silu(gate) is computed again in backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate.to(wide(gate.dtype))).mul_(up).to(gate.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        dtype = wide(gate.dtype)
        grad, value = grads[0].to(dtype), gate.to(dtype)
        sigmoid = torch.sigmoid(value)
        grad_up = (value * sigmoid).mul_(grad)
        # d silu(x)/dx = s + x s (1 - s), s = sigmoid(x)
        slope = (1 - sigmoid).mul_(value).add_(1).mul_(sigmoid)
        return slope.mul_(grad).mul_(up).to(gate.dtype), grad_up.to(up.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [..., f] (Shazeer 2020, arXiv:2002.05202); rounded once for 16-bit inputs."""
    result: Tensor = _SwiGLU.apply(gate, up)
    return result


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({"gelu": gelu, "gelu-tanh": gelu_tanh, "relu": relu})
"""Activations of one input, by the name that the configuration uses."""
