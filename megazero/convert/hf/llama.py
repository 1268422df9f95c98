"""LLaMA, and the families with its names for tensors: Qwen 2.5 and 3, Mistral, OLMo 2, SmolLM 3, Granite.

All have rotary positions, RMSNorm, a gated feed-forward layer and grouped queries. A family is a table of what differs.
(LLaMA: Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024, arXiv:2407.21783.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from megazero.config.derive import attention_bias, attention_scale, ffn_width, head_dim, mlp_bias, query_groups
from megazero.config.options import run_options
from megazero.config.schema import ModelConfig
from megazero.convert.hf import layer_keys as layers
from megazero.convert.hf.rope import RopeKeys, rope, two_minds
from megazero.convert.hf.rules import EMBEDDING, HEAD, Names, Rule, pair, separate
from megazero.convert.hf.shared import ANY, NO_EMBEDDING_NORM, SHARE, head_width, nominal_length
from megazero.convert.hf.shared import windows as without_windows
from megazero.convert.hf.tables import (
    Config,
    ConfigKey,
    Family,
    ModelRequirement,
    SupportedValues,
    one_of,
    opposite,
    plain,
)

GATED = {"silu": "swiglu", "swish": "swiglu"}
BEFORE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_AFTER = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
QUERY_KEY = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}


def decoder_names(norms: Mapping[str, str], attention: tuple[Rule, ...] = (), mlp: tuple[Rule, ...] = ()) -> Names:
    """The names of a family whose parts are called as LLaMA's. norms: ours -> theirs, within a block.

    attention, mlp: the rules of the projection to queries, keys and values, and of gate and up, where the family has
    them otherwise than LLaMA.
    """
    gate_up = (
        *pair("blocks.{i}.mlp.gate", "layers.{i}.mlp.gate_proj"),
        *pair("blocks.{i}.mlp.up", "layers.{i}.mlp.up_proj"),
    )
    return Names(
        "model.",
        (
            Rule(EMBEDDING, ("embed_tokens.weight",)),
            *(
                Rule(f"blocks.{{i}}.{ours}.weight", (f"layers.{{i}}.{theirs}.weight",))
                for ours, theirs in norms.items()
            ),
            *(attention or separate("layers.{i}.self_attn")),
            *pair("blocks.{i}.attention.output", "layers.{i}.self_attn.o_proj"),
            *(mlp or gate_up),
            *pair("blocks.{i}.mlp.down", "layers.{i}.mlp.down_proj"),
            Rule("head.norm.weight", ("norm.weight",)),
            Rule("head.weight", (HEAD,)),
        ),
    )


NAMES = decoder_names(BEFORE)


def _bias(field: str, key: str, value: Callable[[ModelConfig], bool]) -> ConfigKey:
    return ConfigKey((key,), False, lambda given: {field: run_options()[field].from_value(given)}, value)


ATTENTION_BIAS = _bias("attention_bias", "attention_bias", attention_bias)
MLP_BIAS = _bias("mlp_bias", "mlp_bias", mlp_bias)
OF_DECODERS: Mapping[str, Any] = {
    "position_embedding": "rotary",
    "embedding_layernorm": False,
    "norm": "rmsnorm",
    "hidden_dropout": 0.0,
}
NEEDS = (
    ModelRequirement("--position-embedding", lambda model: model.position_embedding, ("rotary",)),
    ModelRequirement("--norm", lambda model: model.norm, ("rmsnorm",)),
    NO_EMBEDDING_NORM,
)
SWIGLU = ModelRequirement("--activation", lambda model: model.activation, ("swiglu",))
IN_ALL = ("max_window_layers", "use_sliding_window", "sliding_window", "layer_types")
"""Keys that configs of several families have, whatever they say."""
UNSAID = (ModelRequirement("--hidden-dropout", lambda model: model.hidden_dropout, (0.0,)),)


def sizes(
    vocabulary: int, hidden: int, width: int, number: int, heads: int, groups: int | None, length: int, epsilon: float
) -> tuple[ConfigKey, ...]:
    """The keys of a model's sizes, with the values that transformers takes where they are absent."""
    return (
        plain("vocab_size", vocabulary, "vocab_size"),
        plain("hidden_size", hidden, "hidden_size"),
        plain("ffn_hidden_size", width, "intermediate_size", value=ffn_width),
        plain("num_layers", number, "num_hidden_layers"),
        plain("num_attention_heads", heads, "num_attention_heads"),
        plain("num_query_groups", groups, "num_key_value_heads", value=query_groups, null=True),
        nominal_length(length, "max_position_embeddings"),
        plain("norm_epsilon", epsilon, "rms_norm_eps"),
        plain("init_method_std", 0.02, "initializer_range"),
        plain("attention_dropout", 0.0, "attention_dropout"),
    )


def own_head_dim(default: int | None = None) -> ConfigKey:
    """head_dim of families that have it."""
    return plain("kv_channels", default, "head_dim", value=head_dim)


def head_dim_apart() -> ConfigKey:
    """head_dim of families whose configuration has no such key in transformers, but whose attention reads it. Older
    versions do not know the key there.
    """
    return replace(own_head_dim(), needed=lambda model: head_width(model) != SHARE)


def untied(tied: bool) -> ConfigKey:
    """tie_word_embeddings. tied: where it is absent."""
    return opposite("untie_embeddings_and_output_weights", tied, "tie_word_embeddings")


def _gate() -> ConfigKey:
    return one_of("activation", "silu", GATED, "hidden_act")


def decoder(
    model_type: str,
    architecture: str,
    keys: tuple[ConfigKey, ...],
    *,
    names: Names = NAMES,
    fixed: Mapping[str, Any] | None = None,
    eos: int = 2,
    further: Callable[[Config], Iterator[str]] = two_minds,
    windows: bool = False,
    written: Callable[[ModelConfig], dict[str, Any]] = lambda model: {},
    also: str = "",
    demands: tuple[SupportedValues, ...] = ANY,
    needs: tuple[ModelRequirement, ...] = (),
) -> Family:
    """A family of LLaMA's kind. fixed: fields beside those of all. windows: whether its layers may have windows."""
    return Family(
        model_type,
        architecture,
        names,
        {**OF_DECODERS, **(fixed or {})},
        keys,
        demands,
        (*NEEDS, SWIGLU, *needs),
        eos=eos,
        further=further if windows else lambda config: chain(without_windows(config), further(config)),
        written=written,
        unsaid=UNSAID,
        also=frozenset({*IN_ALL, *also.split()}),
    )


def _whole_heads(theta: float = 10000.0, length: int = 2048) -> RopeKeys:
    return rope(theta, length=length)


FAMILY = decoder(
    "llama",
    "LlamaForCausalLM",
    (
        *sizes(32000, 4096, 11008, 32, 32, None, 2048, 1e-6),
        *(own_head_dim(), _gate(), ATTENTION_BIAS, MLP_BIAS, _whole_heads(), untied(False)),
    ),
)

_SWITCHED_WINDOWS = layers.layer_keys(
    32,
    ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    layers.switched,
    layers.of_switch,
)

# Qwen 2 and 2.5 (arXiv:2412.15115): biases of query, key and value, which no key says
QWEN2 = decoder(
    "qwen2",
    "Qwen2ForCausalLM",
    (
        *sizes(151936, 4096, 22016, 32, 32, 32, 32768, 1e-6),
        *(head_dim_apart(), _gate(), _whole_heads(length=32768), untied(False)),
        _SWITCHED_WINDOWS,
    ),
    fixed={"attention_bias": False, "mlp_bias": False, "qkv_bias": True},
    eos=151643,
    windows=True,
)

# Qwen 3 (arXiv:2505.09388): RMSNorm of each query and key head
QWEN3 = decoder(
    "qwen3",
    "Qwen3ForCausalLM",
    (
        *sizes(151936, 4096, 22016, 32, 32, 32, 32768, 1e-6),
        *(own_head_dim(128), _gate(), ATTENTION_BIAS, _whole_heads(length=32768), untied(False)),
        _SWITCHED_WINDOWS,
    ),
    names=decoder_names({**BEFORE, **QUERY_KEY}),
    fixed={"mlp_bias": False, "query_key_norm": "head"},
    eos=151643,
    windows=True,
)

# Mistral 7B and Nemo (arXiv:2310.06825)
MISTRAL = decoder(
    "mistral",
    "MistralForCausalLM",
    (
        *sizes(32000, 4096, 14336, 32, 32, 8, 131072, 1e-6),
        *(own_head_dim(), _gate(), _whole_heads(length=131072), untied(False)),
        layers.layer_keys(32, ("sliding_window",), layers.everywhere(4096), layers.of_window_alone),
    ),
    fixed={"attention_bias": False, "mlp_bias": False},
    windows=True,
)

# OLMo 2 (arXiv:2501.00656): norms behind the parts of a block, and RMSNorm over all query heads and all key heads
OLMO2 = decoder(
    "olmo2",
    "Olmo2ForCausalLM",
    (
        *sizes(50304, 4096, 11008, 32, 32, None, 2048, 1e-5),
        *(head_dim_apart(), _gate(), ATTENTION_BIAS, _whole_heads(), untied(False)),
    ),
    names=decoder_names({**_AFTER, **QUERY_KEY}),
    fixed={"mlp_bias": False, "norm_placement": "after", "query_key_norm": "all"},
    eos=50279,
)

# SmolLM 3: every fourth layer has no positions
SMOLLM3 = decoder(
    "smollm3",
    "SmolLM3ForCausalLM",
    (
        *sizes(128256, 2048, 11008, 36, 16, 4, 32768, 1e-6),
        *(head_dim_apart(), _gate(), ATTENTION_BIAS, MLP_BIAS, _whole_heads(2_000_000.0, 32768), untied(True)),
        layers.layer_keys(
            36,
            (
                *("no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window"),
                "layer_types",
            ),
            layers.without_positions,
            layers.of_positions,
        ),
    ),
    eos=128001,
    windows=True,
)


def _divided(given: Any) -> dict[str, Any]:
    scaling = run_options()["logits_multiplier"].from_value(given)
    if not scaling:
        raise ValueError("the logits cannot be divided by 0")
    return {"logits_multiplier": 1 / scaling}


# Granite 3: factors of the embedding, the scores, the residual stream and the logits
GRANITE = decoder(
    "granite",
    "GraniteForCausalLM",
    (
        *sizes(32000, 4096, 11008, 32, 32, None, 2048, 1e-6),
        *(head_dim_apart(), _gate(), ATTENTION_BIAS, MLP_BIAS, _whole_heads(), untied(False)),
        plain("embedding_multiplier", 1.0, "embedding_multiplier"),
        plain("residual_multiplier", 1.0, "residual_multiplier"),
        plain(
            "attention_scale",
            1.0,
            "attention_multiplier",
            value=attention_scale,
        ),
        ConfigKey(("logits_scaling",), 1.0, _divided, lambda model: 1 / model.logits_multiplier),
    ),
)
