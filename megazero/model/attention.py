"""Causal self-attention with grouped queries.

s sequence, b micro-batch, h hidden, n heads, g key-value heads, r = n/g, d head dim, t = tp size.
Query, key and value come from one projection whose rows are stored [g, r + 2, d], so that a shard is one slice: key-value head j
is stored behind its query heads j*r .. j*r + r - 1.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fused_ops.rotary import apply_rotary
from fused_ops.softmax import scaled_causal_alibi_softmax
from megazero.batch import MicroBatch
from megazero.config.derive import head_dim, query_groups
from megazero.model.dropout import AttentionDropout
from megazero.model.layout import ModelLayout
from megazero.model.position import AlibiSlopes, RotaryAngles
from megazero.mpu.layers import ColumnParallelLinear, RowParallelLinear


class Attention(nn.Module):
    """[s(/t), b, h] -> the same. The heads are split over tp, key-value heads with their query heads."""

    def __init__(self, number: int, layout: ModelLayout) -> None:
        super().__init__()
        model, tp, name = layout.model, layout.tp, f"blocks.{number}.attention"
        groups, size = query_groups(model), head_dim(model)
        if model.num_attention_heads % groups or groups % tp.size:
            raise ValueError(
                f"{model.num_attention_heads} heads, {groups} key-value heads and tp={tp.size}: each has to divide the one before"
            )
        self.groups, self.repeats, self.size = groups // tp.size, model.num_attention_heads // groups, size
        bias = not model.disable_bias_linear
        rows = groups * (self.repeats + 2) * size
        self.qkv = ColumnParallelLinear(f"{name}.qkv", model.hidden_size, rows, tp, bias=bias, std=layout.std, **layout.placed)
        width = model.num_attention_heads * size
        self.output = RowParallelLinear(f"{name}.output", width, model.hidden_size, tp, bias=bias, std=layout.output_std, **layout.placed)
        self.slopes = AlibiSlopes(model.num_attention_heads, tp.index, tp.size) if model.position_embedding == "alibi" else None
        self.angles = RotaryAngles(size, model.rotary_base) if model.position_embedding == "rotary" else None
        self.dropout = AttentionDropout(number, layout)
        self.recompute_core = layout.recompute == "selective"

    def forward(self, hidden: Tensor, batch: MicroBatch) -> Tensor:
        query, key, value = self.split(self.qkv(hidden))
        if self.angles is not None:
            cos, sin = self.angles(query)
            query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        if self.recompute_core:
            context = checkpoint(self.core, query, key, value, batch, use_reentrant=False, preserve_rng_state=False)
        else:
            context = self.core(query, key, value, batch)
        return self.output(context)

    def split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, g(r + 2)d/t] -> query [s, b, n/t, d], key and value [s, b, g/t, d]."""
        s, b, _ = mixed.shape
        grouped = mixed.view(s, b, self.groups, self.repeats + 2, self.size)
        query, key, value = grouped.split([self.repeats, 1, 1], dim=3)
        return query.reshape(s, b, self.groups * self.repeats, self.size), key.squeeze(3), value.squeeze(3)

    def core(self, query: Tensor, key: Tensor, value: Tensor, batch: MicroBatch) -> Tensor:
        """softmax(query key^T / sqrt(d) + bias) value, causal: -> [s, b, nd/t]."""
        plain = self.slopes is None and batch.documents is None and not self.dropout.is_active
        return self.fused_core(query, key, value) if plain else self.scored_core(query, key, value, batch)

    def fused_core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Without biases, documents or dropout: torch's own kernel, which keeps no scores."""
        s, b, heads, size = query.shape
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.repeats > 1)
        return context.permute(2, 0, 1, 3).reshape(s, b, heads * size)

    def scored_core(self, query: Tensor, key: Tensor, value: Tensor, batch: MicroBatch) -> Tensor:
        """Scores, softmax in their place, context. A group's query heads are rows of one product, so keys and values are never repeated.

        1/sqrt(d) is applied inside the product: 16-bit scores would overflow before it.
        """
        s, b, heads, size = query.shape
        rows = query.view(s, b, self.groups, self.repeats, size).permute(1, 2, 3, 0, 4).reshape(b * self.groups, self.repeats * s, size)
        keys = key.permute(1, 2, 3, 0).reshape(b * self.groups, size, s)
        values = value.permute(1, 2, 0, 3).reshape(b * self.groups, s, size)
        nothing = query.new_empty(()).expand(b * self.groups, self.repeats * s, s)
        scores = torch.baddbmm(nothing, rows, keys, beta=0, alpha=1 / math.sqrt(size)).view(b, heads, s, s)
        slopes = None if self.slopes is None else self.slopes(query)
        probabilities = scaled_causal_alibi_softmax(scores, 1.0, slopes, documents=batch.documents)
        probabilities = self.dropout(probabilities, batch.samples)
        context = torch.bmm(probabilities.view(b * self.groups, self.repeats * s, s), values)
        return context.view(b, self.groups, self.repeats, s, size).permute(3, 0, 1, 2, 4).reshape(s, b, heads * size)
