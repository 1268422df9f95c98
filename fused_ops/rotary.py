"""Rotary positions (Su et al. 2021, arXiv:2104.09864) of whole heads or of their first elements, whose pairs are halves
(LLaMA) or neighbours (GPT-J, Cohere).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_ops.blocks import opmath_dtype
from fused_ops.compiled import compilable
from fused_ops.graph import apply_or_forward
from fused_ops.native.library import Library, kernels, suffix
from fused_ops.rotary_frequencies import rotary_frequencies
from megazero.config.rotary import RotarySettings


def rotary_tables(
    positions: Tensor,
    head_dim: int,
    settings: RotarySettings,
    dtype: torch.dtype,
    *,
    length: int = 0,
    trained_length: int = 0,
) -> tuple[Tensor, Tensor]:
    """cos and sin of position times inverse frequency, [s, d'/2] each, for int64 positions [s].

    d' is the number of a head's elements that turn. Angles are computed in fp64; the tables are fp32 for 16-bit dtype,
    else of `dtype`. They carry the attention factor of a scaling. length, trained_length: as in `rotary_frequencies`,
    which says what is raised.
    """
    frequencies, factor = rotary_frequencies(head_dim, settings, length, trained_length, positions.device)
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos.mul_(factor), sin.mul_(factor)
    return cos.to(opmath_dtype(dtype)), sin.to(opmath_dtype(dtype))


def _pairs(x: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and the second element of each of the first `half` pairs of x [..., d]."""
    if interleaved:
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    first, second = _pairs(x.to(cos.dtype), half, interleaved)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    left, right = _pairs(out, half, interleaved)
    left.copy_(first * cos - second * sin)
    right.copy_(second * cos + first * sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def _turned(
    x: Tensor, cos: Tensor, sin: Tensor, sign: float, turned: int, interleaved: bool, library: Library | None
) -> Tensor:
    """x [s, b, groups, heads, d] with the first `turned` heads of each group rotated; tables [s, d'/2], d' <= d.

    sign: 1, or -1 for the transpose of the same pairs' matrices.
    """
    half = cos.shape[1]
    if library is None:
        shape = cos.shape[0], 1, 1, 1, half
        angles = cos.view(shape), sin.view(shape) * sign
        return torch.cat([_rotated(x[..., :turned, :], *angles, interleaved), x[..., turned:, :]], dim=-2)
    s, b, groups, heads, d = x.shape
    out = x.new_empty(x.shape)
    tensors = out, x.contiguous(), cos.contiguous(), sin.contiguous()
    name = f"rotate_{'neighbours' if interleaved else 'halves'}_{suffix(x.dtype)}"
    library.call(name, s, b, groups, heads, turned, half, d - 2 * half, *tensors, sign)
    return out


class _Rotary(torch.autograd.Function):
    """Saves the tables only. The adjoint is the transpose: the rotation back, and the same factor again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotated(x, cos, sin, interleaved)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin, ctx.interleaved), None, None, None


class _RotaryHeads(torch.autograd.Function):
    """The same for groups of heads of which only the first `turned` are rotated."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, turned: int, interleaved: bool, library: Library | None
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.rest = turned, interleaved, library
        return _turned(x, cos, sin, 1.0, *ctx.rest)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, -1.0, *ctx.rest), None, None, None, None, None


@compilable
def _reference(x: Tensor, cos: Tensor, sin: Tensor, turned: int, interleaved: bool) -> Tensor:
    result: Tensor = _RotaryHeads.apply(x, cos, sin, turned, interleaved, None)
    return result


def _rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, turned: int, interleaved: bool) -> Tensor:
    """x [s, b, groups, heads, d], tables [s, d'/2]."""
    library = kernels(x) if x.numel() and cos.dtype == torch.float32 else None
    if library is None:
        return _reference(x, cos, sin, turned, interleaved)
    result: Tensor = apply_or_forward(_RotaryHeads, x, cos, sin, turned, interleaved, library)
    return result


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the pairs (x[..., i], x[..., i + d'/2]) of x [..., d], or neighbours (2i, 2i + 1) if interleaved.

    cos and sin [..., d'/2] broadcast against x; elements from d' on are copied. For x [s, b, n, d] pass tables of shape
    [s, 1, 1, d'/2]. 16-bit x is rotated in fp32 and rounded once.
    """
    if x.dim() == 4 and cos.shape == sin.shape == (x.shape[0], 1, 1, cos.shape[-1]):
        tables = cos[:, 0, 0], sin[:, 0, 0]
        return _rotate_heads(x.unsqueeze(2), *tables, x.shape[2], interleaved).squeeze(2)
    result: Tensor = _Rotary.apply(x, cos, sin, interleaved)
    return result


def rotate_mixed(
    mixed: Tensor, groups: int, repeats: int, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> Tensor:
    """Rotate queries and keys, not values, of the mixed projection [s, b, groups * (repeats + 2) * d] -> the same.

    A group has `repeats` query heads, a key head and a value head. cos and sin: [s, d'/2], or [s, b, d'/2] if each row
    of the batch has its own positions, with any dimensions of 1 before the last. The first d' elements of a head turn,
    in pairs as in `apply_rotary`.
    """
    s, b, width = mixed.shape
    head_dim, half = width // (groups * (repeats + 2)), cos.shape[-1]
    turns = cos.numel() // half
    assert turns in (s, s * b) and 2 * half <= head_dim
    heads = mixed.view(turns, s * b // turns, groups, repeats + 2, head_dim)
    tables = cos.view(turns, half), sin.view(turns, half)
    return _rotate_heads(heads, *tables, repeats + 1, interleaved).view(s, b, width)
