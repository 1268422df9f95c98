"""Causal attention through torch's scaled_dot_product_attention, for which there are ready-made kernels without ALiBi
and documents.

s sequence, b micro-batch, n heads, g key-value heads, r = n/g, d head dim. The kernels read queries, keys and values
where the projection lies, and write the context in the projection's order, [s, b, n, d]: no copy in forward. Only with
1 < g < n are a group's query heads no longer at even distances, and queries are copied once. In backward the kernels
allocate three gradients of their own, and autograd joins them to one of the projection's layout: one pass over it
(split's adjoint is one `cat`; slices of the projection would each make a zero-filled copy of it, to be added up). An
autograd.Function of ours could not save that pass: torch's backward kernels take no output to write into.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fused_ops.attention.rule import capability

EFFICIENT = (SDPBackend.EFFICIENT_ATTENTION,)


def heads_of(mixed: Tensor, groups: int, repeats: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """[s, b, g(r + 2)d] -> query [b, n, s, d], key and value [b, g, s, d]; all but the query of several heads of
    several groups are views.
    """
    parts = mixed.unflatten(2, (groups, repeats + 2, head_dim)).split([repeats, 1, 1], dim=3)
    query, key, value = (part.flatten(2, 3).permute(1, 2, 0, 3) for part in parts)
    return query, key, value


def joined(context: Tensor) -> Tensor:
    """[b, n, s, d] -> [s, b, nd], a view where the context lies as the queries did."""
    return context.permute(2, 0, 1, 3).flatten(2)


@cache
def flash_backends(device: torch.device) -> tuple[SDPBackend, ...]:
    """What counts as flash on a card, the faster first: cuDNN's uses what Hopper and Blackwell have new, torch's own is
    older than both.

    cuDNN's refuses some shapes, and deterministic mode; the other is then taken.
    """
    both = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
    return both if (capability(device) or (0, 0))[0] in (9, 10) else both[::-1]


def flash_attention(mixed: Tensor, groups: int, repeats: int, head_dim: int, *, scale: float) -> Tensor:
    """Causal attention of any kind of device: [s, b, g(r + 2)d] -> [s, b, nd]. On a CPU torch chooses."""
    query, key, value = heads_of(mixed, groups, repeats, head_dim)
    with _only(flash_backends(mixed.device) if mixed.is_cuda else ()):
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=repeats > 1)
    return joined(context)


def efficient_attention(mixed: Tensor, groups: int, repeats: int, head_dim: int, *, scale: float) -> Tensor:
    """As `flash_attention`, on CUDA, fp32 included. The kernel knows no groups: keys and values are repeated."""
    query, key, value = heads_of(mixed, groups, repeats, head_dim)
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    with _only(EFFICIENT):
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return joined(context)


def _only(backends: Iterable[SDPBackend]) -> AbstractContextManager[Any]:
    chosen = list(backends)
    return sdpa_kernel(chosen, set_priority=True) if chosen else nullcontext()
