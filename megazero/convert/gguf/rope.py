"""Scaled rotary positions for llama.cpp: metadata say linear and yarn, tensors of divisors say llama3 and longrope.

A pair of a head turns by position * frequency / divisor there, and yarn's ramp follows from fixed numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fused_ops.rotary_frequencies import rotary_frequencies
from megazero.config.derive import head_dim, max_positions
from megazero.config.rotary import RotaryScaling
from megazero.config.schema import ModelConfig
from megazero.convert.hf.rope import scaled_by, settings_of_model
from megazero.convert.hf.tables import ModelRequirement

_RAMP = MappingProxyType({"beta_fast": 32.0, "beta_slow": 1.0, "truncate": 1.0})
"""Numbers of yarn that llama.cpp reads from no file of the architectures here."""


def scalings(*kinds: str) -> tuple[ModelRequirement, ...]:
    """Requirements of an architecture whose positions may be scaled in these ways."""
    return (
        scaled_by(*kinds),
        ModelRequirement("the ramp of --rotary-scaling yarn", _ramp, (_words(_RAMP),)),
    )


def _ramp(model: ModelConfig) -> str:
    scaling = model.rotary_scaling
    if scaling is None or scaling.kind != "yarn":
        return _words(_RAMP)
    return _words({key: scaling.number(key, default) for key, default in _RAMP.items()})


def _words(numbers: Mapping[str, float]) -> str:
    return " ".join(f"{key}={number:g}" for key, number in numbers.items())


def scaling_metadata(model: ModelConfig) -> dict[str, Any]:
    """Method of `gguf.GGUFWriter` without its add_ -> its value, for the scaling of a model. rope_scaling_type is the
    value of a `gguf.RopeScalingType`.
    """
    scaling = model.rotary_scaling
    return {} if scaling is None else _METADATA[scaling.kind](model, scaling)


def _linear(model: ModelConfig, scaling: RotaryScaling) -> dict[str, Any]:
    return {"rope_scaling_type": "linear", "rope_scaling_factor": scaling.number("factor", 1.0)}


def _yarn(model: ModelConfig, scaling: RotaryScaling) -> dict[str, Any]:
    factor = {"factor": scaling.number("factor", 1.0), "original_max_position_embeddings": scaling.original(0)}
    derived = RotaryScaling("yarn", tuple(factor.items()))
    # llama.cpp multiplies the factor of the paper, which it derives, with that of the file
    further = _attention_factor(model, scaling) / _attention_factor(model, derived)
    return {
        "rope_scaling_type": "yarn",
        "rope_scaling_factor": factor["factor"],
        "rope_scaling_orig_ctx_len": scaling.original(0),
    } | ({} if further == 1 else {"rope_scaling_attn_factors": further})


def _longrope(model: ModelConfig, scaling: RotaryScaling) -> dict[str, Any]:
    return {
        "rope_scaling_type": "longrope",
        "rope_scaling_orig_ctx_len": scaling.original(0),
        "rope_scaling_attn_factors": _attention_factor(model, scaling),
    }


_METADATA: Mapping[str, Callable[[ModelConfig, RotaryScaling], dict[str, Any]]] = MappingProxyType(
    {"linear": _linear, "yarn": _yarn, "longrope": _longrope, "llama3": lambda model, scaling: {}}
)


def divisors(model: ModelConfig) -> dict[str, Tensor]:
    """Tensors of a file, fp64 [pairs of a head that turn], by name."""
    scaling = model.rotary_scaling
    if scaling is not None and scaling.kind == "llama3":
        return {"rope_freqs.weight": _frequencies(model, None)[0] / _frequencies(model, scaling)[0]}
    if scaling is not None and scaling.kind == "longrope":
        return {
            f"rope_factors_{length}.weight": torch.tensor(scaling.numbers(f"{length}_factor"), dtype=torch.float64)
            for length in ("long", "short")
        }
    return {}


def _attention_factor(model: ModelConfig, scaling: RotaryScaling) -> float:
    return _frequencies(model, scaling)[1]


def _frequencies(model: ModelConfig, scaling: RotaryScaling | None) -> tuple[Tensor, float]:
    settings = replace(settings_of_model(model), scaling=scaling)
    return rotary_frequencies(head_dim(model), settings, trained_length=max_positions(model))
