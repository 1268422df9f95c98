"""The list of a model's parameters beside the modules that hold them, on one rank and on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megazero.config.inventory import linears, products, shapes, tp_axis
from megazero.config.layers.kinds import layers
from megazero.config.schema import ModelConfig
from megazero.model.layout import ModelLayout
from megazero.model.stage import Stage, whole_model
from megazero.mpu.grid import Group
from megazero.mpu.parameter import spec_of

SIZE: dict[str, Any] = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 12, "seq_length": 8}
SIZE |= {"vocab_size": 1003}
MODELS = {
    "bloom": ModelConfig(**SIZE, position_embedding="alibi", embedding_layernorm=True),
    "gpt2": ModelConfig(**SIZE, position_embedding="learned", position_offset=2, max_position_embeddings=31),
    "llama": ModelConfig(
        **SIZE,
        position_embedding="rotary",
        norm="rmsnorm",
        activation="swiglu",
        num_query_groups=4,
        kv_channels=6,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        embedding_layernorm=False,
    ),
    "biases apart": ModelConfig(**SIZE, activation="swiglu", attention_bias=True, mlp_bias=False, num_query_groups=4),
}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_modules_hold_what_is_listed(name: str, tp: int) -> None:
    """Names in their order, global shapes, and what tp divides, by the places that the modules were built with."""
    model = MODELS[name]
    stage = Stage(
        ModelLayout(model, Group(tuple(range(tp)), tp - 1, None), torch.float32, device=torch.device("meta")),
        whole_model(model),
    )
    specs = [spec_of(parameter) for parameter in stage.parameters()]
    listed = dict(shapes(model))
    assert {spec.name: spec.shape for spec in specs} == listed and len(specs) == len(listed)
    for spec in specs:
        axis = tp_axis(spec.name)
        assert spec.tp_sharded == (tp > 1 and axis is not None), spec.name
        lengths = [stop - start for start, stop in spec.box]
        assert [length < whole for length, whole in zip(lengths, spec.shape, strict=True)] == [
            tp > 1 and number == axis for number in range(len(lengths))
        ], spec.name


@pytest.mark.parametrize("name", MODELS)
def test_linear_layers_have_their_weights_on_a_rank(name: str) -> None:
    model = MODELS[name]
    stage = Stage(
        ModelLayout(model, Group((0, 1), 1, None), torch.float32, device=torch.device("meta")), whole_model(model)
    )
    held = {key: tuple(value.shape) for key, value in stage.blocks["1"].named_parameters()}
    found = linears(layers(model)[0])
    assert [layer.name for layer in found] == [
        key.removesuffix(".weight") for key in held if key.endswith("weight") and "norm" not in key
    ]
    for layer in found:
        assert layer.on_rank(2) == held[f"{layer.name}.weight"] and layer.bias == (f"{layer.name}.bias" in held)


def test_names_that_are_none_of_a_model_are_divided_by_nobody() -> None:
    names = "blocks.3.attention.qkv blocks.3.mlp.other.weight mlp.up.weight head.norm.weight embedding.position.weight"
    assert {tp_axis(name) for name in names.split()} == {None}
    assert [tp_axis(f"blocks.10.{name}") for name in ("mlp.up.bias", "mlp.down.weight")] == [0, 1]
    assert tp_axis("blocks.10.mlp.down.bias") is None
    assert tp_axis("blocks.10.attention.qkv.lora_a") is None, "adapters are not in the list"


@pytest.mark.parametrize(("activation", "entrance"), [("gelu", ("mlp.up", 48, 24)), ("swiglu", ("mlp.gate", 96, 24))])
def test_a_block_has_four_products(activation: str, entrance: tuple[str, int, int]) -> None:
    """On one of two tp ranks: 12 queries and 4 pairs of width 2 are 40 rows, 20 of them here; gate and up are one."""
    model = ModelConfig(**SIZE, activation=activation, num_query_groups=4, ffn_hidden_size=96)
    found = [(product.name, product.n, product.k) for product in products(layers(model)[0], 2)]
    assert found == [("attention.qkv", 20, 24), ("attention.output", 24, 12), entrance, ("mlp.down", 24, 48)]
