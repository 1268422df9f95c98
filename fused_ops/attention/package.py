"""Causal attention by the package flash_attn, whose kernels take ALiBi's slopes. It is optional.

It also has windows and caps of the scores.

s sequence, b micro-batch, n heads, g key-value heads, r = n/g, d head dim. The package (Tri Dao's flash-attention 2,
arXiv 2307.08691) adds -slope |query position - key position| to the scores. Under a causal mask that is ALiBi. Torch's
own copy of these kernels has no place for slopes.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fused_ops.attention.declared import declared_flash
from fused_ops.attention.reach import EVERYTHING, Reach
from fused_ops.attention.sdpa import heads_of, joined

NAME = "flash_attn"
MISSING = f"the package {NAME} is not installed"


def is_installed() -> bool:
    """Whether the package can be found. It is not imported."""
    return find_spec(NAME) is not None


def package_attention(
    mixed: Tensor,
    groups: int,
    repeats: int,
    head_dim: int,
    *,
    scale: float,
    slopes: Tensor | None,
    reach: Reach = EVERYTHING,
    cap: float | None = None,
) -> Tensor:
    """As `fused_ops.attention.causal_attention` without documents and chunks: [s, b, g(r + 2)d] -> [s, b, nd].

    The kernels read queries, keys and values where the projection left them. Their backward sums in a fixed order where
    torch's deterministic algorithms are on. Raises ImportError without the package.
    """
    if mixed.is_meta:
        return joined(declared_flash(*heads_of(mixed, groups, repeats, head_dim), reach))
    attend: Any = import_module(NAME).flash_attn_func
    query, key, value = (part.transpose(1, 2) for part in heads_of(mixed, groups, repeats, head_dim))
    assert reach.chunk is None
    # Only what a layer needs, since an older package does not know the name.
    asked: dict[str, Any] = {} if cap is None else {"softcap": cap}
    if reach.window is not None:
        asked["window_size"] = (reach.window - 1, 0)  # keys before the query's own, and after it
    context: Tensor = attend(
        query,
        key,
        value,
        softmax_scale=scale,
        causal=True,
        alibi_slopes=None if slopes is None else slopes.float(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **asked,
    )
    return joined(context.transpose(1, 2))
