"""The modules that get an adapter by the keys of adapter_config.json, and of which rank and alpha. The rules are PEFT's
own (its `check_target_module_exists` and `get_pattern_key`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from megazero.convert.source import ConversionError
from megazero.system.reading import shown

ALL_LINEAR = "all-linear"
OF_FAMILY: Mapping[str, tuple[str, ...]] = {
    "bloom": ("query_key_value",),
    "gpt2": ("c_attn",),
    "llama": ("q_proj", "v_proj"),
    "opt": ("q_proj", "v_proj"),
    "gemma2": ("q_proj", "v_proj"),
    "gemma3_text": ("q_proj", "v_proj"),
    "gpt_neox": ("query_key_value",),
    "mistral": ("q_proj", "v_proj"),
    "qwen2": ("q_proj", "v_proj"),
    "qwen3": ("q_proj", "v_proj"),
}
"""model_type -> the modules of a target_modules null (PEFT's TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING). For a
family that is not here PEFT refuses it.
"""
_PLAIN = re.compile(r"[\w.]+")
"""A name of modules around layers. PEFT takes regular expressions."""

SECONDS = 2.0
"""Most that an expression may take for one name."""

Matches = Callable[[str], bool]


@dataclass(frozen=True)
class PatternValues:
    """rank_pattern or alpha_pattern: (pattern, whether a module's name ends like it, number) in their order."""

    key: str
    entries: tuple[tuple[str, Matches, float], ...]

    def of(self, module: str) -> tuple[str, float] | None:
        """(where it stands, the number) of a module; None where no pattern is of it."""
        found = (
            (f"{self.key} {shown(name)}: {number:g}", number) for name, ends, number in self.entries if ends(module)
        )
        return next(found, None)


@dataclass(frozen=True)
class AdapterTargets:
    """What the keys say of a module."""

    config: Mapping[str, Any]
    excludes: Matches
    rank_pattern: PatternValues
    alpha_pattern: PatternValues
    expression: Matches | None

    def leaves_out(self, module: str, family: str) -> str | None:
        """The key by which a module gets no adapter, with its value; None where it gets one. family: the model_type."""
        if self.excludes(module):
            return self.said("exclude_modules")
        targets = self.config.get("target_modules")
        if isinstance(targets, str):
            every = targets.lower() == ALL_LINEAR
            return None if every or (self.expression and self.expression(module)) else self.said("target_modules")
        targets = OF_FAMILY.get(family, ()) if targets is None else targets
        if module in targets:
            return None
        if not _names(targets, module):
            return self.said("target_modules")
        return None if self._of_layer(module) else self.said("layers_to_transform")

    def rank(self, module: str, otherwise: int) -> tuple[str, int]:
        """(the key that says it, the rank of a module)."""
        where, number = self.rank_pattern.of(module) or (f"r {otherwise}", otherwise)
        return where, int(number)

    def alpha(self, module: str, otherwise: float) -> float:
        return (self.alpha_pattern.of(module) or ("", otherwise))[1]

    def said(self, key: str) -> str:
        """A key with its value."""
        return f"{key} {shown(self.config.get(key))}"

    def _of_layer(self, module: str) -> bool:
        """Whether a module lies in a layer of layers_to_transform."""
        layers, around = self.config.get("layers_to_transform"), self.config.get("layers_pattern") or ()
        if layers is None or layers == []:
            return True
        patterns = [rf"(?:^|.*?\.){name}\.(\d+)\." for name in ([around] if isinstance(around, str) else around)]
        found = (re.match(pattern, module) for pattern in patterns or [r".*?\.[^.]*\.(\d+)\."])
        number = next((int(place[1]) for place in found if place), None)
        return number in ([layers] if isinstance(layers, int) else layers)


def _names(ends: Sequence[str], module: str) -> bool:
    return any(module == end or module.endswith(f".{end}") for end in ends)


def adapter_targets(config: Mapping[str, Any]) -> AdapterTargets:
    """Raises ValueError with a sentence about the first key that cannot be meant."""
    targets, excluded = _named(config, "target_modules"), _named(config, "exclude_modules") or ()
    layers, around = config.get("layers_to_transform"), _named(config, "layers_pattern")
    if layers is not None and not _all(lambda layer: type(layer) is int, layers):
        raise ValueError(f"layers_to_transform {shown(layers)} is no number of a layer and no list of them")
    if not _all(lambda name: _PLAIN.fullmatch(name) is not None, around or []):
        raise ValueError(f"layers_pattern {shown(around)}: only names are known here, not regular expressions")
    for key, value in (("layers_to_transform", layers), ("layers_pattern", around)):
        if isinstance(targets, str) and value is not None:
            raise ValueError(
                f"{key} {shown(value)} beside target_modules {shown(targets)}, which is no list: not PEFT's"
            )
    if around and layers is None:
        raise ValueError(f"layers_pattern {shown(around)} without layers_to_transform")
    return AdapterTargets(
        config,
        _expression("exclude_modules", excluded)
        if isinstance(excluded, str)
        else lambda module: _names(excluded, module),
        _pattern(config, "rank_pattern", lambda rank: type(rank) is int and rank > 0),
        _pattern(config, "alpha_pattern", lambda alpha: type(alpha) in (int, float) and 0 < alpha < math.inf),
        _expression("target_modules", targets) if isinstance(targets, str) else None,
    )


def _all(holds: Callable[[Any], bool], value: Any) -> bool:
    """Whether it holds for a value, or for all of a list."""
    return all(map(holds, value)) if isinstance(value, list) else holds(value)


def _named(config: Mapping[str, Any], key: str) -> str | list[str] | None:
    """A value that is a string, a list of strings, or null."""
    value: str | list[str] | None = config.get(key)
    if value is not None and not _all(lambda name: isinstance(name, str), value):
        raise ValueError(f"{key} {shown(value)} is neither a string nor a list of strings")
    return value


def _expression(key: str, written: str, of: str = "{}") -> Matches:
    """Whether a whole name matches a regular expression. of: the expression around it.

    A stranger wrote the expression, and some take exponential time. (Python's `re` knows no limit of time.)
    """
    try:
        expression = regex.compile(of.format(written))
    except regex.error as error:
        raise ValueError(f"{key} {shown(written)} is no regular expression: {error}") from error

    def matches(module: str) -> bool:
        try:
            return expression.fullmatch(module, timeout=SECONDS) is not None
        except TimeoutError:
            raise ConversionError(
                f"{key} {shown(written)}: whether {module} matches takes more than {SECONDS:g} s"
            ) from None

    return matches


def _pattern(config: Mapping[str, Any], key: str, is_number: Callable[[Any], bool]) -> PatternValues:
    patterns = {} if config.get(key) is None else config[key]
    if not isinstance(patterns, dict):
        raise ValueError(f"{key} {shown(patterns)} is no object")
    entries = []
    for name, number in patterns.items():
        if not is_number(number):
            kind = "a whole number" if key == "rank_pattern" else "a number"
            raise ValueError(
                f"{key} {shown(name)}: {shown(number)} is not the end of a module's name with {kind} above 0"
            )
        entries.append((name, _expression(key, name, r"(.*\.)?({})"), number))
    return PatternValues(key, tuple(entries))
