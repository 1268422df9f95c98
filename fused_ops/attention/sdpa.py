"""Causal attention by torch's scaled_dot_product_attention, whose kernels have no ALiBi and no documents.

s sequence, b micro-batch, n heads, g key-value heads, r = n/g, d head dim. The kernels read queries, keys and values
from the projection and write the context in its order, [s, b, n, d], so forward copies nothing. There are two
exceptions. For 1 < g < n the query heads are not evenly spaced, and queries are copied once. The memory-efficient
kernel writes the samples one after the other, [b, s, n, d], and the context is copied once if b > 1.

In backward the kernels allocate three gradients, and autograd joins them by one `cat`, the adjoint of split. (Slices of
the projection would each make a zero-filled copy of it.) Another autograd.Function could not save this pass, since
torch's backward kernels allocate their outputs.
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

from fused_ops.attention.cudnn import CudnnCase, cudnn_refusal, versions
from fused_ops.attention.declared import declared_efficient, declared_flash
from fused_ops.attention.selection import capability

CUDNN = (SDPBackend.CUDNN_ATTENTION,)
FLASH = (SDPBackend.FLASH_ATTENTION,)
EFFICIENT = (SDPBackend.EFFICIENT_ATTENTION,)


def heads_of(mixed: Tensor, groups: int, repeats: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """[s, b, g(r + 2)d] -> query [b, n, s, d], key and value [b, g, s, d]. They are views, except the query if 1 < g <
    n.
    """
    parts = mixed.unflatten(2, (groups, repeats + 2, head_dim)).split([repeats, 1, 1], dim=3)
    query, key, value = (part.flatten(2, 3).permute(1, 2, 0, 3) for part in parts)
    return query, key, value


def joined(context: Tensor) -> Tensor:
    """[b, n, s, d] -> [s, b, nd], a view if the context has the memory order of the queries."""
    return context.permute(2, 0, 1, 3).flatten(2)


def flash_attention(
    mixed: Tensor, groups: int, repeats: int, head_dim: int, *, scale: float, backends: tuple[SDPBackend, ...] = ()
) -> Tensor:
    """Causal attention: [s, b, g(r + 2)d] -> [s, b, nd].

    backends  torch's, in order: the first that takes the shape computes. Without any torch chooses, as on a CPU
    """
    query, key, value = heads_of(mixed, groups, repeats, head_dim)
    if mixed.is_meta:
        return joined(declared_flash(query, key, value))
    with _only(backends):
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=repeats > 1)
    return joined(context)


@cache
def flash_backends(device: torch.device, groups: int, length: int, cudnn: bool) -> tuple[SDPBackend, ...]:
    """The backends of "flash" on a device, the faster first; empty on a CPU.

    cudnn  whether cuDNN's attention was tried in this process and is right. It is made for Hopper and Blackwell,
           torch's for Ampere. It refuses some shapes and deterministic mode; torch's is then used
    """
    card = capability(device)
    if card is None:
        return ()
    if not cudnn or cudnn_refusal(CudnnCase(card, *versions(), groups, length)):
        return FLASH
    return CUDNN + FLASH


def efficient_attention(mixed: Tensor, groups: int, repeats: int, head_dim: int, *, scale: float) -> Tensor:
    """As `flash_attention`, on CUDA, also for fp32. The kernel has no grouped queries: keys and values are repeated."""
    query, key, value = heads_of(mixed, groups, repeats, head_dim)
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    if mixed.is_meta:
        return joined(declared_efficient(query, key, value))
    with _only(EFFICIENT):
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return joined(context)


def _only(backends: Iterable[SDPBackend]) -> AbstractContextManager[Any]:
    chosen = list(backends)
    return sdpa_kernel(chosen, set_priority=True) if chosen else nullcontext()
