"""RMSNorm of queries and keys in the mixed projection of attention: over each head, or over all heads together.

s sequence, b micro-batch, g key-value heads, r query heads for each of them, d head dim. mixed: [s, b, g(r + 2)d]. The
r query heads of a group stand before its key head and its value head. 16-bit inputs are computed in fp32 and rounded
once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fused_ops.blocks import opmath_dtype
from fused_ops.compiled import compilable
from fused_ops.graph import apply_or_forward
from fused_ops.layernorm import added_gain
from fused_ops.native.library import Library, kernels, suffix

LONGEST_HEAD = 256
"""The largest head dim that the kernels take: on a GPU a warp has a head in its registers."""


def heads_of(mixed: Tensor, groups: int, repeats: int) -> Tensor:
    """A view of mixed: [s, b, g, r + 2, d]."""
    return mixed.view(*mixed.shape[:-1], groups, repeats + 2, -1)


def gains(like: Tensor, query_weight: Tensor | None, key_weight: Tensor | None, repeats: int, offset: float) -> Tensor:
    """What normalised heads [..., r + 1, d] are multiplied by: [r + 1, d] in the dtype of the computation."""
    wide = opmath_dtype(like.dtype)
    rows = [
        like.new_ones(like.shape[-1], dtype=wide) if weight is None else weight.to(wide) + offset
        for weight in (query_weight, key_weight)
    ]
    return torch.stack(rows)[[0] * repeats + [1]]


def _in_their_dtypes(
    sums: Iterable[Tensor], query_weight: Tensor | None, key_weight: Tensor | None
) -> list[Tensor | None]:
    """Gradients [d] of both weights from their sums in the dtype of the computation; None for a weight of None."""
    pairs = zip(sums, (query_weight, key_weight), strict=True)
    return [None if weight is None else total.to(weight.dtype) for total, weight in pairs]


class _Reference(torch.autograd.Function):
    """Reference body. Saves mixed and 1 / sqrt(mean(x^2) + eps) of each head."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        groups: int,
        repeats: int,
        eps: float,
        offset: float,
    ) -> Tensor:
        heads = heads_of(mixed, groups, repeats)
        values = heads[..., :-1, :].to(opmath_dtype(mixed.dtype))
        scale = values.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(mixed, query_weight, key_weight, scale)
        ctx.rest = groups, repeats, offset
        unit = (values * scale).mul_(gains(heads, query_weight, key_weight, repeats, offset))
        return torch.cat([unit.to(mixed.dtype), heads[..., -1:, :]], dim=-2).view(mixed.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        mixed, query_weight, key_weight, scale = ctx.saved_tensors
        groups, repeats, offset = ctx.rest
        incoming, heads = heads_of(grads[0].contiguous(), groups, repeats), heads_of(mixed, groups, repeats)
        grad, unit = incoming[..., :-1, :].to(scale.dtype), heads[..., :-1, :].to(scale.dtype) * scale
        of_heads = (grad * unit).flatten(0, 2).sum(0)
        of_weights = _in_their_dtypes((of_heads[:-1].sum(0), of_heads[-1]), query_weight, key_weight)
        grad = grad * gains(heads, query_weight, key_weight, repeats, offset)
        inner = (grad * unit).mean(-1, keepdim=True)
        of_mixed = (grad - unit.mul_(inner)).mul_(scale).to(mixed.dtype)
        of_mixed = torch.cat([of_mixed, incoming[..., -1:, :]], dim=-2).view(mixed.shape)
        return of_mixed, *of_weights, None, None, None, None


@compilable
def _reference(
    mixed: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    groups: int,
    repeats: int,
    eps: float,
    offset: float,
) -> Tensor:
    result: Tensor = _Reference.apply(mixed, query_weight, key_weight, groups, repeats, eps, offset)
    return result


class _Kernel(torch.autograd.Function):
    """The kernels. They save what the reference body saves, and sum weight gradients in fp32 over fixed blocks."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        groups: int,
        repeats: int,
        eps: float,
        offset: float,
        library: Library,
    ) -> Tensor:
        mixed = mixed.contiguous()
        bundles = mixed.shape[:-1].numel() * groups
        scale = mixed.new_empty((bundles, repeats + 1), dtype=torch.float32)
        ctx.save_for_backward(mixed, query_weight, key_weight, scale)
        ctx.shape, ctx.offset, ctx.library = (
            (bundles, repeats, mixed.shape[-1] // (groups * (repeats + 2))),
            offset,
            library,
        )
        weights, offsets = _gain_pair(mixed, query_weight, key_weight, offset, ctx.shape[-1])
        out = torch.empty_like(mixed)
        name = f"norm_heads_{suffix(mixed.dtype)}"
        library.call(name, *ctx.shape, out, mixed, *weights, scale, float(eps), *offsets)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        mixed, query_weight, key_weight, scale = ctx.saved_tensors
        weights, offsets = _gain_pair(mixed, query_weight, key_weight, ctx.offset, ctx.shape[-1])
        of_mixed, sums = torch.empty_like(mixed), mixed.new_empty((2, ctx.shape[-1]), dtype=torch.float32)
        name, grad = f"norm_heads_backward_{suffix(mixed.dtype)}", grads[0].contiguous()
        ctx.library.call(name, *ctx.shape, of_mixed, sums, grad, mixed, *weights, scale, *offsets)
        return of_mixed, *_in_their_dtypes(sums, query_weight, key_weight), None, None, None, None, None


def _gain_pair(
    mixed: Tensor, query_weight: Tensor | None, key_weight: Tensor | None, offset: float, head_dim: int
) -> tuple[tuple[Tensor, Tensor], tuple[float, float]]:
    (query, of_query), (key, of_key) = (
        added_gain(mixed, weight, offset, head_dim) for weight in (query_weight, key_weight)
    )
    return (query, key), (of_query, of_key)


def norm_heads(
    mixed: Tensor,
    groups: int,
    repeats: int,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) of every query head and every key head x of mixed -> a new tensor.

    query_weight, key_weight: [d], or None: without one. Value heads are copied. (Henry et al. 2020, arXiv:2010.04245;
    Dehghani et al. 2023, arXiv:2302.05442.)
    """
    weights = [weight for weight in (query_weight, key_weight) if weight is not None]
    library = kernels(mixed, *weights)
    if library is None or not mixed.numel() or mixed.shape[-1] > LONGEST_HEAD * groups * (repeats + 2):
        return _reference(mixed, query_weight, key_weight, groups, repeats, eps, offset)
    arguments = mixed, query_weight, key_weight, groups, repeats, eps, offset, library
    result: Tensor = apply_or_forward(_Kernel, *arguments)
    return result


class AllHeads:
    """The two halves of a norm over all query heads, and over all key heads, with a sum over ranks between them.

    y = x scale (offset + weight) with scale = 1 / sqrt(total / elements + eps). A rank has some of the heads; `squares`
    are its part of the total, of which there is one for the queries and one for the keys of a position. In backward the
    ranks sum `products` in the same way.

    query_weight  [g r d], a value for each element of this rank's query heads, in the order of the heads
    key_weight    [g d]
    """

    def __init__(
        self, mixed: Tensor, query_weight: Tensor, key_weight: Tensor, groups: int, repeats: int, offset: float
    ) -> None:
        self.heads, self.repeats = heads_of(mixed, groups, repeats), repeats
        self.wide = opmath_dtype(mixed.dtype)
        rows = query_weight.view(groups, repeats, -1), key_weight.view(groups, 1, -1)
        self.gain = torch.cat(rows, dim=1).to(self.wide) + offset

    def squares(self) -> Tensor:
        """Sums of squares [2, s, b], of this rank's query heads and of its key heads; fp32 for 16-bit inputs."""
        return self._sums(self._values(self.heads).square())

    def scaled(self, scale: Tensor) -> Tensor:
        """y from scale [2, s, b]: a new tensor of the shape of mixed, with the value heads of mixed."""
        return self._joined(self._values(self.heads) * self._spread(scale) * self.gain, self.heads)

    def products(self, grad: Tensor) -> Tensor:
        """Sums [2, s, b] of gradient times (offset + weight) times x, the ranks' total of which `gradients` takes."""
        return self._sums(self._values(self._like_heads(grad)) * self.gain * self._values(self.heads))

    def gradients(self, grad: Tensor, scale: Tensor, inner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(of mixed, of query_weight, of key_weight). inner [2, s, b]: the ranks' products / elements."""
        incoming, factor = self._like_heads(grad), self._spread(scale)
        wide, values = self._values(incoming), self._values(self.heads)
        of_weights = (wide * values * factor).sum((0, 1))
        of_values = wide * self.gain * factor - values * self._spread(scale.pow(3) * inner)
        of_query, of_key = (part.reshape(-1).to(grad.dtype) for part in of_weights.split([self.repeats, 1], dim=1))
        return self._joined(of_values, incoming), of_query, of_key

    def _like_heads(self, x: Tensor) -> Tensor:
        return x.reshape(self.heads.shape)

    def _values(self, heads: Tensor) -> Tensor:
        return heads[..., :-1, :].to(self.wide)

    def _sums(self, values: Tensor) -> Tensor:
        """[s, b, g, r + 1, d] -> [2, s, b]."""
        return torch.stack([part.sum((-3, -2, -1)) for part in values.split([self.repeats, 1], dim=-2)])

    def _spread(self, rows: Tensor) -> Tensor:
        """[2, s, b] -> [s, b, 1, r + 1, 1]."""
        return rows[[0] * self.repeats + [1]].permute(1, 2, 0)[:, :, None, :, None]

    def _joined(self, values: Tensor, heads: Tensor) -> Tensor:
        joined = torch.cat([values.to(heads.dtype), heads[..., -1:, :]], dim=-2)
        return joined.view(*heads.shape[:2], -1)
