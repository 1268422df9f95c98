"""Causal self-attention with grouped queries.

s sequence, b micro-batch, h hidden, n heads, g key-value heads, r = n/g, d head dim, t = tp size. Query, key and value
come from one projection. Its rows are stored as [g, r + 2, d]: key-value head j follows its query heads
j*r .. j*r + r - 1. So a tensor-parallel shard is one contiguous slice.
(Grouped queries: Ainslie et al. 2023, arXiv:2305.13245.)
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fused_ops.attention import causal_attention
from fused_ops.attention.cached import cached_attention, store_keys_values
from fused_ops.attention.reach import Reach
from fused_ops.compiled import compiled_bodies
from fused_ops.rotary import rotate_mixed
from megazero.config.derive import SELECTIVE
from megazero.config.inventory import OUTPUT, QKV
from megazero.model.batch import MicroBatch
from megazero.model.dropout import AttentionDropout
from megazero.model.layout import ModelLayout
from megazero.model.position import AlibiSlopes, RotaryAngles


class Attention(nn.Module):
    """Attention of block `number`: [s(/t), b, h] -> the same. tp splits key-value heads with their query heads.

    Communicates what its two parallel linear layers do. Raises ValueError when g does not divide n, or t does not
    divide g.
    """

    def __init__(self, number: int, layout: ModelLayout) -> None:
        super().__init__()
        mixer, tp = layout.layer(number).mixer, layout.tp
        if mixer.heads % mixer.groups or mixer.groups % tp.size:
            raise ValueError(
                f"{mixer.heads} heads, {mixer.groups} key-value heads and tp={tp.size}: each has to divide the "
                "one before"
            )
        self.number, self.scale, self.cap = number, mixer.scale, mixer.cap
        self.reach = Reach(mixer.window, mixer.chunk)
        self.groups, self.repeats, self.size = mixer.groups // tp.size, mixer.heads // mixer.groups, mixer.size
        self.qkv, self.output = layout.column(number, QKV), layout.row(number, OUTPUT)
        self.norm = layout.query_key_norm(number)
        self.slopes = AlibiSlopes(mixer.heads, tp.index, tp.size) if mixer.alibi else None
        self.angles = None if mixer.rotary is None else RotaryAngles(mixer.size, mixer.rotary)
        self.dropout = AttentionDropout(number, layout)
        self.recompute_core, self.compile_ops, self.support = (
            layout.recompute_of(number) == SELECTIVE,
            layout.compile,
            layout.attention,
        )

    def forward(self, hidden: Tensor, batch: MicroBatch) -> Tensor:
        mixed = self.qkv(hidden, batch.samples)
        if self.norm is not None:
            mixed = self.norm(mixed)
        if self.angles is not None:
            interleaved = self.angles.settings.interleaved
            tables = self.angles(mixed, batch.past, batch.row_lengths)
            mixed = rotate_mixed(mixed, self.groups, self.repeats, *tables, interleaved=interleaved)
        if self.recompute_core:
            context = checkpoint(self.core, mixed, batch, use_reentrant=False, preserve_rng_state=False)
        else:
            context = self.core(mixed, batch)
        return self.output(context, batch.samples)

    def core(self, mixed: Tensor, batch: MicroBatch) -> Tensor:
        """softmax(scale query key^T + bias) value over the keys in reach: [s, b, g(r + 2)d/t] -> [s, b, nd/t].

        With `batch.past` it stores the new keys and values there and also attends to those of earlier tokens.
        """
        heads = self.groups, self.repeats, self.size
        slopes = None if self.slopes is None else self.slopes(mixed)
        past = batch.past
        if past is not None and past.positions is not None:
            kept = *past.layers[self.number], past.slots, past.positions[0], past.reach
            reach, cap = self.reach, self.cap
            return cached_attention(mixed, *kept, *heads, scale=self.scale, slopes=slopes, reach=reach, cap=cap)
        if past is not None:
            cache = *past.layers[self.number], past.slots
            store_keys_values(mixed, *cache, *heads, reach=self.reach, lengths=past.lengths)
        with compiled_bodies(self.compile_ops):  # again here, since recomputation runs the core outside its block
            dropout = partial(self.dropout, samples=batch.samples) if self.dropout.is_active else None
            documents = batch.documents
            return causal_attention(
                mixed,
                *heads,
                scale=self.scale,
                slopes=slopes,
                documents=documents,
                reach=self.reach,
                cap=self.cap,
                dropout=dropout,
                support=self.support,
            )
