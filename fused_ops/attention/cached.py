"""Attention with a key-value cache: attention of new tokens to cached ones, and writing to the cache. No gradients.

s new tokens in each of b rows, n heads, g key-value heads, r = n/g, d head dim. The cache has keys and values as
[slots, g, L, d], with room for L positions. Each row of the batch continues a slot of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_ops.blocks import opmath_dtype
from fused_ops.native.library import kernels, suffix
from fused_ops.products import lacks_products, product


def store_keys_values(
    mixed: Tensor, keys: Tensor, values: Tensor, slots: Tensor, groups: int, repeats: int, head_dim: int
) -> None:
    """Write keys and values of the projection `mixed` [s, b, g(r + 2)d] to positions 0 to s - 1 of slots int64 [b]."""
    s, b, _ = mixed.shape
    heads = mixed.view(s, b, groups, repeats + 2, head_dim)
    for cache, number in ((keys, repeats), (values, repeats + 1)):
        cache[:, :, :s].index_copy_(0, slots, heads[:, :, :, number].permute(1, 2, 0, 3))


def cached_attention(
    mixed: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    reach: int,
    groups: int,
    repeats: int,
    head_dim: int,
    *,
    scale: float,
    slopes: Tensor | None,
) -> Tensor:
    """softmax(scale query key^T + slope * key position) value over all keys up to the query's own.

    [s, b, g(r + 2)d] -> [s, b, nd].

    mixed      the projection of the new tokens. Their keys and values are written into the cache first
    slots      int64 [b], ascending and distinct
    positions  int64 [b]: position of each row's first new token; earlier positions are in the cache
    reach      all new positions are less than this; at most L
    slopes     ALiBi's [n], or None

    The kernel computes 16-bit tensors in fp32; without it their products are rounded.
    """
    s, b, _ = mixed.shape
    library = kernels(mixed, keys, values)
    if library is None or library.on_device or mixed.device.type != "cpu":
        return _reference(mixed, keys, values, slots, positions, reach, groups, repeats, head_dim, scale, slopes)
    out = mixed.new_empty((s, b, groups * repeats * head_dim))
    slopes = None if slopes is None else slopes.to(torch.float32)
    sizes = s, b, groups, repeats, head_dim, keys.shape[2]
    name = f"cached_attention_{suffix(mixed.dtype)}"
    library.call(
        name, mixed.contiguous(), keys, values, slots, positions.contiguous(), slopes, out, *sizes, float(scale)
    )
    return out


def _reference(
    mixed: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    reach: int,
    groups: int,
    repeats: int,
    head_dim: int,
    scale: float,
    slopes: Tensor | None,
) -> Tensor:
    """The reference body: the specification."""
    s, b, _ = mixed.shape
    dtype = opmath_dtype(mixed.dtype)
    query, key, value = mixed.view(s, b, groups, repeats + 2, head_dim).split([repeats, 1, 1], dim=3)
    places = positions + torch.arange(s, device=mixed.device).unsqueeze(1)
    keys[slots.expand(s, b), :, places] = key.squeeze(3)
    values[slots.expand(s, b), :, places] = value.squeeze(3)
    whole = b == keys.shape[0]
    seen = [(cache if whole else cache.index_select(0, slots))[:, :, :reach] for cache in (keys, values)]
    rows = query.permute(1, 2, 3, 0, 4).reshape(b, groups, repeats * s, head_dim)
    scores = _product(rows, seen[0].transpose(2, 3)).view(b, groups, repeats, s, reach).to(dtype) * scale
    distance = torch.arange(reach, device=mixed.device) - places.t().unsqueeze(2)
    if slopes is not None:
        scores += slopes.to(dtype).view(groups, repeats, 1, 1) * distance.view(b, 1, 1, s, reach)
    scores.masked_fill_(distance.view(b, 1, 1, s, reach) > 0, float("-inf"))
    probabilities = scores.softmax(-1).to(mixed.dtype).view(b, groups, repeats * s, reach)
    context = _product(probabilities, seen[1]).view(b, groups, repeats, s, head_dim)
    return context.permute(3, 0, 1, 2, 4).reshape(s, b, groups * repeats * head_dim)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b for two batch dimensions: [b, g, m, k] and [b, g, k, n] -> [b, g, m, n]."""
    if lacks_products(a):
        return product(a.flatten(0, 1), b.flatten(0, 1), 1.0).unflatten(0, a.shape[:2])
    return torch.matmul(a, b)
