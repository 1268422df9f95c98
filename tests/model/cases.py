"""Small models of every shape. Their weights and batches cannot hide a fault: no zero biases, unequal masks, several
documents.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megazero.config.schema import ModelConfig
from megazero.convert.stages import copy_box
from megazero.data.loader import within_documents
from megazero.model.batch import MicroBatch
from megazero.model.layout import ModelLayout
from megazero.model.stage import Stage, initialise, whole_model
from megazero.mpu.grid import Group, single_rank_group
from megazero.mpu.parameter import spec_of
from tests.parameters import assemble, values_of

LENGTH = 12
_BASE = ModelConfig(
    num_layers=3,
    hidden_size=48,
    num_attention_heads=12,
    vocab_size=1003,
    make_vocab_size_divisible_by=8,
    seq_length=LENGTH,
    hidden_dropout=0.1,
    init_method_std=0.2,
)
BLOOM = replace(_BASE, position_embedding="alibi", embedding_layernorm=True, attention_dropout=0.1)
BLOOM_DOCUMENTS = replace(BLOOM, document_mask=True, attention_dropout=0.0, hidden_dropout=0.0)
GPT = replace(_BASE, position_embedding="learned", attention_dropout=0.1, activation="gelu", position_offset=2)
LLAMA = replace(
    _BASE,
    position_embedding="rotary",
    norm="rmsnorm",
    activation="swiglu",
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    num_attention_heads=24,
    num_query_groups=12,
    ffn_hidden_size=36,
)
SWIGLU_BIASES = replace(LLAMA, disable_bias_linear=False, attention_dropout=0.1, document_mask=True, kv_channels=6)
PLAIN = replace(
    _BASE,
    position_embedding="none",
    activation="relu",
    norm="rmsnorm",
    untie_embeddings_and_output_weights=True,
    attention_bias=False,
)
GPT_DOCUMENTS = replace(GPT, document_mask=True, attention_dropout=0.0)
MODELS = {"bloom": BLOOM, "documents": BLOOM_DOCUMENTS, "gpt": GPT, "llama": LLAMA, "gpt documents": GPT_DOCUMENTS}
MODELS |= {"swiglu": SWIGLU_BIASES, "plain": PLAIN}


def stage_of(model: ModelConfig, tp: Group | None = None, **arguments: Any) -> Stage:
    """The whole model in float64."""
    return Stage(ModelLayout(model, tp or single_rank_group(), torch.float64, **arguments), whole_model(model))


def weights_of(model: ModelConfig, seed: int = 7) -> dict[str, Tensor]:
    """Global tensors: the model's start plus noise everywhere."""
    stage = stage_of(model)
    initialise(stage, seed)
    generator = torch.Generator().manual_seed(seed)
    whole = assemble([values_of(stage)])
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        for name, tensor in whole.items()
    }


def load(stages: Stage | Iterable[Stage], weights: dict[str, Tensor]) -> None:
    """Fill stages with their boxes of the global tensors."""
    with torch.no_grad():
        for stage in [stages] if isinstance(stages, Stage) else stages:
            for parameter in stage.parameters():
                spec = spec_of(parameter)
                copy_box(parameter, spec, weights[spec.name])


def batch_of(
    model: ModelConfig, samples: int = 2, length: int = LENGTH, first: int = 40, masked: bool = True
) -> MicroBatch:
    """Samples number `first`, ... with several predictions masked out, and documents where the model has them; learned
    positions are then those of a token in its document.
    """
    generator = torch.Generator().manual_seed(first)
    assert model.vocab_size is not None
    ids = torch.randint(0, model.vocab_size, (samples, length + 1), generator=generator)
    mask = torch.rand(samples, length, generator=generator) < 0.7 if masked else None
    documents = (
        (torch.rand(samples, length, generator=generator) < 0.3).long().cumsum(1) if model.document_mask else None
    )
    positions = None
    if documents is not None and model.position_embedding == "learned":
        positions = torch.from_numpy(within_documents(documents.numpy()))
    return MicroBatch(ids[:, :-1], ids[:, 1:], mask, torch.arange(first, first + samples), documents, positions)
