"""config.json: what each family's keys mean, what is refused and how, and the file that a model of
megazero's own gets.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.config.presets import preset
from megazero.config.schema import DataConfig, ModelConfig, OptimizerConfig, Run
from megazero.convert.hf.config import end_of_text, family_for, kept_config, new_config, read_config, run_of
from megazero.convert.hf.families import FAMILIES
from megazero.convert.source import ConversionError

WHERE = Path("there/config.json")
BLOOM: dict[str, Any] = {"model_type": "bloom", "hidden_size": 48, "n_layer": 2, "n_head": 6, "vocab_size": 90}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 6, "vocab_size": 90}
_NAMED = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 90}
LLAMA: dict[str, Any] = {"model_type": "llama"} | _NAMED
OPT: dict[str, Any] = {"model_type": "opt", "ffn_dim": 60} | _NAMED


def model_of(config: dict[str, Any], **more: Any) -> ModelConfig:
    return read_config(config | more, WHERE)


READ = [
    # config.json, more of it, fields of ours
    (BLOOM, {}, {"num_attention_heads": 6, "seq_length": 2048, "embedding_layernorm": True}),
    (BLOOM, {}, {"norm_epsilon": 1e-5, "hidden_dropout": 0.0}),
    (BLOOM, {"n_embed": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "n_inner": None}, {"seq_length": 2048}),
    (BLOOM, {"seq_length": 512}, {"seq_length": 512}),
    (BLOOM, {"slow_but_exact": False, "pretraining_tp": 4}, {"seq_length": 2048}),
    (BLOOM, {"tie_word_embeddings": False}, {"untie_embeddings_and_output_weights": True}),
    (BLOOM, {"attention_dropout": 0.1, "layer_norm_epsilon": 1e-6}, {"attention_dropout": 0.1, "norm_epsilon": 1e-6}),
    (GPT2, {}, {"activation": "gelu-tanh", "max_position_embeddings": 1024, "hidden_dropout": 0.1}),
    (GPT2, {"n_inner": 100}, {"ffn_hidden_size": 100}),
    (GPT2, {"n_inner": None, "n_positions": 32, "n_ctx": 64}, {"seq_length": 32, "max_position_embeddings": 32}),
    (GPT2, {}, {"ffn_hidden_size": None}),
    (GPT2, {"activation_function": "gelu"}, {"activation": "gelu"}),
    (GPT2, {"activation_function": "gelu_pytorch_tanh"}, {"activation": "gelu-tanh"}),
    (GPT2, {"resid_pdrop": 0, "attn_pdrop": 0.2}, {"hidden_dropout": 0}),
    (GPT2, {"reorder_and_upcast_attn": True}, {"untie_embeddings_and_output_weights": False}),
    (GPT2, {"tie_word_embeddings": False}, {"untie_embeddings_and_output_weights": True}),
    (LLAMA, {}, {"norm_epsilon": 1e-6, "ffn_hidden_size": 11008, "rotary_base": 1e4}),
    (LLAMA, {}, {"disable_bias_linear": True, "kv_channels": None}),
    (LLAMA, {"rope_theta": 5e5, "rope_scaling": None, "head_dim": None}, {"rotary_base": 5e5}),
    (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 500}}, {"rotary_base": 500.0}),
    (LLAMA, {"rope_parameters": {"rope_theta": 66.0, "partial_rotary_factor": None}}, {"rotary_base": 66.0}),
    (LLAMA, {"rope_scaling": {"type": "default"}, "rope_theta": 77.0}, {"rotary_base": 77.0}),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 1.0}}, {"rotary_base": 1e4}),
    (LLAMA, {"head_dim": 8, "num_key_value_heads": 2}, {"kv_channels": None, "num_query_groups": 2}),
    (LLAMA, {"head_dim": 10, "hidden_act": "swish"}, {"kv_channels": 10, "activation": "swiglu"}),
    (LLAMA, {"attention_bias": True}, {"attention_bias": True, "mlp_bias": False}),
    (LLAMA, {"attention_bias": True, "mlp_bias": True}, {"disable_bias_linear": False, "mlp_bias": None}),
    (LLAMA, {"attention_bias": True, "mlp_bias": True}, {"attention_bias": None}),
    (LLAMA, {"tie_word_embeddings": True}, {"untie_embeddings_and_output_weights": False}),
    (OPT, {}, {"activation": "relu", "position_offset": 2, "max_position_embeddings": 2048}),
    (OPT, {}, {"hidden_dropout": 0.1, "ffn_hidden_size": 60}),
    (OPT, {"enable_bias": False, "activation_function": "gelu"}, {"disable_bias_linear": True, "activation": "gelu"}),
    (OPT, {"word_embed_proj_dim": 48, "init_std": 0.01}, {"init_method_std": 0.01}),
]


@pytest.mark.parametrize(("config", "more", "fields"), READ)
def test_read(config: dict[str, Any], more: dict[str, Any], fields: dict[str, Any]) -> None:
    model = model_of(config, **more)
    assert {name: getattr(model, name) for name in fields} == fields


DEFAULT, OWN_THETA = {"rope_type": "default", "rope_theta": 5.0}, {"rope_theta": 1e4}
SCALED = {"rope_scaling": {"type": "linear", "factor": 4.0}}
REFUSED = [
    ({"model_type": "mamba"}, {}, "model_type 'mamba'; megazero reads bloom, gpt2, llama, opt, qwen2"),
    ({}, {}, "model_type None"),
    (BLOOM, {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm True"),
    (BLOOM, {"n_embed": 64}, "hidden_size 48 and n_embed 64 are two names of one number"),
    (BLOOM, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    (BLOOM, {"n_head": 7}, "--num-attention-heads 7 does not divide --hidden-size 48"),
    (BLOOM, {"n_layer": "2x"}, "n_layer: '2x' is not a whole number"),
    (BLOOM, {"hidden_size": 0}, "hidden_size 0 must be at least 1"),
    (BLOOM, {"slow_but_exact": True, "pretraining_tp": 4}, "slow_but_exact with pretraining_tp 4"),
    (GPT2, {"is_causal": False}, "is_causal False"),
    (GPT2, {"scale_attn_weights": False}, "scale_attn_weights False"),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    (GPT2, {"add_cross_attention": True}, "add_cross_attention True"),
    (GPT2, {"activation_function": "silu"}, "activation_function: 'silu': megazero computes gelu_new"),
    (GPT2, {"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "auto_map"),
    (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 needs low_freq_factor"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0.0}}, "linear: factor=0 is not a number above 0"),
    (LLAMA, {"rope_parameters": {"full_attention": DEFAULT}}, "rope_parameters: of several kinds of layers"),
    (LLAMA | OWN_THETA, {"rope_parameters": DEFAULT}, "rope_theta is 10000.0, rope_parameters.rope_theta 5.0"),
    (LLAMA | OWN_THETA, {"rope_scaling": DEFAULT}, "rope_theta is 10000.0, rope_scaling.rope_theta 5.0"),
    (
        LLAMA | SCALED,
        {"rope_parameters": DEFAULT},
        "scaling.rope_type is 'linear', rope_parameters.rope_type 'default'",
    ),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    (LLAMA, {"sliding_window": 4096}, "sliding_window 4096"),
    (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types 'sliding_attention'"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act: 'gelu': megazero computes silu, swish"),
    (LLAMA, {"num_key_value_heads": 4}, "--num-query-groups 4 does not divide --num-attention-heads 6"),
    (LLAMA, {"head_dim": 7}, "--kv-channels 7 must be even"),
    (OPT, {"do_layer_norm_before": False}, "do_layer_norm_before False"),
    (OPT, {"word_embed_proj_dim": 24}, "word_embed_proj_dim 24, hidden_size 48"),
    (OPT, {"_remove_final_layer_norm": True}, "_remove_final_layer_norm True"),
    (OPT, {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine False"),
]


@pytest.mark.parametrize(("config", "more", "words"), REFUSED)
def test_refused(config: dict[str, Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConversionError) as error:
        model_of(config, **more)
    assert str(WHERE) in str(error.value) and words in str(error.value)


def test_all_that_is_wrong_is_said_at_once() -> None:
    """OPT's 350m."""
    wrong = {"do_layer_norm_before": False, "word_embed_proj_dim": 24, "activation_function": "tanh"}
    with pytest.raises(ConversionError) as error:
        model_of(OPT, **wrong, hidden_size="48.5")
    words = ("do_layer_norm_before", "word_embed_proj_dim 24", "activation_function: 'tanh'", "hidden_size: '48.5'")
    assert all(word in str(error.value) for word in words)


def test_end_of_text() -> None:
    found = [
        end_of_text(LLAMA | more, FAMILIES["llama"], 90)
        for more in ({}, {"eos_token_id": [5, 6]}, {"eos_token_id": None}, {"eos_token_id": 90})
    ]
    assert found == [2, 5, None, None]
    assert end_of_text(GPT2, FAMILIES["gpt2"], 50257) == 50256


def own(**shape: Any) -> ModelConfig:
    base = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 6, "vocab_size": 90, "seq_length": 32}
    return ModelConfig(**base | shape)


LEARNED = own(position_embedding="learned", activation="gelu-tanh")
ROTARY = own(position_embedding="rotary", norm="rmsnorm", activation="swiglu", disable_bias_linear=True)
ROTARY = replace(ROTARY, untie_embeddings_and_output_weights=True)
FRESH: dict[str, Any] = {
    "bloom": own(position_embedding="alibi", embedding_layernorm=True, activation="gelu-tanh"),
    "gpt2": LEARNED,
    "llama": ROTARY,
    "opt": replace(LEARNED, activation="relu", position_offset=2),
}


@pytest.mark.parametrize("family", FRESH)
def test_a_model_of_our_own(family: str) -> None:
    """What is written is read as the same model, and the kept file of an unchanged model is the file."""
    model = FRESH[family]
    run = Run(model=model, data=DataConfig(eod_id=3), optimizer=OptimizerConfig(precision="bf16"))
    assert family_for(model).model_type == family
    config = json.loads(json.dumps(new_config(FAMILIES[family], run, torch.bfloat16)))
    expected = replace(model, max_position_embeddings=32) if model.position_embedding == "learned" else model
    assert replace(read_config(config, WHERE), ffn_hidden_size=None, num_query_groups=None) == expected
    assert run_of(config, WHERE, torch.bfloat16).data.eod_id == 3 and config["torch_dtype"] == "bfloat16"
    assert kept_config(config, WHERE, FAMILIES[family], run, torch.bfloat16) == config


@pytest.mark.parametrize("name", ["gpt2-124m", "bloom-176b", "llama-7b"])
def test_presets_are_models_of_a_family(name: str) -> None:
    fields = {key: value for key, value in preset(name).items() if key in ModelConfig.__dataclass_fields__}
    model = replace(ModelConfig(), **fields)
    assert family_for(model).model_type == name.split("-")[0]


UNEXPRESSED = [
    (
        replace(FRESH["bloom"], embedding_layernorm=False),
        "bloom: LayerNorm after the embedding (--embedding-layernorm) is False, not True",
    ),
    (replace(FRESH["bloom"], ffn_hidden_size=100), "bloom: --ffn-hidden-size / --hidden-size"),
    (replace(FRESH["bloom"], activation="relu"), "bloom: --activation is relu, not gelu-tanh"),
    (replace(LEARNED, num_query_groups=2), "gpt2: --num-query-groups is 2, not one for each query head"),
    (replace(LEARNED, kv_channels=10), "gpt2: --kv-channels is 10, not hidden size / heads"),
    (replace(LEARNED, attention_bias=False), "gpt2: biases of linear layers is in some layers, not everywhere"),
    (replace(LEARNED, position_offset=3), "opt: --position-offset is 3, not 2"),
    (replace(FRESH["opt"], norm_epsilon=1e-6), "opt: --norm-epsilon is 1e-06, not 1e-05"),
    (replace(ROTARY, norm="layernorm"), "llama: --norm is layernorm, not rmsnorm"),
    (own(position_embedding="none"), "llama: --position-embedding is none, not rotary"),
]


@pytest.mark.parametrize(("model", "words"), UNEXPRESSED)
def test_what_no_family_expresses(model: ModelConfig, words: str) -> None:
    with pytest.raises(ConversionError) as error:
        family_for(model)
    assert words in str(error.value)


def test_a_file_of_an_old_version_stays_as_it_is() -> None:
    """BigScience's own names, and a GPT-2 that names no dtype."""
    bloom: dict[str, Any] = {"model_type": "bloom", "n_embed": 48, "n_layer": 2, "num_attention_heads": 6}
    bloom |= {"n_inner": None, "vocab_size": 90, "offset_alibi": 100}
    for config in (bloom, GPT2 | {"n_ctx": 1024}):
        run = run_of(config, WHERE, torch.float32)
        assert run.model.hidden_size == 48 and run.model.num_attention_heads == 6
        assert kept_config(config, WHERE, FAMILIES[config["model_type"]], run, torch.float32) == config
        narrow = kept_config(config, WHERE, FAMILIES[config["model_type"]], run, torch.float16)
        assert narrow == config | {"torch_dtype": "float16"}


def test_kept_but_for_what_changed() -> None:
    """Keys that mean nothing here stay; a table that grew, another base and another dtype are written under the names
    that were there.
    """
    original = LLAMA | {"rope_theta": 1e4, "dtype": "float32", "max_position_embeddings": 4096}
    original |= {"eos_token_id": [5, 6], "task_specific_params": {"x": 1}}
    run = run_of(original, WHERE, torch.float32)
    assert kept_config(original, WHERE, FAMILIES["llama"], run, torch.float32) == original
    model = replace(run.model, seq_length=64, vocab_size=100, rotary_base=2e4)
    shorter = replace(run, model=model, data=DataConfig(eod_id=8))
    made = kept_config(original, WHERE, FAMILIES["llama"], shorter, torch.bfloat16)
    changed = {"vocab_size": 100, "rope_theta": 2e4, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}
    assert made == original | changed | {"dtype": "bfloat16", "eos_token_id": 8}
