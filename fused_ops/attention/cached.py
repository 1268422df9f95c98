"""Attention with a key-value cache: attention of new tokens to cached ones, and writing to the cache. No gradients.

s new tokens in each of b rows, n heads, g key-value heads, r = n/g, d head dim. The cache has keys and values as
[slots, g, L, d], with room for L positions. Each row of the batch continues a slot of its own.

Position p lies at place p. A layer whose queries reach W positions needs no more places than W: there it lies at place
p % W, and takes the place of position p - W, which no later query sees. L may be less than W while all positions are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_ops.attention.reach import EVERYTHING, Reach
from fused_ops.blocks import opmath_dtype
from fused_ops.native.library import kernels, suffix
from fused_ops.products import lacks_products, product


def store_keys_values(
    mixed: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    groups: int,
    repeats: int,
    head_dim: int,
    *,
    reach: Reach = EVERYTHING,
    lengths: Tensor | None = None,
) -> None:
    """Write keys and values of the projection `mixed` [s, b, g(r + 2)d], whose rows begin at position 0, to the cache.

    slots    int64 [b], distinct
    reach    of the layer. Of more positions than it has, the last ones of each row are kept
    lengths  int64 [b]: the row's tokens, which what it is padded with follows; None: all s. What is stored beyond a
             row's length no query sees, for later tokens take its places
    """
    s, b, _ = mixed.shape
    heads = mixed.view(s, b, groups, repeats + 2, head_dim)
    if reach.width is not None and reach.width < s:
        heads = _last_positions(heads, reach.width, lengths)
    for cache, number in ((keys, repeats), (values, repeats + 1)):
        cache[:, :, : len(heads)].index_copy_(0, slots, heads[:, :, :, number].permute(1, 2, 0, 3))


def _last_positions(heads: Tensor, width: int, lengths: Tensor | None) -> Tensor:
    """Rows [s, b, ...] -> [width, b, ...]: for each place the last position of a row that belongs there."""
    s, b = heads.shape[:2]
    last = (heads.new_full((b,), s, dtype=torch.int64) if lengths is None else lengths) - 1
    place = torch.arange(width, device=heads.device).unsqueeze(1)
    # A row that is shorter than the width has nothing for its last places, and its first token lies there unseen.
    positions = (last - (last - place) % width).clamp_(min=0)
    return heads[positions, torch.arange(b, device=heads.device)]


def cached_attention(
    mixed: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    end: int,
    groups: int,
    repeats: int,
    head_dim: int,
    *,
    scale: float,
    slopes: Tensor | None,
    reach: Reach = EVERYTHING,
    cap: float | None = None,
) -> Tensor:
    """softmax(score + slope * key position) value over the keys in reach, up to the query's own.

    [s, b, g(r + 2)d] -> [s, b, nd].

    mixed      the projection of the new tokens. Their keys and values are written into the cache
    slots      int64 [b], ascending and distinct
    positions  int64 [b]: position of each row's first new token; earlier positions are in the cache
    end        all new positions are less than this; min(end, the width of the reach) is at most L
    slopes     ALiBi's [n], or None
    reach      of the layer, the same in every call with this cache
    cap        as in `fused_ops.attention.causal_attention`

    The kernel computes 16-bit tensors in fp32; without it their products are rounded.
    """
    s, b, _ = mixed.shape
    library = kernels(mixed, keys, values)
    if library is None or library.on_device or mixed.device.type != "cpu":
        if reach.width is not None and s > 1:
            # One after the other, because a token takes the place of a key that the one before it sees.
            parts = [
                _reference(token, keys, values, slots, positions + number, end, groups, scale, slopes, reach, cap)
                for number, token in enumerate(mixed.view(s, 1, b, groups, repeats + 2, head_dim))
            ]
            return torch.cat(parts)
        heads = mixed.view(s, b, groups, repeats + 2, head_dim)
        return _reference(heads, keys, values, slots, positions, end, groups, scale, slopes, reach, cap)
    out = mixed.new_empty((s, b, groups * repeats * head_dim))
    slopes = None if slopes is None else slopes.to(torch.float32)
    sizes = s, b, groups, repeats, head_dim, keys.shape[2]
    last = float(scale), *reach.numbers, float(cap or 0.0)
    name = f"cached_attention_{suffix(mixed.dtype)}"
    library.call(name, mixed.contiguous(), keys, values, slots, positions.contiguous(), slopes, out, *sizes, *last)
    return out


def _reference(
    heads: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    end: int,
    groups: int,
    scale: float,
    slopes: Tensor | None,
    reach: Reach,
    cap: float | None,
) -> Tensor:
    """The reference body: the specification. heads: [s, b, g, r + 2, d], of one token if a reach is set."""
    s, b, _, slots_of_group, head_dim = heads.shape
    repeats, dtype = slots_of_group - 2, opmath_dtype(heads.dtype)
    query, key, value = heads.split([repeats, 1, 1], dim=3)
    own = positions + torch.arange(s, device=heads.device).unsqueeze(1)
    ring, places = (
        own if reach.width is None else own % reach.width,
        end if reach.width is None else min(end, reach.width),
    )
    keys[slots.expand(s, b), :, ring] = key.squeeze(3)
    values[slots.expand(s, b), :, ring] = value.squeeze(3)
    whole = b == keys.shape[0]
    seen = [(cache if whole else cache.index_select(0, slots))[:, :, :places] for cache in (keys, values)]
    rows = query.permute(1, 2, 3, 0, 4).reshape(b, groups, repeats * s, head_dim)
    scores = _product(rows, seen[0].transpose(2, 3)).view(b, groups, repeats, s, places).to(dtype) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    distance = torch.arange(places, device=heads.device) - ring.t().unsqueeze(2)
    hidden = distance > 0
    if reach.window is not None:
        distance = torch.where(hidden, distance - reach.window, distance)  # keys of a lap before
        hidden = own.t().unsqueeze(2) + distance < 0
    if slopes is not None:
        scores += slopes.to(dtype).view(groups, repeats, 1, 1) * distance.view(b, 1, 1, s, places)
    scores.masked_fill_(hidden.view(b, 1, 1, s, places), float("-inf"))
    probabilities = scores.softmax(-1).to(heads.dtype).view(b, groups, repeats * s, places)
    context = _product(probabilities, seen[1]).view(b, groups, repeats, s, head_dim)
    return context.permute(3, 0, 1, 2, 4).reshape(s, b, groups * repeats * head_dim)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b for two batch dimensions: [b, g, m, k] and [b, g, k, n] -> [b, g, m, n]."""
    if lacks_products(a):
        return product(a.flatten(0, 1), b.flatten(0, 1), 1.0).unflatten(0, a.shape[:2])
    return torch.matmul(a, b)
