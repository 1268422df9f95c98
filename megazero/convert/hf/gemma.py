"""Gemma 2 and the text models of Gemma 3: four norms a block, windows in most layers, a factor of the embedding.

(Gemma 2: arXiv:2408.00118; Gemma 3: arXiv:2503.19786.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from megazero.config.derive import attention_scale
from megazero.config.layers.pattern import RotarySet
from megazero.config.options import run_options
from megazero.config.rotary import RotarySettings
from megazero.config.schema import ModelConfig
from megazero.convert.hf import layer_keys as layers
from megazero.convert.hf.llama import (
    ATTENTION_BIAS,
    NEEDS,
    OF_DECODERS,
    QUERY_KEY,
    UNSAID,
    decoder_names,
    own_head_dim,
    sizes,
    untied,
)
from megazero.convert.hf.rope import fields_of, parameters, rope, rope_values, settings_of, settings_of_model, two_minds
from megazero.convert.hf.shared import ANY
from megazero.convert.hf.tables import Config, ConfigKey, Family, ModelRequirement, SupportedValues, one_of, plain

_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_GATED = {"gelu_pytorch_tanh": "geglu-tanh", "gelu_new": "geglu-tanh", "gelu": "geglu", "silu": "swiglu"}
_FIXED: Mapping[str, Any] = {
    **OF_DECODERS,
    "norm_placement": "both",
    "norm_plus_one": True,
    "mlp_bias": False,
}
LOCAL = "local"
"""The name of the rotary settings of layers with a window."""


def _hidden(given: Any) -> dict[str, Any]:
    """The width, from which the factor of the embedding follows."""
    hidden = run_options()["hidden_size"].from_value(given)
    return {"hidden_size": hidden, "embedding_multiplier": math.sqrt(hidden)}


def _scale(given: Any) -> dict[str, Any]:
    scalar = run_options()["attention_scale"].from_value(given)
    if scalar is None or scalar <= 0:
        raise ValueError(f"{given!r} is not a number above 0")
    return {"attention_scale": scalar**-0.5}


def _scalar(model: ModelConfig) -> float | int:
    """query_pre_attn_scalar, whose power -1/2 is the factor of the scores."""
    scalar = attention_scale(model) ** -2
    return round(scalar) if math.isclose(scalar, round(scalar), rel_tol=1e-12) else scalar


def _activation() -> ConfigKey:
    return one_of("activation", "gelu_pytorch_tanh", _GATED, "hidden_activation")


def _keys(vocabulary: int, length: int) -> tuple[ConfigKey, ...]:
    of_sizes = sizes(vocabulary, 2304, 9216, 26, 8, 4, length, 1e-6)
    width = ConfigKey(("hidden_size",), 2304, _hidden, lambda model: model.hidden_size)
    return (
        *(width if setting.keys == ("hidden_size",) else setting for setting in of_sizes),
        *(own_head_dim(256), _activation(), ATTENTION_BIAS, untied(True)),
        ConfigKey(("query_pre_attn_scalar",), 256, _scale, _scalar),
    )


_DEMANDS = (
    *ANY,
    SupportedValues("use_bidirectional_attention", False, (False, None), "a token looks only at those before it"),
)
_NEEDS = (
    *NEEDS,
    ModelRequirement(
        "--embedding-multiplier / sqrt(--hidden-size)",
        lambda model: model.embedding_multiplier / math.sqrt(model.hidden_size),
        (1.0,),
    ),
)


def _family(model_type: str, architecture: str, keys: tuple[ConfigKey, ...], **more: Any) -> Family:
    return Family(
        model_type,
        architecture,
        decoder_names({**_NORMS, **more.pop("norms", {})}),
        {**_FIXED, **more.pop("fixed", {})},
        keys,
        (*_DEMANDS, *more.pop("demands", ())),
        _NEEDS,
        eos=1,
        unsaid=UNSAID,
        also=frozenset(("hidden_act", "sliding_window_pattern", "sliding_window_size")),
        **more,
    )


GEMMA2 = _family(
    "gemma2",
    "Gemma2ForCausalLM",
    (
        *_keys(256000, 8192),
        rope(length=8192),
        plain("logits_cap", 30.0, "final_logit_softcapping", null=True),
        plain("attention_cap", 50.0, "attn_logit_softcapping", null=True),
        layers.layer_keys(
            26,
            ("sliding_window", "layer_types"),
            partial(layers.in_turn, every=2, default=4096, positions=None),
            layers.of_types,
        ),
    ),
    further=two_minds,
)


@dataclass(frozen=True)
class _TwoRopes(ConfigKey):
    """The rotary positions of layers with a window and of the others."""

    def read(self, config: Config) -> Any:
        values = rope_values(config)
        nested = {key: value for key, value in values.items() if isinstance(value, dict)}
        trained = config.get("max_position_embeddings") or 131072
        outer = {key: value for key, value in values.items() if not isinstance(value, dict)}
        if outer.get("rope_theta") is None and config.get("rope_theta") is not None:
            outer["rope_theta"] = config["rope_theta"]
        whole = {**outer, **nested.get(layers.FULL_LAYER, {})}
        within = dict(nested.get(layers.WINDOW_LAYER, {}))
        if within.get("rope_theta") is None and config.get("rope_local_base_freq") is not None:
            within["rope_theta"] = config["rope_local_base_freq"]
        if strange := nested.keys() - {layers.FULL_LAYER, layers.WINDOW_LAYER}:
            raise ValueError(f"of layers {', '.join(sorted(strange))}: there are none")
        return (
            settings_of(whole, base=1_000_000.0, share=1.0, trained=trained),
            settings_of(within, base=10_000.0, share=1.0, trained=trained),
        )

    def entries(self, model: ModelConfig) -> dict[str, Any]:
        """rope_parameters for newer versions of transformers; the other keys for older ones."""
        whole, local = _both(model)
        written: dict[str, Any] = {
            "rope_theta": whole.base,
            "rope_local_base_freq": local.base,
            "rope_parameters": {layers.FULL_LAYER: parameters(whole), layers.WINDOW_LAYER: parameters(local)},
        }
        if whole.scaling is not None:
            rescaled = written["rope_parameters"][layers.FULL_LAYER]
            written["rope_scaling"] = {key: value for key, value in rescaled.items() if key != "rope_theta"}
        return written


def _both(model: ModelConfig) -> tuple[RotarySettings, RotarySettings]:
    local = {named.name: named.settings for named in model.rotary_sets}.get(LOCAL)
    whole = settings_of_model(model)
    return whole, whole if local is None else local


def _rope_fields(both: tuple[RotarySettings, RotarySettings]) -> dict[str, Any]:
    whole, local = both
    return {**fields_of(whole), "rotary_sets": (RotarySet(LOCAL, local),)}


GEMMA3 = _family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (
        *_keys(262_208, 131072),
        _TwoRopes(("rope_parameters", "rope_theta", "rope_local_base_freq", "rope_scaling"), None, _rope_fields, _both),
        plain("logits_cap", None, "final_logit_softcapping"),
        layers.layer_keys(
            26,
            ("sliding_window", "layer_types", "sliding_window_pattern"),
            lambda config, number: layers.in_turn(
                config, number, config.get("sliding_window_pattern") or 6, 4096, LOCAL
            ),
            layers.of_types,
        ),
    ),
    norms=QUERY_KEY,
    fixed={"query_key_norm": "head", "attention_cap": None},
    demands=(
        SupportedValues(
            "attn_logit_softcapping", None, (None,), "transformers computes Gemma 3 without a cap of scores"
        ),
    ),
    written=lambda model: {"attn_logit_softcapping": None},
)
