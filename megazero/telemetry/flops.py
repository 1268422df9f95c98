"""Floating-point operations of a training step, by formula.

Counted are the matrix products, two operations per multiply and add; attention in full (no half for the causal mask),
which is how the field reports it. For the standard shape (ffn 4h, as many key-value as query heads) with B samples:

    model     72 * B*s*L*h^2 * (1 + s/(6h) + V/(12*L*h))      forward once, backward twice
    hardware  96 * B*s*L*h^2 * (1 + s/(6h) + V/(16*L*h))      full recompute: blocks four times, head three times

(Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 5.1). MFU uses the
model's operations; what is recomputed is work of the hardware only (Korthikanti et al. 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.schema import ModelConfig


@dataclass(frozen=True)
class ModelShape:
    """The sizes that count.

    layers L, hidden h, attention_width n*d of the queries, key_value_width g*d of keys (values alike), ffn f,
    ffn_matrices 2 (up, down) or 3 (with a gate), vocabulary V (real, without padding), sequence s.
    """

    layers: int
    hidden: int
    attention_width: int
    key_value_width: int
    ffn: int
    ffn_matrices: int
    vocabulary: int
    sequence: int


def standard_shape(layers: int, hidden: int, vocabulary: int, sequence: int) -> ModelShape:
    """GPT-2, GPT-3 and BLOOM: ffn 4h, as many key-value heads as query heads."""
    return ModelShape(layers, hidden, hidden, hidden, 4 * hidden, 2, vocabulary, sequence)


def shape_of(model: ModelConfig, vocabulary: int, ffn: int, query_groups: int, head_dim: int) -> ModelShape:
    """The shape of a configured model, its derived sizes given."""
    return ModelShape(
        layers=model.num_layers,
        hidden=model.hidden_size,
        attention_width=model.num_attention_heads * head_dim,
        key_value_width=query_groups * head_dim,
        ffn=ffn,
        ffn_matrices=3 if model.activation == "swiglu" else 2,
        vocabulary=vocabulary,
        sequence=model.seq_length,
    )


def attention_core_flops(shape: ModelShape) -> int:
    """Forward of one sample through one block's scores and weighted values."""
    return 4 * shape.sequence * shape.sequence * shape.attention_width


def block_flops(shape: ModelShape) -> int:
    """Forward of one sample through one block."""
    projections = 2 * shape.attention_width + 2 * shape.key_value_width
    weights = shape.hidden * (projections + shape.ffn_matrices * shape.ffn)
    return 2 * shape.sequence * weights + attention_core_flops(shape)


def head_flops(shape: ModelShape) -> int:
    """Forward of one sample through the head's product with the vocabulary."""
    return 2 * shape.sequence * shape.hidden * shape.vocabulary


def model_flops(shape: ModelShape, samples: int) -> int:
    """What the mathematics of one training step needs: forward once, backward twice."""
    return 3 * samples * (shape.layers * block_flops(shape) + head_flops(shape))


def adapter_flops(shape: ModelShape, samples: int, adapters: int) -> int:
    """The same where only low-rank adapters of so many parameters in all are trained: a frozen weight's product has a backward for its
    input alone. (Counted as if there were one before the first adapter too.)
    """
    cores = shape.layers * attention_core_flops(shape)
    weights = shape.layers * block_flops(shape) - cores + head_flops(shape)
    return samples * (2 * weights + 3 * cores + 6 * shape.sequence * adapters)


def recomputed_flops(shape: ModelShape, samples: int, recompute: str, recompute_num_layers: int = 1) -> int:
    """What one training step computes a second time, beside what its mathematics needs; both together are the hardware's operations.

    recompute: none; selective runs every attention core once more; full runs every `recompute_num_layers`-th block
    once more (the first of each such run of blocks). Raises ValueError for any other word.
    """
    again = {
        "none": 0,
        "selective": shape.layers * attention_core_flops(shape),
        "full": -(-shape.layers // recompute_num_layers) * block_flops(shape),
    }
    if recompute not in again:
        raise ValueError(f"--recompute-granularity {recompute}: choose none, selective or full")
    return samples * again[recompute]


def teraflops_per_rank(flops: float, seconds: float, ranks: int) -> float:
    """TFLOP/s of one rank."""
    return flops / (seconds * ranks) / 1e12
