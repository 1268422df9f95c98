"""Causal self-attention from the fused projection to the context, with grouped queries, ALiBi and document boundaries.

s sequence, b micro-batch, n heads, g key-value heads, r = n/g, d head dim. One function has six bodies;
fused_ops/attention/selection.py chooses one. On the CPU it is a blocked kernel on the matrix units
(csrc/torch/attention_*.cpp), whose memory is linear in s. It reads queries, keys and values from the projection and
writes their gradients into one tensor of the same layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_ops.attention.flex import flex_attention
from fused_ops.attention.kernel import kernel_attention, refusal
from fused_ops.attention.package import package_attention
from fused_ops.attention.reach import EVERYTHING, Reach
from fused_ops.attention.reference import reference_attention
from fused_ops.attention.sdpa import efficient_attention, flash_attention, flash_backends
from fused_ops.attention.selection import NOTHING_TRIED, AttentionCase, AttentionSupport, Body, capability, choose
from fused_ops.native.library import matrix_kernels


def causal_attention(
    mixed: Tensor,
    groups: int,
    repeats: int,
    head_dim: int,
    *,
    scale: float,
    slopes: Tensor | None,
    documents: Tensor | None,
    reach: Reach = EVERYTHING,
    cap: float | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
    support: AttentionSupport = NOTHING_TRIED,
) -> Tensor:
    """softmax(score + slope * key position) value over the visible keys: [s, b, g(r + 2)d] -> [s, b, nd].

    A score is scale query key^T, and with a cap it is cap tanh(scale query key^T / cap).

    mixed      for each key-value head: its r query heads, its key, its value
    slopes     ALiBi's [n], or None
    documents  int64 [b, s], equal numbers adjacent: a query sees keys of its own document only. None: one document
    reach      which of the keys up to its own position a query sees
    cap        bound of the scores before ALiBi's bias (Gemma 2: arXiv:2408.00118), or None
    dropout    applied to the probabilities [b, n, s, s]
    support    what the run asks for and what the machine has

    16-bit products are summed in fp32. The gradient of `mixed` is one tensor.
    An inf or NaN reaches all results that depend on it, and may reach others of the same sample and key-value head. The
    CPU kernel's results do not depend on the number of threads. Raises ValueError where autograd records and the body
    that --attention names cannot compute this, and for a cap that is not above 0.
    """
    if cap is not None and not cap > 0:
        raise ValueError(f"cap={cap}: scores are bounded by a number above 0, or not at all (None)")
    reach = reach.over(mixed.shape[0])
    heads = groups, repeats, head_dim
    scored: dict[str, Any] = {"scale": scale, "slopes": slopes, "reach": reach, "cap": cap}
    library = matrix_kernels(mixed) if dropout is None else None
    body = support.measured
    if body is None:
        case = AttentionCase(
            mixed.device.type,
            mixed.dtype,
            head_dim,
            mixed.shape[0],
            alibi=slopes is not None,
            documents=documents is not None,
            dropout=dropout is not None,
            window=reach.window,
            chunk=reach.chunk,
            cap=cap,
            recorded=torch.is_grad_enabled(),
            kernel=library is not None and not refusal(library, mixed.dtype),
            capability=capability(mixed.device),
        )
        body = choose(case, support).body if mixed.numel() else Body.SOFTMAX
        support = support.of(case.layers)
    if body is Body.KERNEL:
        assert library is not None
        return kernel_attention(library, mixed, *heads, documents=documents, **scored)
    if body is Body.FLASH:
        tried = not support.cudnn and mixed.shape[0] == support.length  # at no other length
        backends = flash_backends(mixed.device, groups, mixed.shape[0], cudnn=tried)
        return flash_attention(mixed, *heads, scale=scale, backends=backends)
    if body is Body.EFFICIENT:
        return efficient_attention(mixed, *heads, scale=scale)
    if body is Body.PACKAGE:
        return package_attention(mixed, *heads, **scored)
    if body is Body.FLEX:
        return flex_attention(mixed, *heads, documents=documents, **scored)
    return reference_attention(mixed, *heads, documents=documents, dropout=dropout, **scored)
