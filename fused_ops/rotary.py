"""Rotary positions, reference body (Su et al. 2021, arXiv:2104.09864), in the half-split order of LLaMA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_ops.blocks import wide


def rotary_tables(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of position / base^(2i/d), [s, d/2] each, for int64 positions [s].

    Angles are computed in fp64; the tables are fp32 for 16-bit dtype, else of `dtype`. Raises ValueError for odd d.
    """
    if head_dim % 2:
        raise ValueError(f"rotary positions need an even head dimension, not {head_dim}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.to(torch.float64).unsqueeze(-1) * base**-exponents
    return angles.cos().to(wide(dtype)), angles.sin().to(wide(dtype))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    left, right = out.chunk(2, dim=-1)
    left.copy_(first * cos - second * sin)
    right.copy_(second * cos + first * sin)
    return out


class _Rotary(torch.autograd.Function):
    """Saves the tables only; the adjoint of a rotation is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[..., i], x[..., i + d/2]) of x [..., d]; cos and sin [..., d/2] broadcast against x.

    For x [s, b, n, d] pass tables of shape [s, 1, 1, d/2]. 16-bit x is rotated in fp32 and rounded once.
    """
    result: Tensor = _Rotary.apply(x, cos, sin)
    return result
