"""Floating-point operations of a training step, by formula.

The formulae count matrix products, with two operations for each multiplication and addition. Attention counts in full
(the causal mask does not halve it), as is usual in this field. For the standard shape (ffn 4h, as many key-value heads
as query heads) with B samples of s tokens, L blocks, hidden size h and vocabulary V:

    model     72 * B*s*L*h^2 * (1 + s/(6h) + V/(12*L*h))      forward once, backward twice
    hardware  96 * B*s*L*h^2 * (1 + s/(6h) + V/(16*L*h))      full recompute: blocks four times, head three times

(Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 5.1). MFU uses the
model's operations; recomputation counts in the hardware's operations only (Korthikanti et al. 2022).
"""

from __future__ import annotations

from megazero.config.derive import FULL, NONE, SELECTIVE, RecomputeTable, head_dim
from megazero.config.inventory import WORDS, adapted, elements, embedding_shapes, linears
from megazero.config.schema import ModelConfig, Run


def attention_core_flops(model: ModelConfig) -> int:
    """Operations of attention scores and weighted values: forward, one sample, one block."""
    return 4 * model.seq_length * model.seq_length * model.num_attention_heads * head_dim(model)


def block_flops(model: ModelConfig) -> int:
    """Operations of one block: forward, one sample."""
    return 2 * model.seq_length * sum(
        linear.outputs * linear.inputs for linear in linears(model)
    ) + attention_core_flops(model)


def head_flops(model: ModelConfig) -> int:
    """Operations of the head's product with the vocabulary, without padding: forward, one sample."""
    return 2 * model.seq_length * elements({WORDS: embedding_shapes(model)[WORDS]})


def model_flops(model: ModelConfig, samples: int) -> int:
    """The model's operations of one training step: three times those of forward, since backward takes two."""
    return 3 * samples * (model.num_layers * block_flops(model) + head_flops(model))


def adapter_flops(model: ModelConfig, samples: int, adapters: int) -> int:
    """The model's operations of one training step of low-rank adapters, which have `adapters` parameters in all.

    A frozen weight needs only the gradient of its input, so backward takes one product instead of two. Layers before
    the first adapter need no gradient, but are counted like the others.
    """
    cores = model.num_layers * attention_core_flops(model)
    weights = model.num_layers * block_flops(model) - cores + head_flops(model)
    return samples * (2 * weights + 3 * cores + 6 * model.seq_length * adapters)


def recomputed_flops(model: ModelConfig, samples: int, table: RecomputeTable) -> int:
    """The operations that recompute adds to one training step. With the model's they are the hardware's operations.

    table: what is computed again of every block: nothing, the attention core, or the block
    (`plan.recompute.recompute_table`).
    """
    again = {NONE: 0, SELECTIVE: attention_core_flops(model), FULL: block_flops(model)}
    return samples * sum(again[kind] for kind in table)


def trained_parameters(run: Run) -> int:
    """The number of the adapters' parameters in the whole model: A [r, inputs] and B [outputs, r] of each layer."""
    layers, rank = adapted(run.lora, run.model), run.lora.lora_rank or 0
    of_block = sum(
        rank * (linear.inputs + linear.outputs)
        for linear in linears(run.model)
        if linear.name.rpartition(".")[2] in layers
    )
    return run.model.num_layers * of_block


def step_flops(run: Run) -> int:
    """The model's operations of a training step of this run, for one sample."""
    return (
        model_flops(run.model, 1)
        if run.lora.lora_rank is None
        else adapter_flops(run.model, 1, trained_parameters(run))
    )
