"""Types of the tables that describe a family's config.json. `families.FAMILIES` has the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megazero.config.options import run_options
from megazero.config.schema import ModelConfig
from megazero.convert.hf.rules import Names

Config = Mapping[str, Any]
"""config.json as it was read."""


@dataclass(frozen=True)
class ConfigKey:
    """A key of config.json and the field of ours that it sets.

    keys     names that the key has had; the first is written
    default  the value that transformers takes where the key is absent, or null without a meaning of its own
    fields   value of the key -> fields of ModelConfig. Raises ValueError with a reason
    value    ModelConfig -> value of the key
    nominal  the value is no bound: a model that was trained on shorter samples keeps the larger value
    null     whether null means something else than an absent key: none, and not the default
    needed   whether the key is written for a model
    """

    keys: tuple[str, ...]
    default: Any
    fields: Callable[[Any], dict[str, Any]]
    value: Callable[[ModelConfig], Any]
    nominal: bool = False
    null: bool = False
    needed: Callable[[ModelConfig], bool] = lambda model: True

    def entries(self, model: ModelConfig) -> dict[str, Any]:
        """The key and value to write."""
        return {self.keys[0]: self.value(model)} if self.needed(model) else {}

    def read(self, config: Config) -> Any:
        """The value in a config.json. Raises ValueError where it is there under two names with different values."""
        found = {key: config[key] for key in self.keys if config.get(key) is not None}
        says_null = self.null and any(key in config for key in self.keys)
        first, *others = found.values() or [None if says_null else self.default]
        if any(other != first for other in others):
            raise ValueError(
                f"{' and '.join(f'{key} {value!r}' for key, value in found.items())} are two names of one number"
            )
        return first


@dataclass(frozen=True)
class SupportedValues:
    """A key of config.json of which megazero supports only some values. The others mean a model that it does not
    compute.
    """

    key: str
    default: Any
    allowed: tuple[Any, ...]
    why: str

    def problems(self, config: Config) -> Iterator[str]:
        value = config.get(self.key, self.default)
        if value not in self.allowed:
            yield f"{self.key} {value!r}: {self.why}"


@dataclass(frozen=True)
class ModelRequirement:
    """A property that a model of ours must have for a family to express it."""

    flag: str
    value: Callable[[ModelConfig], Any]
    allowed: tuple[Any, ...]

    def problems(self, model: ModelConfig) -> Iterator[str]:
        value = self.value(model)
        if value not in self.allowed:
            yield f"{self.flag} is {value}, not {' or '.join(map(str, self.allowed))}"


@dataclass(frozen=True)
class Family:
    """A value of model_type, and everything that goes with it.

    architecture  the class with the head, as config.json names it
    fixed         fields of ModelConfig that every model of the family has
    eos           end of text where config.json names none
    further       other problems that a config.json can have, besides the demands
    written       keys of a new config.json, besides those of the settings
    notes         keys of a config.json that are not carried over, and only matter to training
    unsaid        fields of ours without a key in config.json, which only matter to training
    also          keys of a config.json that say nothing about what the model computes, or that `further` reads
    """

    model_type: str
    architecture: str
    names: Names
    fixed: Mapping[str, Any]
    settings: tuple[ConfigKey, ...]
    demands: tuple[SupportedValues, ...]
    needs: tuple[ModelRequirement, ...]
    eos: int
    further: Callable[[Config], Iterator[str]] = lambda config: iter(())
    written: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    notes: Callable[[Config], Iterator[str]] = lambda config: iter(())
    unsaid: tuple[ModelRequirement, ...] = ()
    also: frozenset[str] = frozenset()


def plain(
    field: str, default: Any, *keys: str, value: Callable[[ModelConfig], Any] | None = None, null: bool = False
) -> ConfigKey:
    """A key with the same values as a field of ours. null: of `ConfigKey`."""

    def fields(found: Any) -> dict[str, Any]:
        return {field: None if found is None else run_options()[field].from_value(found)}

    return ConfigKey(keys, default, fields, value or (lambda model: getattr(model, field)), null=null)


def opposite(field: str, default: bool, *keys: str) -> ConfigKey:
    """A switch that is on where the field of ours is off."""

    def fields(found: Any) -> dict[str, Any]:
        return {field: not run_options()[field].from_value(found)}

    return ConfigKey(keys, default, fields, lambda model: not getattr(model, field))


def one_of(field: str, default: str, table: Mapping[str, str], *keys: str) -> ConfigKey:
    """A key whose words stand for words of ours. Of several words that stand for the same, the first is written."""

    def fields(found: Any) -> dict[str, Any]:
        if found not in table:
            raise ValueError(f"{found!r}: megazero computes {', '.join(table)}")
        return {field: table[found]}

    def value(model: ModelConfig) -> str | None:
        return next((theirs for theirs, ours in table.items() if ours == getattr(model, field)), None)

    return ConfigKey(keys, default, fields, value)
