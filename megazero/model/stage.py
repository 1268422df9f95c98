"""The part of a model in one model chunk of a pipeline stage. Layers of other chunks are absent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megazero.config.derive import FULL
from megazero.config.schema import ModelConfig
from megazero.model.batch import MicroBatch
from megazero.model.block import Block
from megazero.model.embedding import Embedding
from megazero.model.head import Head
from megazero.model.layout import ModelLayout
from megazero.model.recomputation import recomputed
from megazero.mpu.layers import VocabParallelEmbedding
from megazero.mpu.lora import freeze_all_but_adapters
from megazero.mpu.parameter import ModuleType, Parameter, spec_of, without_memory
from megazero.mpu.random import initialise as initialise_parameter


@dataclass(frozen=True)
class StageSpec:
    """Which layers of the model a chunk holds. blocks: a range of global numbers with step 1."""

    blocks: range
    has_embedding: bool
    has_head: bool


def whole_model(model: ModelConfig) -> StageSpec:
    """The spec of a stage that holds the whole model."""
    return StageSpec(range(model.num_layers), True, True)


class Stage(nn.Module):
    """Those of embedding, blocks and head that `spec` names. Parameters are named as in the whole model.

    Construction leaves parameters uninitialised and communicates nothing. So any rank's stage can be built anywhere; on
    the device "meta" it takes no memory.

    tied_across_stages  embedding and head are tied and on different pipeline ranks
    shared_embedding    the embedding of another chunk of this rank, for a tied head

    Raises ValueError where these contradict the model, or a tied head has no embedding.
    """

    def __init__(
        self,
        layout: ModelLayout,
        spec: StageSpec,
        *,
        tied_across_stages: bool = False,
        shared_embedding: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__()
        tied = not layout.model.untie_embeddings_and_output_weights
        if not tied and (tied_across_stages or shared_embedding is not None):
            raise ValueError(
                "the head is untied (--untie-embeddings-and-output-weights), but a tied embedding was handed to it"
            )
        self.layout, self.spec = layout, spec
        made: Callable[[ModuleType], ModuleType] = (lambda unit: unit) if layout.allocate else without_memory
        self.embedding = made(Embedding(layout, tied=tied_across_stages)) if spec.has_embedding else None
        self.blocks = nn.ModuleDict({str(number): made(Block(number, layout)) for number in spec.blocks})
        self.head: Head | None = None
        if spec.has_head:
            shared = self._head_weight(tied, tied_across_stages, shared_embedding)
            self.head = made(Head(layout, shared=shared, tied_copy=tied_across_stages))
        if layout.lora is not None:
            freeze_all_but_adapters(self)

    def _head_weight(self, tied: bool, across: bool, elsewhere: VocabParallelEmbedding | None) -> Parameter | None:
        if not tied or across:
            return None
        word = self.embedding.word if self.embedding is not None else elsewhere
        if word is None:
            raise ValueError(
                "a tied head needs the embedding: in this stage, as shared_embedding, or across stages "
                "(tied_across_stages)"
            )
        assert isinstance(word.weight, Parameter)
        return word.weight

    def units(self) -> list[nn.Module]:
        """The layers in forward order: embedding, blocks, head."""
        ends = (self.embedding, self.head)
        return [*(u for u in ends[:1] if u is not None), *self.blocks.values(), *(u for u in ends[1:] if u is not None)]

    def forward(self, hidden: Tensor | None, batch: MicroBatch, units: tuple[int, int] | None = None) -> Tensor:
        """hidden [s(/t), b, h] of the previous chunk (None for the first) -> hidden of this chunk, [s(/t), b, h].

        With the head: the sum of the counted token losses, 0-dim. units: only these units [start, stop) of the chunk,
        whose hidden state is that of the unit before; None: all.
        """
        for unit in self.units()[slice(*(units or (None, None)))]:
            hidden = self._run(unit, hidden, batch)
        assert hidden is not None
        return hidden

    def logits(self, hidden: Tensor | None, batch: MicroBatch, positions: Tensor | None = None) -> Tensor:
        """The logits of the chunk with the head, [s, b, v] on every tp rank. Arguments as in `forward`.

        positions: int64 [b], one position in each row, for logits [1, b, v].
        """
        assert self.head is not None
        return self.head.logits(self.trunk(hidden, batch), positions)

    def trunk(self, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        """The embedding and the blocks of this chunk: hidden [s(/t), b, h] or None -> [s(/t), b, h]."""
        for unit in self.units():
            if unit is not self.head:
                hidden = self._run(unit, hidden, batch)
        assert hidden is not None, "a stage without the embedding needs the hidden state of the stage before"
        return hidden

    def _run(self, unit: nn.Module, hidden: Tensor | None, batch: MicroBatch) -> Tensor:
        if unit is self.embedding:
            return self.embedding(batch)
        assert hidden is not None, "a stage without the embedding needs the hidden state of the stage before"
        if isinstance(unit, Block) and self.layout.recompute_of(unit.number) == FULL:
            return recomputed(unit, hidden, batch, self.layout.tp if self.layout.shard_recompute_inputs else None)
        return unit(hidden, batch)


def initialise(stage: Stage, seed: int) -> None:
    """Set the initial values of all parameters. They depend only on the seed, the global names and global indices."""
    for parameter in stage.parameters():
        with torch.no_grad():
            initialise_parameter(parameter, spec_of(parameter), seed)
