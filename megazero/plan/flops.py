"""Floating-point operations of a training step, by formula.

Counted are the matrix products, two operations per multiply and add; attention in full (no half for the causal mask),
which is how the field reports it. For the standard shape (ffn 4h, as many key-value as query heads) with B samples:

    model     72 * B*s*L*h^2 * (1 + s/(6h) + V/(12*L*h))      forward once, backward twice
    hardware  96 * B*s*L*h^2 * (1 + s/(6h) + V/(16*L*h))      full recompute: blocks four times, head three times

(Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 5.1). MFU uses the
model's operations; what is recomputed is work of the hardware only (Korthikanti et al. 2022).
"""

from __future__ import annotations

from megazero.config.derive import head_dim
from megazero.config.inventory import WORDS, elements, embedding_shapes, linears
from megazero.config.lora import adapted
from megazero.config.schema import ModelConfig, Run


def attention_core_flops(model: ModelConfig) -> int:
    """Forward of one sample through one block's scores and weighted values."""
    return 4 * model.seq_length * model.seq_length * model.num_attention_heads * head_dim(model)


def block_flops(model: ModelConfig) -> int:
    """Forward of one sample through one block."""
    return 2 * model.seq_length * sum(linear.weights for linear in linears(model)) + attention_core_flops(model)


def head_flops(model: ModelConfig) -> int:
    """Forward of one sample through the head's product with the vocabulary, without its padding."""
    return 2 * model.seq_length * elements({WORDS: embedding_shapes(model)[WORDS]})


def model_flops(model: ModelConfig, samples: int) -> int:
    """What the mathematics of one training step needs: forward once, backward twice."""
    return 3 * samples * (model.num_layers * block_flops(model) + head_flops(model))


def adapter_flops(model: ModelConfig, samples: int, adapters: int) -> int:
    """The same where only low-rank adapters of so many parameters in all are trained: a frozen weight's product has a
    backward for its input alone. (Counted as if there were one before the first adapter too.)
    """
    cores = model.num_layers * attention_core_flops(model)
    weights = model.num_layers * block_flops(model) - cores + head_flops(model)
    return samples * (2 * weights + 3 * cores + 6 * model.seq_length * adapters)


def recomputed_flops(model: ModelConfig, samples: int, recompute: str, recompute_num_layers: int = 1) -> int:
    """What one training step computes a second time, beside what its mathematics needs; both together are the
    hardware's operations.

    recompute: none; selective runs every attention core once more; full runs every `recompute_num_layers`-th block
    once more (the first of each such run of blocks). Raises ValueError for any other word.
    """
    again = {
        "none": 0,
        "selective": model.num_layers * attention_core_flops(model),
        "full": -(-model.num_layers // recompute_num_layers) * block_flops(model),
    }
    if recompute not in again:
        raise ValueError(f"--recompute-granularity {recompute}: choose none, selective or full")
    return samples * again[recompute]


def trained_parameters(run: Run) -> int:
    """Of the adapters of the whole model: A [r, inputs] and B [outputs, r] beside each adapted layer."""
    layers, rank = adapted(run.lora, run.model), run.lora.lora_rank or 0
    of_block = sum(
        rank * (linear.inputs + linear.outputs)
        for linear in linears(run.model)
        if linear.name.rpartition(".")[2] in layers
    )
    return run.model.num_layers * of_block


def step_flops(run: Run) -> int:
    """What the mathematics of a training step of this run needs for one sample."""
    return (
        model_flops(run.model, 1)
        if run.lora.lora_rank is None
        else adapter_flops(run.model, 1, trained_parameters(run))
    )


def flops_again(run: Run) -> int:
    """What recompute adds to that."""
    return recomputed_flops(run.model, 1, run.parallel.recompute_granularity, run.parallel.recompute_num_layers)
