"""What config.json of released models says: their numbers of parameters, and what differs between their layers.

The files are abridged: what is left out says nothing about what the model computes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.config.derive import query_groups
from megazero.config.inventory import parameters
from megazero.config.layers.kinds import layers
from megazero.config.presets import preset
from megazero.config.rotary import RotaryScaling
from megazero.config.schema import ModelConfig, Run
from megazero.convert.hf.config import family_for, new_config, problems_of, read_config
from megazero.convert.hf.families import FAMILIES
from megazero.convert.source import ConversionError

WHERE = Path("there/config.json")


def decoder(kind: str, sizes: tuple[int, int, int, int, int, int], **more: Any) -> dict[str, Any]:
    """sizes: layers, hidden, heads, key-value heads, width, vocabulary."""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    return {"model_type": kind, **dict(zip((*names, "vocab_size"), sizes, strict=True)), **more}


_LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "head_dim": None,
}
_GEMMA2 = {
    "head_dim": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "cache_implementation": "hybrid",
    "sliding_window_size": 4096,
}
_GEMMA3 = {
    "head_dim": 256,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_scaling": None,
    "max_position_embeddings": 32768,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_PHI3 = {
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "original_max_position_embeddings": 4096,
    "max_position_embeddings": 4096,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "attention_bias": False,
}
_LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.1] * 48}
_NO_ROPE = [1, 1, 1, 0] * 9
RELEASED = {
    "Llama-3.1-8B": (decoder("llama", (32, 4096, 32, 8, 14336, 128256), **_LLAMA3), 8_030_261_248),
    "Llama-3.2-1B": (
        decoder("llama", (16, 2048, 32, 8, 8192, 128256), **{**_LLAMA3, "head_dim": 64}, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "SmolLM2-135M": (
        decoder(
            "llama",
            (30, 576, 9, 3, 1536, 49152),
            tie_word_embeddings=True,
            is_llama_config=True,
            rope_interleaved=False,
            **{"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}},
        ),
        134_515_008,
    ),
    "Qwen2.5-0.5B": (
        decoder(
            "qwen2",
            (24, 896, 14, 2, 4864, 151936),
            tie_word_embeddings=True,
            use_sliding_window=False,
            sliding_window=32768,
            max_window_layers=24,
            rope_theta=1000000.0,
            use_mrope=False,
        ),
        494_032_768,
    ),
    "Qwen2.5-7B": (
        decoder("qwen2", (28, 3584, 28, 4, 18944, 152064), rope_theta=1000000.0, sliding_window=131072),
        7_615_616_512,
    ),
    "Qwen3-4B": (
        decoder("qwen3", (36, 2560, 32, 8, 9728, 151936), head_dim=128, rope_theta=1e6, tie_word_embeddings=True),
        4_022_468_096,
    ),
    "Mistral-7B-v0.1": (decoder("mistral", (32, 4096, 32, 8, 14336, 32000), sliding_window=4096), 7_241_732_096),
    "Mistral-Nemo": (
        decoder("mistral", (40, 5120, 32, 8, 14336, 131072), head_dim=128, sliding_window=None, rope_theta=1e6),
        12_247_782_400,
    ),
    "gemma-2-2b": (decoder("gemma2", (26, 2304, 8, 4, 9216, 256000), **_GEMMA2), 2_614_341_888),
    "gemma-2-9b": (decoder("gemma2", (42, 3584, 16, 8, 14336, 256000), **_GEMMA2), 9_241_705_984),
    "gemma-3-1b": (decoder("gemma3_text", (26, 1152, 4, 1, 6912, 262144), **_GEMMA3), 999_885_952),
    "OLMo-2-7B": (decoder("olmo2", (32, 4096, 32, 32, 11008, 100352), rope_theta=500000), 7_298_617_344),
    "Phi-3-mini-4k": (decoder("phi3", (32, 3072, 32, 32, 8192, 32064), **_PHI3), 3_821_079_552),
    "Phi-4-mini": (
        decoder(
            "phi3",
            (32, 3072, 24, 8, 8192, 200064),
            **{**_PHI3, "rope_scaling": _LONG, "max_position_embeddings": 131072, "sliding_window": 262144},
            partial_rotary_factor=0.75,
            tie_word_embeddings=True,
            full_attn_mod=1,
            interpolate_factor=1,
            lm_head_bias=False,
            mlp_bias=False,
        ),
        3_836_021_760,
    ),
    "SmolLM3-3B": (
        decoder(
            "smollm3",
            (36, 2048, 16, 4, 11008, 128256),
            rope_theta=5000000.0,
            no_rope_layers=_NO_ROPE,
            no_rope_layer_interval=4,
            max_window_layers=28,
            layer_types=["full_attention"] * 36,
        ),
        3_075_098_624,
    ),
    "granite-3.1-2b": (
        decoder(
            "granite",
            (40, 2048, 32, 8, 8192, 49155),
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.015625,
            logits_scaling=8.0,
            rope_theta=5000000.0,
            tie_word_embeddings=True,
        ),
        2_533_531_648,
    ),
    "pythia-1.4b": (
        {
            **decoder("gpt_neox", (24, 2048, 16, 16, 8192, 50304)),
            "rotary_pct": 0.25,
            "rotary_emb_base": 10000,
            "use_parallel_residual": True,
            "hidden_act": "gelu",
            "num_key_value_heads": None,
        },
        1_414_647_808,
    ),
}
"""name -> (config.json, the number of its parameters)"""


def model_of(name: str) -> ModelConfig:
    return read_config(RELEASED[name][0], WHERE)


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_have_their_numbers_of_parameters(name: str) -> None:
    assert parameters(model_of(name)) == RELEASED[name][1]


@pytest.mark.parametrize("name", RELEASED)
def test_a_model_is_written_as_what_it_was_read_from(name: str) -> None:
    model = model_of(name)
    family = FAMILIES[RELEASED[name][0]["model_type"]]
    assert problems_of(family, model) == []
    again = read_config(new_config(family, Run(model=model), torch.float32), WHERE)
    assert layers(again) == layers(model) and again == model


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama3-8b", "Llama-3.1-8B"),
        ("qwen3-4b", "Qwen3-4B"),
        ("gemma3-1b", "gemma-3-1b"),
        ("olmo2-7b", "OLMo-2-7B"),
        ("smollm3-3b", "SmolLM3-3B"),
        ("pythia-1.4b", "pythia-1.4b"),
    ],
)
def test_presets_have_the_layers_of_released_models(name: str, shape: str) -> None:
    settings = {field: value for field, value in preset(name).items() if field in ModelConfig.__dataclass_fields__}
    of_preset, of_file = layers(ModelConfig(**settings)), layers(model_of(shape))
    epsilon = of_file[0].norms.epsilon  # recipes have their own
    assert [replace(layer, norms=replace(layer.norms, epsilon=epsilon)) for layer in of_preset] == list(of_file)


def test_a_null_is_not_an_absent_key() -> None:
    """transformers computes Gemma 2 without caps where they are null, and as many groups as heads."""
    gemma = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"))
    config = RELEASED["gemma-2-2b"][0]
    assert (model_of("gemma-2-2b").attention_cap, model_of("gemma-2-2b").logits_cap) == (50.0, 30.0)
    absent = read_config({key: value for key, value in config.items() if key not in gemma}, WHERE)
    assert (absent.attention_cap, absent.logits_cap) == (50.0, 30.0)
    without = read_config(config | gemma, WHERE)
    assert (without.attention_cap, without.logits_cap) == (None, None)
    assert family_for(without, "gemma2").model_type == "gemma2"
    smol = read_config(decoder("smollm3", (36, 2048, 16, 4, 11008, 128256)) | {"num_key_value_heads": None}, WHERE)
    assert query_groups(smol) == 16


def test_windows_and_positions_of_layers() -> None:
    """Which layers have a window: of Gemma 2 the first and every second, of Gemma 3 all but every sixth."""
    windows = {name: [layer.mixer.window for layer in layers(model_of(name))] for name in RELEASED}
    assert windows["gemma-2-2b"][:4] == [4096, None, 4096, None] and windows["gemma-2-2b"][-1] is None
    assert windows["gemma-3-1b"][:7] == [512] * 5 + [None, 512] and windows["gemma-3-1b"][-2:] == [512, 512]
    assert set(windows["Mistral-7B-v0.1"]) == {4096} and set(windows["Mistral-Nemo"]) == {None}
    assert set(windows["Qwen2.5-7B"]) == {None} and set(windows["Phi-3-mini-4k"]) == {2047}
    bases = [layer.mixer.rotary.base for layer in layers(model_of("gemma-3-1b")) if layer.mixer.rotary]
    assert bases[:6] == [1e4] * 5 + [1e6]
    turned = [layer.mixer.rotary is not None for layer in layers(model_of("SmolLM3-3B"))]
    assert turned == [True, True, True, False] * 9


STRANGE = [
    ("Llama-3.1-8B", {"qk_norm": True}, "qk_norm True is no key of a llama model"),
    ("Llama-3.1-8B", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor, high_freq"),
    ("Llama-3.1-8B", {"rope_scaling": {"rope_type": "mrope", "mrope_section": [2, 2]}}, "rope_type 'mrope'"),
    ("Llama-3.1-8B", {"rope_scaling": {"type": "yarn", "factor": 2, "beta": 3}}, "yarn has no key 'beta'"),
    ("Qwen3-4B", {"layer_types": ["full_attention"]}, "no list of a word for each of 36 layers"),
    ("Qwen3-4B", {"layer_types": ["linear_attention"] * 36}, "layer_types linear_attention"),
    ("Mistral-7B-v0.1", {"sliding_window": -1}, "sliding_window -1 is not a whole number above 0"),
    ("gemma-2-2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    (
        "gemma-3-1b",
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping 50.0: transformers computes Gemma 3 without",
    ),
    ("gemma-2-2b", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar"),
    ("SmolLM3-3B", {"no_rope_layers": [1, 0]}, "no_rope_layers [1, 0] is no list"),
    ("OLMo-2-7B", {"sliding_window": 64}, "sliding_window 64: attention looks at the whole context"),
    ("Phi-3-mini-4k", {"resid_pdrop": 0.1}, "resid_pdrop 0.1"),
    ("Phi-4-mini", {"full_attn_mod": 2}, "full_attn_mod 2: a key of the code beside the weights"),
    (
        "Phi-4-mini",
        {"original_max_position_embeddings": 262144},
        "computes: rope_parameters: original_max_position_embeddings 262144 is no number from 1 to "
        "max_position_embeddings, which is 131072: longrope lengthens the context of a first training",
    ),
    ("Phi-4-mini", {"original_max_position_embeddings": "4K"}, "original_max_position_embeddings '4K' is no number"),
    ("Phi-4-mini", {"original_max_position_embeddings": 0}, "original_max_position_embeddings 0 is no number"),
    ("granite-3.1-2b", {"num_attention_heads": 24}, "--num-attention-heads 24 does not divide --hidden-size 2048"),
    ("granite-3.1-2b", {"logits_scaling": 0.0}, "logits_scaling"),
    ("pythia-1.4b", {"use_parallel_residual": "yes"}, "use_parallel_residual: 'yes' is neither true nor false"),
]


@pytest.mark.parametrize(("name", "more", "words"), STRANGE)
def test_what_is_not_computed_names_its_key(name: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConversionError) as error:
        read_config(RELEASED[name][0] | more, WHERE)
    assert words in str(error.value)


LOST: dict[str, Any] = {
    "attention_cap": 20.0,
    "logits_cap": 20.0,
    "residual_multiplier": 0.5,
    "rotary_interleaved": True,
    "query_key_norm": "l2",
    "norm_plus_one": True,
    "parallel_block": "one-norm",
}


@pytest.mark.parametrize("field", LOST)
def test_no_family_loses_what_it_has_no_key_for(field: str) -> None:
    """Not even llama, which has the rest of this model."""
    model = replace(model_of("Llama-3.1-8B"), **{field: LOST[field]})
    assert problems_of(FAMILIES["llama"], model)
    if field not in ("residual_multiplier",):
        with pytest.raises(ConversionError):
            family_for(model)


PHI3_CANNOT = [
    (
        {"rotary_scaling": RotaryScaling("linear", (("factor", 2.0),))},
        "--rotary-scaling is linear, not none or longrope",
    ),
    ({"kv_channels": 64}, "--kv-channels beside --rotary-scaling is 64"),
]


@pytest.mark.parametrize(("fields", "words"), PHI3_CANNOT)
def test_phi3_is_not_written_as_transformers_refuses_the_folder(fields: dict[str, Any], words: str) -> None:
    """Its configuration there checks the kind of scaling, and counts the divisors of longrope."""
    model = replace(model_of("Phi-4-mini"), **fields)
    assert any(words in problem for problem in problems_of(FAMILIES["phi3"], model))
