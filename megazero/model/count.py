"""How many parameters a model has: stored sizes, without vocabulary padding, as formulas of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.derive import attention_bias, ffn_width, head_dim, mlp_bias, position_rows, query_groups
from megazero.config.schema import ModelConfig


@dataclass(frozen=True)
class LayerCounts:
    """Parameters of the layers of a model.

    embedding    word embedding, learned positions, embedding normalisation
    block        one transformer block
    head         final normalisation, and the output weight where it is untied
    output       the output weight, tied or not: what a last stage holds on top of a tied `head` when it is not the first
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
    assert model.vocab_size is not None, "the vocabulary is known once the tokenizer is"
    hidden, width = model.hidden_size, ffn_width(model)
    norm = hidden if model.norm == "rmsnorm" else 2 * hidden
    words = model.vocab_size * hidden
    queries = model.num_attention_heads * head_dim(model)
    qkv = queries + 2 * query_groups(model) * head_dim(model)
    attention = hidden * qkv + queries * hidden + attention_bias(model) * (qkv + hidden)
    entrances = 2 if model.activation == "swiglu" else 1
    mlp = entrances * hidden * width + width * hidden + mlp_bias(model) * (entrances * width + hidden)
    positions = position_rows(model) * hidden if model.position_embedding == "learned" else 0
    return LayerCounts(
        embedding=words + positions + (norm if model.embedding_layernorm else 0),
        block=2 * norm + attention + mlp,
        head=norm + (words if model.untie_embeddings_and_output_weights else 0),
        output=words,
        num_layers=model.num_layers,
    )


def parameters(model: ModelConfig) -> int:
    """Parameters of the whole model."""
    return parameters_per_layer(model).total
