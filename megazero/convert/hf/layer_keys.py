"""The keys of config.json that say which layers have a window and which have no rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megazero.config.layers.kinds import pattern_items
from megazero.config.layers.pattern import NO_POSITIONS, LayerPattern, PatternItem
from megazero.config.schema import ModelConfig
from megazero.convert.hf.tables import Config, ConfigKey
from megazero.system.reading import BOUNDS, shown

FULL_LAYER, WINDOW_LAYER = "full_attention", "sliding_attention"

Items = tuple[PatternItem, ...]


@dataclass(frozen=True)
class LayerKeys(ConfigKey):
    """The keys that say what differs between a family's layers.

    items    (config.json, number of layers) -> what each layer is. Raises ValueError
    written  (what each layer is) -> the keys and their values
    """

    items: Callable[[Config, int], Items] = lambda config, layers: ()
    written: Callable[[Items], dict[str, Any]] = lambda items: {}

    def read(self, config: Config) -> Any:
        layers = next((config[key] for key in ("num_hidden_layers",) if config.get(key) is not None), self.default)
        if isinstance(layers, bool) or not isinstance(layers, int) or not 0 < layers <= BOUNDS.layers:
            return ()  # which the key of the number of layers reports
        return self.items(config, layers)

    def entries(self, model: ModelConfig) -> dict[str, Any]:
        return self.written(pattern_items(model))


def layer_keys(
    layers: int, keys: Sequence[str], items: Callable[[Config, int], Items], written: Callable[[Items], dict[str, Any]]
) -> LayerKeys:
    """keys: all that are replaced where layers change. layers: their number where config.json does not say it."""
    return LayerKeys(tuple(keys), layers, _fields, pattern_items, items=items, written=written)


def _fields(items: Items) -> dict[str, Any]:
    return {"layer_pattern": LayerPattern.shortest(items)}


def window_of(config: Config, default: int | None) -> int | None:
    """sliding_window: the keys that a query sees, its own among them; None: all. Raises ValueError."""
    window = config.get("sliding_window", default)
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"sliding_window {shown(window)} is not a whole number above 0")
    return window


def layer_types(config: Config, layers: int, otherwise: Callable[[int], bool]) -> tuple[bool, ...]:
    """Whether each layer has a window, by layer_types; otherwise by its number. Raises ValueError."""
    types = config.get("layer_types")
    if types is None:
        return tuple(map(otherwise, range(layers)))
    if not isinstance(types, list) or len(types) != layers:
        raise ValueError(f"layer_types {shown(types)} is no list of a word for each of {layers} layers")
    strange = sorted({str(kind) for kind in types if kind not in (FULL_LAYER, WINDOW_LAYER)})
    if strange:
        raise ValueError(f"layer_types {', '.join(strange)}: megazero computes {FULL_LAYER} and {WINDOW_LAYER}")
    return tuple(kind == WINDOW_LAYER for kind in types)


def in_words(items: Items) -> list[str]:
    """layer_types of a model."""
    return [FULL_LAYER if item.window is None else WINDOW_LAYER for item in items]


def only_window(items: Items) -> int | None:
    """The window of the layers that have one; None where none has."""
    return next((item.window for item in items if item.window is not None), None)


def everywhere(default: int | None) -> Callable[[Config, int], Items]:
    """All layers have the window of sliding_window (Mistral, Phi-3). default: where the key is absent."""
    return lambda config, layers: (PatternItem(window=window_of(config, default)),) * layers


def of_window_alone(items: Items) -> dict[str, Any]:
    """sliding_window of a model whose layers are alike."""
    return {"sliding_window": only_window(items)}


def switched(config: Config, layers: int) -> Items:
    """Layers with a window where use_sliding_window says so, from max_window_layers on or by layer_types (Qwen)."""
    window = window_of(config, 4096) if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise ValueError(f"max_window_layers {shown(first)} is not a whole number")
    windowed = layer_types(config, layers, lambda number: window is not None and number >= first)
    if any(windowed) and window is None:
        raise ValueError(f"layer_types has {WINDOW_LAYER}, and use_sliding_window says that there is no window")
    return tuple(PatternItem(window=window if has_window else None) for has_window in windowed)


def of_switch(items: Items) -> dict[str, Any]:
    """The same keys of a model."""
    window = only_window(items)
    first = next((number for number, item in enumerate(items) if item.window is not None), len(items))
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": first,
        "layer_types": in_words(items),
    }


def in_turn(config: Config, layers: int, every: int, default: int, positions: str | None) -> Items:
    """Windows in all but every so many-th layer, or by layer_types (Gemma). positions: of layers with a window."""
    windowed = layer_types(config, layers, lambda number: (number + 1) % every != 0)
    window = window_of(config, default)
    if any(windowed) and window is None:
        raise ValueError(f"sliding_window is null, and layers are {WINDOW_LAYER}")
    return tuple(
        PatternItem(window=window, positions=positions) if has_window else PatternItem() for has_window in windowed
    )


def of_types(items: Items) -> dict[str, Any]:
    """sliding_window and layer_types of a model."""
    return {"sliding_window": only_window(items), "layer_types": in_words(items)}


def without_positions(config: Config, layers: int) -> Items:
    """Rotary positions in all but some layers (SmolLM 3): no_rope_layers has 1 for those with positions."""
    interval, turned = config.get("no_rope_layer_interval", 4), config.get("no_rope_layers")
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise ValueError(f"no_rope_layer_interval {shown(interval)} is not a whole number above 0")
    if turned is None:
        turned = [int((number + 1) % interval != 0) for number in range(layers)]
    if not isinstance(turned, list) or len(turned) != layers or any(mark not in (0, 1) for mark in turned):
        raise ValueError(f"no_rope_layers {shown(turned)} is no list of 0 or 1 for each of {layers} layers")
    window = window_of(config, None) if config.get("use_sliding_window") else None
    windowed = layer_types(config, layers, lambda number: window is not None and not turned[number])
    if any(windowed) and window is None:
        raise ValueError(f"layer_types has {WINDOW_LAYER}, and use_sliding_window says that there is no window")
    return tuple(
        PatternItem(window=window if has_window else None, positions=None if turns else NO_POSITIONS)
        for turns, has_window in zip(turned, windowed, strict=True)
    )


def of_positions(items: Items) -> dict[str, Any]:
    """The same keys of a model."""
    window = only_window(items)
    return {
        "no_rope_layers": [int(item.positions != NO_POSITIONS) for item in items],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": in_words(items),
    }
