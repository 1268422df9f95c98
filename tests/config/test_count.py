"""Parameter counts: published sizes, and formula = places of a built model."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from megazero.config.count import parameters, parameters_per_layer
from megazero.config.schema import ModelConfig
from megazero.model.layout import ModelLayout
from megazero.model.stage import Stage, whole_model
from megazero.mpu.grid import single_rank_group
from megazero.mpu.parameter import spec_of

BLOOM_SIZES = {
    "560m": (24, 1024, 16, 559_214_592),
    "1b1": (24, 1536, 16, 1_065_314_304),
    "1b7": (24, 2048, 16, 1_722_408_960),
    "3b": (30, 2560, 32, 3_002_557_440),
    "7b1": (30, 4096, 32, 7_069_016_064),
    "176b": (70, 14336, 112, 176_247_271_424),
}


@pytest.mark.parametrize("size", BLOOM_SIZES)
def test_bloom(size: str) -> None:
    layers, hidden, heads, published = BLOOM_SIZES[size]
    model = ModelConfig(layers, hidden, heads, vocab_size=250880, seq_length=2048, embedding_layernorm=True)
    assert parameters(model) == layers * (12 * hidden**2 + 13 * hidden) + 250880 * hidden + 4 * hidden == published


def test_gpt2_and_llama() -> None:
    gpt2 = ModelConfig(12, 768, 12, vocab_size=50257, seq_length=1024, position_embedding="learned")
    assert parameters(gpt2) == 124_439_808
    llama = ModelConfig(
        32,
        4096,
        32,
        ffn_hidden_size=11008,
        vocab_size=32000,
        position_embedding="rotary",
        norm="rmsnorm",
        activation="swiglu",
        untie_embeddings_and_output_weights=True,
        disable_bias_linear=True,
    )
    assert parameters(llama) == 6_738_415_616
    mistral = replace(llama, num_query_groups=8, ffn_hidden_size=14336)
    assert parameters(mistral) == 7_241_732_096


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_heads_of_their_own_width_offset_positions_and_biases_apart(activation: str) -> None:
    base = ModelConfig(
        2, 24, 6, vocab_size=101, seq_length=7, position_embedding="learned", activation=activation, position_offset=2
    )
    plain, biases = parameters(replace(base, position_offset=0)), {}
    assert parameters(base) == plain + 2 * 24
    for attention, mlp, off in product((None, True, False), (None, True, False), (True, False)):
        model = replace(
            base, num_query_groups=3, kv_channels=10, attention_bias=attention, mlp_bias=mlp, disable_bias_linear=off
        )
        stage = Stage(
            ModelLayout(model, single_rank_group(), torch.float32, device=torch.device("meta")), whole_model(model)
        )
        shapes = {name: tuple(parameter.shape) for name, parameter in stage.named_parameters()}
        assert shapes["embedding.position.weight"] == (9, 24)
        assert shapes["blocks.0.attention.qkv.weight"] == (120, 24) and shapes["blocks.0.attention.output.weight"] == (
            24,
            60,
        )
        has = ("blocks.0.attention.qkv.bias" in shapes, "blocks.0.mlp.down.bias" in shapes)
        assert has == (not off if attention is None else attention, not off if mlp is None else mlp)
        assert parameters(model) == sum(spec_of(p).stored_numel for p in stage.parameters())
        biases[has] = parameters(model)
    assert len(set(biases.values())) == 4


FLAGS = ("embedding_layernorm", "untie_embeddings_and_output_weights", "disable_bias_linear")


@pytest.mark.few(cases=4)
@pytest.mark.parametrize("position", ["learned", "alibi", "rotary", "none"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_counts_are_those_of_a_built_model(position: str, norm: str, activation: str) -> None:
    base = ModelConfig(
        2, 24, 6, vocab_size=101, seq_length=7, position_embedding=position, norm=norm, activation=activation
    )
    for values, groups, width in product(product((False, True), repeat=3), (None, 2), (None, 30)):
        flags: dict[str, Any] = dict(zip(FLAGS, values, strict=True))
        model = replace(base, num_query_groups=groups, ffn_hidden_size=width, **flags)
        stage = Stage(
            ModelLayout(model, single_rank_group(), torch.float32, device=torch.device("meta")), whole_model(model)
        )
        counts = parameters_per_layer(model)
        built = [
            sum({spec_of(p).name: spec_of(p).stored_numel for p in unit.parameters()}.values())
            for unit in stage.units()
        ]
        shared = 0 if model.untie_embeddings_and_output_weights else counts.output
        assert built == [counts.embedding, counts.block, counts.block, counts.head + shared]
        assert counts.total == sum(spec_of(p).stored_numel for p in stage.parameters())
