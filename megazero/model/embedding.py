"""The first layer: tokens to hidden states.

s sequence, b micro-batch, h hidden, v vocabulary, t = tp size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fused_ops.embedding import embedding
from megazero.config.derive import padded_vocab, position_rows
from megazero.config.inventory import EMBEDDING_NORM, POSITIONS, WORDS
from megazero.model.batch import MicroBatch, PastKeyValues
from megazero.model.dropout import DropoutSite, HiddenDropout
from megazero.model.layout import ModelLayout
from megazero.mpu.layers import VocabParallelEmbedding
from megazero.mpu.parameter import Parameter, ParameterKind, StateGroup, shard


class Embedding(nn.Module):
    """Word embedding, learned positions if any, normalisation if any (BLOOM), dropout.

    tied: another pipeline rank holds the word embedding too, as its tied head.
    """

    def __init__(self, layout: ModelLayout, *, tied: bool) -> None:
        super().__init__()
        model, tp = layout.model, layout.tp
        assert model.vocab_size is not None, "the vocabulary is known once the tokenizer is"
        self.layout = layout
        self.word = VocabParallelEmbedding(
            WORDS.removesuffix(".weight"),
            model.vocab_size,
            model.hidden_size,
            padded_vocab(model, tp.size),
            tp,
            std=layout.std,
            state_group=StateGroup.TIED if tied else StateGroup.REPLICAS,
            **layout.placed,
        )
        # as Gemma's own code does: the factor sqrt(h) is a number of the parameters' dtype
        self.multiplier = torch.tensor(model.embedding_multiplier, dtype=layout.dtype).item()
        self.position = LearnedPositions(layout) if model.position_embedding == "learned" else None
        self.norm = layout.norm(EMBEDDING_NORM) if model.embedding_layernorm else None
        self.dropout = HiddenDropout(0, DropoutSite.EMBEDDING, layout)

    def forward(self, batch: MicroBatch) -> Tensor:
        """batch.tokens [b, s] -> [s(/t), b, h].

        Communicates an all-reduce of the word embedding over tp, or under sp a reduce-scatter along s.
        """
        hidden: Tensor = self.word(batch.tokens)
        if self.multiplier != 1.0:
            hidden = hidden * self.multiplier
        if self.position is not None:
            hidden = self.position(hidden, batch.past, batch.positions)
        if self.norm is not None:
            hidden = self.norm(hidden)
        return self.dropout(hidden, batch.samples)


class LearnedPositions(nn.Module):
    """A table of learned positions, replicated over tp. Row p + offset belongs to position p.

    Under sequence parallelism each rank reads the rows of its own positions, and its gradient is a partial sum. The
    first `offset` rows are never read (OPT has two, for padding).
    """

    def __init__(self, layout: ModelLayout) -> None:
        super().__init__()
        self.layout = layout
        spec = shard(
            POSITIONS,
            (position_rows(layout.model), layout.model.hidden_size),
            ParameterKind.EMBEDDING,
            std=layout.std,
            tp_partial=layout.sequence_parallel and layout.tp.size > 1,
        )
        self.weight = Parameter(spec, layout.dtype, layout.device)

    def forward(self, hidden: Tensor, past: PastKeyValues | None = None, positions: Tensor | None = None) -> Tensor:
        """hidden [s(/t), b, h] plus the vectors of its positions.

        positions: int64 [b, s]; None: 0 to s - 1. Raises ValueError when the sequence is longer than the table.
        """
        length = hidden.shape[0]
        offset = self.layout.model.position_offset
        if past is not None and past.positions is not None:
            assert past.reach + offset <= self.weight.shape[0]
            return hidden + self.weight[past.positions + offset]
        start = self.layout.sequence_offset(length) + offset
        if start + length > self.weight.shape[0]:
            learned = self.weight.shape[0] - offset
            raise ValueError(
                f"position {start + length - offset} is beyond the {learned} learned positions "
                "(--max-position-embeddings)"
            )
        if positions is not None:
            first = start - offset
            return hidden + embedding(positions[:, first : first + length].t() + offset, self.weight)
        return hidden + self.weight[start : start + length].unsqueeze(1)
