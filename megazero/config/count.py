"""How many parameters the layers of a model have: stored sizes, without vocabulary padding."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.inventory import WORDS, block_shapes, elements, embedding_shapes, head_shapes
from megazero.config.schema import ModelConfig


@dataclass(frozen=True)
class LayerCounts:
    """Parameters of the layers of a model.

    embedding    word embedding, learned positions, embedding normalisation
    block        one transformer block
    head         final normalisation, and the output weight where it is untied
    output       the output weight, tied or not: what a last stage holds on top of a tied `head` when it is not the
    first
    num_layers   blocks
    """

    embedding: int
    block: int
    head: int
    output: int
    num_layers: int

    @property
    def total(self) -> int:
        """Parameters of the model; a tied embedding counts once."""
        return self.embedding + self.num_layers * self.block + self.head


def parameters_per_layer(model: ModelConfig) -> LayerCounts:
    """The counts of a model whose vocabulary is known. BLOOM: L (12 h^2 + 13 h) + V h + 4 h in all."""
    return LayerCounts(
        embedding=elements(embedding_shapes(model)),
        block=elements(block_shapes(model)),
        head=elements(head_shapes(model)),
        output=elements({WORDS: embedding_shapes(model)[WORDS]}),
        num_layers=model.num_layers,
    )


def parameters(model: ModelConfig) -> int:
    """Parameters of the whole model."""
    return parameters_per_layer(model).total
