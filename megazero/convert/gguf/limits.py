"""What llama.cpp fixes of an architecture: a requirement each, of which `architectures.ARCHITECTURES` are made."""

from __future__ import annotations

import math

from megazero.config.derive import attention_bias, attention_scale, head_dim, max_positions, mlp_bias
from megazero.config.layers.kinds import pattern_items
from megazero.config.layers.pattern import NO_POSITIONS, LayerPattern
from megazero.config.schema import ModelConfig
from megazero.convert.hf.gemma import LOCAL
from megazero.convert.hf.tables import ModelRequirement

TANH, GELU, GEGLU_TANH = (
    ModelRequirement("--activation", lambda model: model.activation, allowed)
    for allowed in (("gelu-tanh",), ("gelu", "gelu-tanh"), ("geglu-tanh",))
)
UNTIED = ModelRequirement(
    "--untie-embeddings-and-output-weights", lambda model: model.untie_embeddings_and_output_weights, (True,)
)
NO_ATTENTION_BIAS = ModelRequirement("--attention-bias", attention_bias, (False,))
ATTENTION_BIAS = ModelRequirement("--attention-bias", attention_bias, (True,))
NO_MLP_BIAS = ModelRequirement("--mlp-bias", mlp_bias, (False,))


def _short_windows(model: ModelConfig) -> str:
    windows = {item.window for item in pattern_items(model) if item.window is not None}
    return ", ".join(str(window) for window in sorted(windows) if window < max_positions(model)) or "none"


NO_WINDOW = ModelRequirement("the window of --layer-pattern, shorter than the context,", _short_windows, ("none",))
"""Of architectures whose layers see everything. A window as long as the context hides nothing."""


def windows_but(every: int) -> ModelRequirement:
    """Windows in all layers but every so many-th."""
    known = f"a window in all layers but every {every}"

    def pattern(model: ModelConfig) -> str:
        items = pattern_items(model)
        alike = all((item.window is None) == (number % every == 0) for number, item in enumerate(items, 1))
        return known if alike else str(LayerPattern.shortest(items))

    return ModelRequirement("--layer-pattern", pattern, (known,))


def positions_but(every: int) -> ModelRequirement:
    """Rotary positions in all layers but every so many-th."""
    known = f"every {every}"

    def layers(model: ModelConfig) -> str:
        without = [number for number, item in enumerate(pattern_items(model), 1) if item.positions == NO_POSITIONS]
        return known if without == [*range(every, model.num_layers + 1, every)] else ", ".join(map(str, without))

    return ModelRequirement("the list of layers without positions in --layer-pattern", layers, (known,))


def head_scale(largest: int) -> ModelRequirement:
    """Scores over the root of the head's width, in a model of `largest` layers over that of hidden / heads: llama.cpp
    knows Gemma's sizes by their numbers of layers.
    """

    def quotient(model: ModelConfig) -> float:
        width = model.hidden_size // model.num_attention_heads if model.num_layers == largest else head_dim(model)
        return round(attention_scale(model) * math.sqrt(width), 9)

    name = f"--attention-scale times the root of a head's width (in {largest} layers of --hidden-size / heads)"
    return ModelRequirement(name, quotient, (1.0,))


def _local_set(model: ModelConfig) -> str:
    return next((str(named) for named in model.rotary_sets if named.name == LOCAL), "none")


LOCAL_BASE = ModelRequirement(f"the set {LOCAL} of --rotary-sets", _local_set, (LOCAL,))
"""Positions of layers with a window that turn as `RotarySettings` do by default."""


def is_number(field: str) -> ModelRequirement:
    name = f"--{field.replace('_', '-')}"
    return ModelRequirement(name, lambda model: "none" if getattr(model, field) is None else "a number", ("a number",))


def is_none(field: str) -> ModelRequirement:
    return ModelRequirement(f"--{field.replace('_', '-')}", lambda model: str(getattr(model, field)), ("None",))
