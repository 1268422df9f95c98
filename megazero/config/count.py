"""Numbers of parameters of a model's layers as they are stored, without vocabulary padding."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.inventory import WORDS, block_shapes, elements, embedding_shapes, head_shapes
from megazero.config.schema import ModelConfig


@dataclass(frozen=True)
class LayerCounts:
    """Numbers of parameters of the layers of a model.

    embedding    word embedding, learned positions, embedding normalisation
    block        one transformer block
    head         final normalisation, and the output weight if it is untied
    output       the output weight, tied or not. With a tied one, a last stage that is not the first holds it too
    num_layers   number of blocks
    """

    embedding: int
    block: int
    head: int
    output: int
    num_layers: int

    @property
    def total(self) -> int:
        """Parameters of the whole model. A tied embedding counts once."""
        return self.embedding + self.num_layers * self.block + self.head


def parameters_per_layer(model: ModelConfig) -> LayerCounts:
    """The counts of a model whose vocabulary is known. BLOOM's total is L (12 h^2 + 13 h) + V h + 4 h."""
    return LayerCounts(
        embedding=elements(embedding_shapes(model)),
        block=elements(block_shapes(model)),
        head=elements(head_shapes(model)),
        output=elements({WORDS: embedding_shapes(model)[WORDS]}),
        num_layers=model.num_layers,
    )


def parameters(model: ModelConfig) -> int:
    """Parameters of the whole model. A tied embedding counts once."""
    return parameters_per_layer(model).total
