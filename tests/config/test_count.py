"""Parameter counts are the places of a built model."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from megazero.config.inventory import parameters, parameters_per_layer
from megazero.config.parse import parse_run
from megazero.config.schema import ModelConfig
from megazero.model.layout import ModelLayout
from megazero.model.stage import Stage, whole_model
from megazero.mpu.grid import single_rank_group
from megazero.mpu.parameter import spec_of


def test_fewer_pairs_of_keys_and_values() -> None:
    """Mistral 7B as published; models of one pair for each query are in test_presets.py."""
    words = ["--preset", "llama-7b", "--num-query-groups", "8", "--ffn-hidden-size", "14336"]
    assert parameters(parse_run(words, None).model) == 7_241_732_096


def built(model: ModelConfig) -> Stage:
    """The model without values."""
    layout = ModelLayout(model, single_rank_group(), torch.float32, device=torch.device("meta"))
    return Stage(layout, whole_model(model))


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
        stage = built(model)
        shapes = {name: tuple(parameter.shape) for name, parameter in stage.named_parameters()}
        assert shapes["embedding.position.weight"] == (9, 24)
        assert shapes["blocks.0.attention.qkv.weight"] == (120, 24)
        assert shapes["blocks.0.attention.output.weight"] == (24, 60)
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
        stage = built(model)
        counts = parameters_per_layer(model)
        units = [{spec_of(p).name: spec_of(p).stored_numel for p in unit.parameters()} for unit in stage.units()]
        shared = 0 if model.untie_embeddings_and_output_weights else counts.output
        assert [sum(unit.values()) for unit in units] == [
            counts.embedding,
            *counts.blocks,
            counts.head + shared,
        ]
        assert parameters(model) == sum(spec_of(p).stored_numel for p in stage.parameters())
