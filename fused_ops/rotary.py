"""Rotary positions (Su et al. 2021, arXiv:2104.09864), in the half-split order of LLaMA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_ops.blocks import opmath_dtype
from fused_ops.compiled import compilable
from fused_ops.graph import apply_or_forward
from fused_ops.native.library import Library, kernels, suffix


def rotary_tables(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of position / base^(2i/d), [s, d/2] each, for int64 positions [s].

    Angles are computed in fp64; the tables are fp32 for 16-bit dtype, else of `dtype`. Raises ValueError for odd d.
    """
    if head_dim % 2:
        raise ValueError(f"rotary positions need an even head dimension, not {head_dim}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.to(torch.float64).unsqueeze(-1) * base**-exponents
    return angles.cos().to(opmath_dtype(dtype)), angles.sin().to(opmath_dtype(dtype))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    left, right = out.chunk(2, dim=-1)
    left.copy_(first * cos - second * sin)
    right.copy_(second * cos + first * sin)
    return out


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: float, turned: int, library: Library | None) -> Tensor:
    """x [s, b, groups, heads, d] with the first `turned` heads of each group rotated; tables [s, d/2].

    sign: 1, or -1 for the inverse rotation.
    """
    if library is None:
        shape = cos.shape[0], 1, 1, 1, cos.shape[1]
        angles = cos.view(shape), sin.view(shape) * sign
        return torch.cat([_rotated(x[..., :turned, :], *angles), x[..., turned:, :]], dim=-2)
    s, b, groups, heads, d = x.shape
    out = x.new_empty(x.shape)
    tables = cos.contiguous(), sin.contiguous()
    library.call(f"rotate_{suffix(x.dtype)}", s, b, groups, heads, turned, d // 2, out, x.contiguous(), *tables, sign)
    return out


class _Rotary(torch.autograd.Function):
    """Saves the tables only. The adjoint of a rotation is its inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None


class _RotaryHeads(torch.autograd.Function):
    """The same for groups of heads of which only the first `turned` are rotated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, turned: int, library: Library | None) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.turned, ctx.library = turned, library
        return _turned(x, cos, sin, 1.0, turned, library)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, -1.0, ctx.turned, ctx.library), None, None, None, None


@compilable
def _reference(x: Tensor, cos: Tensor, sin: Tensor, turned: int) -> Tensor:
    result: Tensor = _RotaryHeads.apply(x, cos, sin, turned, None)
    return result


def _rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, turned: int) -> Tensor:
    """x [s, b, groups, heads, d], tables [s, d/2]."""
    library = kernels(x) if x.numel() and cos.dtype == torch.float32 else None
    if library is None:
        return _reference(x, cos, sin, turned)
    result: Tensor = apply_or_forward(_RotaryHeads, x, cos, sin, turned, library)
    return result


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[..., i], x[..., i + d/2]) of x [..., d]; cos and sin [..., d/2] broadcast against x.

    For x [s, b, n, d] pass tables of shape [s, 1, 1, d/2]. 16-bit x is rotated in fp32 and rounded once.
    """
    if x.dim() == 4 and cos.shape == sin.shape == (x.shape[0], 1, 1, x.shape[3] // 2):
        tables = cos[:, 0, 0], sin[:, 0, 0]
        return _rotate_heads(x.unsqueeze(2), *tables, x.shape[2]).squeeze(2)
    result: Tensor = _Rotary.apply(x, cos, sin)
    return result


def rotate_mixed(mixed: Tensor, groups: int, repeats: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries and keys, not values, of the mixed projection [s, b, groups * (repeats + 2) * d] -> the same.

    A group has `repeats` query heads, a key head and a value head. cos and sin: [s, d/2], or [s, b, d/2] if each row of
    the batch has its own positions, with any dimensions of 1 before the last.
    """
    s, b, width = mixed.shape
    head_dim = width // (groups * (repeats + 2))
    turns = cos.numel() // (head_dim // 2)
    assert turns in (s, s * b)
    heads = mixed.view(turns, s * b // turns, groups, repeats + 2, head_dim)
    tables = cos.view(turns, head_dim // 2), sin.view(turns, head_dim // 2)
    return _rotate_heads(heads, *tables, repeats + 1).view(s, b, width)
