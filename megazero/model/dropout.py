"""Dropout whose mask is a pure function of (seed, sample, layer, site, global index).

The mask is the same on every layout, with and without sequence parallelism or recomputation. No random state is kept.
"""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor, nn

from megazero.model.layout import ModelLayout
from megazero.mpu.random import DropoutKey, add_hidden_dropout, attention_dropout, hidden_dropout


class DropoutSite(IntEnum):
    """The dropouts of a layer; the embedding's is one of layer 0. The numbers key the masks and must not change."""

    EMBEDDING = 0
    ATTENTION_PROBABILITIES = 1
    ATTENTION_OUTPUT = 2
    MLP_OUTPUT = 3


class HiddenDropout(nn.Module):
    """Dropout of hidden states [s(/t), b, h] -> the same. It is the identity in evaluation and for p = 0."""

    def __init__(self, layer: int, site: DropoutSite, layout: ModelLayout) -> None:
        super().__init__()
        self.p = layout.model.hidden_dropout
        self.key = DropoutKey(layout.seed, layer, int(site))
        self.layout = layout

    def forward(self, hidden: Tensor, samples: Tensor) -> Tensor:
        """samples: int64 [b], numbers of the samples in the run's order."""
        if self.p == 0.0 or not self.training:
            return hidden
        return hidden_dropout(hidden, self.p, self.key, samples, self.layout.sequence_offset(hidden.shape[0]))

    def add(self, hidden: Tensor, residual: Tensor, samples: Tensor) -> Tensor:
        """residual + dropout(hidden) in one pass; all [s(/t), b, h]."""
        p = self.p if self.training else 0.0
        return add_hidden_dropout(
            hidden, None, residual, p, self.key, samples, self.layout.sequence_offset(hidden.shape[0])
        )


class AttentionDropout(nn.Module):
    """Dropout of attention probabilities [b, n/t, s, s] -> the same. It is the identity in evaluation and for p = 0."""

    def __init__(self, layer: int, layout: ModelLayout) -> None:
        super().__init__()
        self.p = layout.model.attention_dropout
        self.key = DropoutKey(layout.seed, layer, int(DropoutSite.ATTENTION_PROBABILITIES))
        self.head_offset = layout.tp.index * (layout.model.num_attention_heads // layout.tp.size)

    @property
    def is_active(self) -> bool:
        return self.p > 0.0 and self.training

    def forward(self, probabilities: Tensor, samples: Tensor) -> Tensor:
        if not self.is_active:
            return probabilities
        return attention_dropout(probabilities, self.p, self.key, samples, self.head_offset)
