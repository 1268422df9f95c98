"""Floating-point operations of a training step, by formula.

The formulae count matrix products, with two operations for each multiplication and addition. Attention counts in full
(the causal mask does not halve it), as is usual in this field; with a window of W keys a query counts W of them. For
the standard shape (ffn 4h, as many key-value heads as query heads) with B samples of s tokens, L blocks, hidden size h
and vocabulary V:

    model     72 * B*s*L*h^2 * (1 + s/(6h) + V/(12*L*h))      forward once, backward twice
    hardware  96 * B*s*L*h^2 * (1 + s/(6h) + V/(16*L*h))      full recompute: blocks four times, head three times

(Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 5.1). MFU uses the
model's operations; recomputation counts in the hardware's operations only (Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from megazero.config.derive import FULL, NONE, SELECTIVE, RecomputeTable
from megazero.config.inventory import WORDS, adapted, elements, embedding_shapes, linears
from megazero.config.layers.kinds import Layer, kinds, layers
from megazero.config.schema import ModelConfig, Run


def attention_core_flops(layer: Layer, length: int) -> int:
    """Operations of attention scores and weighted values: forward, one sample of `length` tokens, one block."""
    mixer = layer.mixer
    return 4 * length * mixer.keys(length) * mixer.heads * mixer.size


def block_flops(layer: Layer, length: int) -> int:
    """Operations of one block: forward, one sample of `length` tokens."""
    weights = sum(linear.outputs * linear.inputs for linear in linears(layer))
    return 2 * length * weights + attention_core_flops(layer, length)


def _of_all_blocks(model: ModelConfig, of_block: Callable[[Layer, int], int]) -> int:
    """The sum over all blocks of operations of one block."""
    return sum(number * of_block(layer, model.seq_length) for layer, number in kinds(model).items())


def head_flops(model: ModelConfig) -> int:
    """Operations of the head's product with the vocabulary, without padding: forward, one sample."""
    return 2 * model.seq_length * elements({WORDS: embedding_shapes(model)[WORDS]})


def model_flops(model: ModelConfig, samples: int) -> int:
    """The model's operations of one training step: three times those of forward, since backward takes two."""
    return 3 * samples * (_of_all_blocks(model, block_flops) + head_flops(model))


def adapter_flops(model: ModelConfig, samples: int, adapters: int) -> int:
    """The model's operations of one training step of low-rank adapters, which have `adapters` parameters in all.

    A frozen weight needs only the gradient of its input, so backward takes one product instead of two. Layers before
    the first adapter need no gradient, but are counted like the others.
    """
    cores = _of_all_blocks(model, attention_core_flops)
    weights = _of_all_blocks(model, block_flops) - cores + head_flops(model)
    return samples * (2 * weights + 3 * cores + 6 * model.seq_length * adapters)


def recomputed_flops(model: ModelConfig, samples: int, table: RecomputeTable) -> int:
    """The operations that recompute adds to one training step. With the model's they are the hardware's operations.

    table: what is computed again of every block: nothing, the attention core, or the block
    (`plan.recompute.recompute_table`).
    """
    return samples * sum(again_flops(model, table))


def again_flops(model: ModelConfig, table: RecomputeTable) -> list[int]:
    """By block the operations of what is computed again of it, for one sample. table: as above."""
    of_blocks = zip(table, layers(model), strict=True)
    return [_AGAIN[again](layer, model.seq_length) for again, layer in of_blocks]


_AGAIN: Mapping[str, Callable[[Layer, int], int]] = MappingProxyType(
    {NONE: lambda layer, length: 0, SELECTIVE: attention_core_flops, FULL: block_flops}
)


def trained_parameters(run: Run) -> int:
    """The number of the adapters' parameters in the whole model: A [r, inputs] and B [outputs, r] of each layer."""
    targets, rank = adapted(run.lora, run.model), run.lora.lora_rank or 0
    return sum(
        number * rank * (linear.inputs + linear.outputs)
        for layer, number in kinds(run.model).items()
        for linear in linears(layer)
        if linear.name.rpartition(".")[2] in targets
    )


def step_flops(run: Run) -> int:
    """The model's operations of a training step of this run, for one sample."""
    return (
        model_flops(run.model, 1)
        if run.lora.lora_rank is None
        else adapter_flops(run.model, 1, trained_parameters(run))
    )
