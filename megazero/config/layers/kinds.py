"""The layers of a model as values: what each computes, from its mixer to its norms.

A model is a tuple of layers. Whoever needs a layer's parameters, bytes or operations asks the layer; nobody multiplies
one layer by their number. Equal layers are one object, so that what is computed of a layer is kept once for each kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from megazero.config.derive import (
    GATED,
    attention_output_bias,
    attention_scale,
    ffn_width,
    head_dim,
    mlp_bias,
    qkv_bias,
    query_groups,
)
from megazero.config.layers.pattern import MOST_LAYERS, NO_POSITIONS, LayerPattern, PatternItem
from megazero.config.rotary import OF_MODEL, RotarySettings
from megazero.config.schema import ModelConfig

ALIBI, ROTARY = "alibi", "rotary"
BEFORE, AFTER, BOTH = "before", "after", "both"
NO_NORM = "none"
"""Queries and keys that are not normalised."""
IN_TURN, ONE_NORM = "off", "one-norm"


@dataclass(frozen=True)
class Mixer:
    """Attention of a layer.

    heads, groups  query heads and key-value heads over all tp ranks
    size           width of a head
    window, chunk  which keys a query sees: `config.layers.pattern.PatternItem`
    alibi          whether ALiBi's slopes act on it
    rotary         the settings of its rotary positions; None: it has none
    norm           of queries and keys: none, head, all or l2
    scale          factor of the scores
    cap            soft cap of the scores; None: none
    qkv_bias       whether the projection to queries, keys and values has a bias
    output_bias    whether the projection back has one
    """

    heads: int
    groups: int
    size: int
    window: int | None
    chunk: int | None
    alibi: bool
    rotary: RotarySettings | None
    norm: str
    scale: float
    cap: float | None
    qkv_bias: bool
    output_bias: bool

    def keys(self, length: int) -> int:
        """The most keys that a query sees in a sequence of this length."""
        return min(length, *(size for size in (self.window, self.chunk) if size is not None), length)


@dataclass(frozen=True)
class FeedForward:
    """The feed-forward part of a layer. bias: whether its linear layers have biases."""

    width: int
    activation: str
    bias: bool

    @property
    def gated(self) -> bool:
        return self.activation in GATED


@dataclass(frozen=True)
class Norms:
    """The norms of a layer.

    kind       layernorm or rmsnorm
    epsilon    inside the root
    plus_one   whether the factor is 1 + weight
    placement  before a sublayer, after it, or both
    """

    kind: str
    epsilon: float
    plus_one: bool
    placement: str

    @property
    def before(self) -> bool:
        return self.placement in (BEFORE, BOTH)

    @property
    def after(self) -> bool:
        return self.placement in (AFTER, BOTH)


@dataclass(frozen=True)
class Layer:
    """A layer of a model.

    hidden    width of the residual stream
    parallel  off: the feed-forward part works on what attention has written; two-norms, one-norm: both work on the
              layer's input, through a norm each or one for both
    residual  factor of what each part writes into the residual stream
    """

    hidden: int
    mixer: Mixer
    mlp: FeedForward
    norms: Norms
    parallel: str
    residual: float


@lru_cache(maxsize=256)
def layers(model: ModelConfig) -> tuple[Layer, ...]:
    """The layers of a model, in its order. The sizes have to fit each other (`config.layers.checks_model`)."""
    items = pattern_items(model)
    made = {item: _layer(model, item) for item in dict.fromkeys(items)}
    return tuple(made[item] for item in items)


@lru_cache(maxsize=256)
def kinds(model: ModelConfig) -> Mapping[Layer, int]:
    """The kinds of layers of a model in the order in which they come, each with the number of its layers."""
    return MappingProxyType(Counter(layers(model)))


@lru_cache(maxsize=256)
def kind_numbers(model: ModelConfig) -> tuple[int, ...]:
    """By layer of a model the place of its kind in `kinds`."""
    places = {layer: place for place, layer in enumerate(kinds(model))}
    return tuple(places[layer] for layer in layers(model))


def ffn_widths(model: ModelConfig) -> tuple[int, ...]:
    """The widths of feed-forward layers that a model has, each once."""
    return tuple(dict.fromkeys(item.width or ffn_width(model) for item in pattern_items(model)))


def rotary_sets(model: ModelConfig) -> Mapping[str, RotarySettings]:
    """The sets of rotary settings of a model by name. The one of the model's own fields is `rotary`."""
    whole = RotarySettings(**{name: getattr(model, field) for field, name in OF_MODEL.items()})
    return {ROTARY: whole} | {named.name: named.settings for named in model.rotary_sets}


def rotary_names(model: ModelConfig) -> tuple[str, ...]:
    """The names of the sets of rotary settings of a model. The settings themselves need not be valid."""
    return ROTARY, *(named.name for named in model.rotary_sets)


def unknown_positions(model: ModelConfig) -> tuple[str, ...]:
    """The words for positions in the pattern that name neither positions nor a set of rotary settings."""
    known = {NO_POSITIONS, ALIBI, None, *rotary_names(model)}
    items = () if model.layer_pattern is None else model.layer_pattern.items
    return tuple(dict.fromkeys(str(item.positions) for item in items if item.positions not in known))


def uses_positions(model: ModelConfig, kind: str) -> bool:
    """Whether some layer has these positions: alibi or rotary of any set."""
    of_model = model.position_embedding
    words = {of_model if item.positions is None else item.positions for item in pattern_items(model)}
    return ALIBI in words if kind == ALIBI else bool(words & {*rotary_names(model)})


def pattern_items(model: ModelConfig) -> tuple[PatternItem, ...]:
    """What the pattern says of each layer. What the model has anyway is left out, so that items of equal layers are
    equal.
    """
    if model.layer_pattern is None:
        return (PatternItem(),) * min(model.num_layers, MOST_LAYERS)  # other checks refuse more, and need a list too
    shortened = LayerPattern(tuple(_without_defaults(model, item) for item in model.layer_pattern.items))
    return shortened.layers(model.num_layers)


def _without_defaults(model: ModelConfig, item: PatternItem) -> PatternItem:
    positions = None if item.positions == model.position_embedding else item.positions
    width = None if item.width == ffn_width(model) else item.width
    return replace(item, positions=positions, width=width)


def _layer(model: ModelConfig, item: PatternItem) -> Layer:
    return Layer(
        model.hidden_size,
        _mixer(model, item),
        FeedForward(item.width or ffn_width(model), model.activation, mlp_bias(model)),
        Norms(model.norm, model.norm_epsilon, model.norm_plus_one, model.norm_placement),
        model.parallel_block,
        model.residual_multiplier,
    )


def _mixer(model: ModelConfig, item: PatternItem) -> Mixer:
    positions = model.position_embedding if item.positions is None else item.positions
    return Mixer(
        model.num_attention_heads,
        query_groups(model),
        head_dim(model),
        item.window,
        item.chunk,
        positions == ALIBI,
        rotary_sets(model).get(positions),
        model.query_key_norm,
        attention_scale(model),
        model.attention_cap,
        qkv_bias(model),
        attention_output_bias(model),
    )
