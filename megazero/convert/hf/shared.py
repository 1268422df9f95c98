"""Settings that the tables of several families share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megazero.config.derive import attention_bias, head_dim, max_positions, mlp_bias, query_groups
from megazero.config.options import run_options
from megazero.config.schema import ModelConfig
from megazero.convert.hf.tables import Config, ConfigKey, ModelRequirement, SupportedValues

_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
ACTIVATIONS = dict.fromkeys(_TANH, "gelu-tanh") | {"gelu": "gelu", "gelu_python": "gelu", "relu": "relu"}


EACH, SHARE = "one for each query head", "hidden size / heads"


def _groups(model: ModelConfig) -> int | str:
    return EACH if query_groups(model) == model.num_attention_heads else query_groups(model)


def head_width(model: ModelConfig) -> int | str:
    """The width of a head, in words where it follows from the other sizes."""
    return SHARE if head_dim(model) * model.num_attention_heads == model.hidden_size else head_dim(model)


def biases(model: ModelConfig) -> str:
    """Which linear layers of a block have a bias, in words."""
    return {(True, True): "everywhere", (False, False): "nowhere"}.get(
        (attention_bias(model), mlp_bias(model)), "in some layers"
    )


LAYERNORM = (
    ModelRequirement("--norm", lambda model: model.norm, ("layernorm",)),
    ModelRequirement("--num-query-groups", _groups, (EACH,)),
    ModelRequirement("--kv-channels", head_width, (SHARE,)),
)
NO_EMBEDDING_NORM = ModelRequirement(
    "LayerNorm after the embedding (--embedding-layernorm)", lambda model: model.embedding_layernorm, (False,)
)
BIASED = ModelRequirement("biases of linear layers", biases, ("everywhere",))

OWN_CODE = SupportedValues("auto_map", None, (None, {}), "the model's code lies beside its weights, and is not run")
ANY = (
    SupportedValues(
        "quantization_config", None, (None,), "quantised weights are not read; save the model in 16 bits first"
    ),
    SupportedValues("is_encoder_decoder", False, (False, None), "megazero's models are decoders"),
    SupportedValues("add_cross_attention", False, (False, None), "there is no cross attention"),
    OWN_CODE,
    SupportedValues("pruned_heads", None, (None, {}), "heads that were taken out"),
    SupportedValues("is_causal", True, (True,), "a token looks only at those before it"),
)


def windows(config: Config) -> Iterator[str]:
    """Problems of a family without windows: attention that does not reach over the whole context."""
    window, used = config.get("sliding_window"), config.get("use_sliding_window")
    if used:
        yield f"use_sliding_window {used!r}: attention looks at the whole context"
    elif window is not None and used is not False:
        yield f"sliding_window {window!r}: attention looks at the whole context"
    others = {kind for kind in config.get("layer_types") or () if kind != "full_attention"}
    if others:
        yield f"layer_types {', '.join(map(repr, sorted(others)))}: attention looks at the whole context"


def nominal_length(default: int, *keys: str) -> ConfigKey:
    """A key with the longest context of a model that has no position table."""

    def fields(found: Any) -> dict[str, Any]:
        return {"seq_length": run_options()["seq_length"].from_value(found)}

    return ConfigKey(keys, default, fields, max_positions, nominal=True)


def learned_length(default: int, *keys: str) -> ConfigKey:
    """A key with the number of rows of the position table."""

    def fields(found: Any) -> dict[str, Any]:
        length = run_options()["seq_length"].from_value(found)
        return {"seq_length": length, "max_position_embeddings": length}

    return ConfigKey(keys, default, fields, max_positions)


def copy_of(setting: ConfigKey, default: Any, *keys: str) -> ConfigKey:
    """A key that is written with the value of another setting. `Family.notes` reports where a config.json had a
    different value.
    """
    return ConfigKey(keys, default, lambda found: {}, setting.value)
