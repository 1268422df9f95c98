"""Groups of parameters whose updates have options of their own, by patterns of the parameters' names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from megazero.config.schema import OptimizerConfig
from megazero.config.source import ConfigError
from megazero.own.rank_units import further_names
from megazero.own.torch_rule import TorchRule
from megazero.own.units.model import Units

GivenGroups = Mapping[str, Mapping[str, Any]]
"""From patterns of names to options."""
FACTOR = "lr_factor"
"""The option of every group by which the learning rate of a step is multiplied."""
_OF_ADAM = {"weight_decay": ("weight_decay",), "betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_eps",)}
OPTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "adamw": _OF_ADAM,
        "adam": _OF_ADAM,
        "sgd": {"weight_decay": ("weight_decay",), "momentum": ("sgd_momentum",)},
    }
)
"""The options of a group beside the rate, by one of our optimizers, and the fields of `OptimizerConfig` of each."""
_BOUNDS: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    FACTOR: ("a number from 0 on", lambda number: 0 <= number < math.inf),
    "weight_decay": ("a number from 0 on", lambda number: 0 <= number < math.inf),
    "betas": ("two numbers from 0 on, below 1", lambda number: 0 <= number < 1),
    "momentum": ("a number from 0 on, below 1", lambda number: 0 <= number < 1),
    "eps": ("a number above 0", lambda number: 0 < number < math.inf),
}
"""By option, what its numbers are in words, and whether one of them is."""


@dataclass(frozen=True)
class NamedGroups:
    """Group 0 has the parameters that no pattern names, and each pattern makes another.

    number_of  the number of each trained parameter's group by its name
    options    of each group, by the names of what updates it: our optimizers' fields, or those of torch
    factors    of each group, by which the learning rate of a step is multiplied
    """

    number_of: Mapping[str, int]
    options: tuple[Mapping[str, Any], ...]
    factors: tuple[float, ...]

    def at(self, lr: float) -> tuple[Mapping[str, Any], ...]:
        """The options of a step with this learning rate, as `zero.actions.UpdateValues.groups` has them."""
        both = zip(self.options, self.factors, strict=True)
        return tuple({**options, "lr": lr * factor} for options, factor in both)

    @property
    def words(self) -> str:
        """What is equal where ranks have the same groups."""
        return f"{sorted(self.number_of.items())} {[sorted(each.items()) for each in self.options]} {self.factors}"


def named_groups(given: GivenGroups, units: Units, optimizer: OptimizerConfig | TorchRule) -> NamedGroups:
    """The groups of a model's trained parameters.

    given      the first pattern that a parameter's name fits is that of its group
    optimizer  what updates: one of ours, or one of torch

    Raises ConfigError with everything that is wrong.
    """
    if not isinstance(given, Mapping):
        raise ConfigError([f"groups is {type(given).__name__}: a mapping from patterns of names to options is needed"])
    known = _options_of(optimizer)
    problems = [problem for pattern, options in given.items() for problem in _wrong(pattern, options, known)]
    number_of, unnamed = _numbers(given, units)
    problems += unnamed
    if problems:
        raise ConfigError([f"groups: {problem}" for problem in problems])
    base = {"weight_decay": optimizer.weight_decay} if isinstance(optimizer, OptimizerConfig) else {}
    every = [base, *({**base, **_fields(options, optimizer)} for options in given.values())]
    factors = (1.0, *(float(options.get(FACTOR, 1.0)) for options in given.values()))
    return NamedGroups(number_of, tuple(every), factors)


def _options_of(optimizer: OptimizerConfig | TorchRule) -> list[str]:
    """The names of the options that a group may have beside the factor."""
    return [*(OPTIONS[optimizer.optimizer] if isinstance(optimizer, OptimizerConfig) else optimizer.options)]


def _fields(options: Mapping[str, Any], optimizer: OptimizerConfig | TorchRule) -> dict[str, Any]:
    """Options by the names of what updates."""
    plain = {name: value for name, value in options.items() if name != FACTOR}
    if isinstance(optimizer, TorchRule):
        return {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    fields = OPTIONS[optimizer.optimizer]
    values = {name: value if isinstance(value, tuple | list) else (value,) for name, value in plain.items()}
    return {field: float(number) for name in values for field, number in zip(fields[name], values[name], strict=True)}


def _wrong(pattern: object, options: object, known: list[str]) -> Iterator[str]:
    """What is wrong with a line, but for what it names."""
    if not isinstance(pattern, str):
        yield f"{pattern!r} is no pattern of names"
    elif not isinstance(options, Mapping) or not options:
        yield f"{pattern!r} has {options!r}: a mapping from options to values is needed, as {{'weight_decay': 0.0}}"
    else:
        for name, value in options.items():
            if name != FACTOR and name not in known:
                hint = f"; the rate is that of the step, times {FACTOR}" if name == "lr" else ""
                yield f"{pattern!r} has {name}; the optimizer's groups have {', '.join((FACTOR, *known))}{hint}"
            elif name in _BOUNDS and not _fits(name, value):
                yield f"{pattern!r} has {name} {value!r}: {_BOUNDS[name][0]} is needed"


def _fits(name: str, value: object) -> bool:
    numbers = value if isinstance(value, tuple | list) else (value,)
    is_number = all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)
    return is_number and (len(numbers) == 2) is (name == "betas") and all(map(_BOUNDS[name][1], numbers))


def _numbers(given: GivenGroups, units: Units) -> tuple[dict[str, int], list[str]]:
    """(the number of each trained parameter's group, what is wrong with patterns)."""
    trained = {units.names[id(each)]: each.requires_grad for unit in units.units for each in unit.parameters()}
    patterns = [pattern for pattern in given if isinstance(pattern, str)]
    fits = {pattern: [name for name in trained if fnmatchcase(name, pattern)] for pattern in patterns}
    numbers = dict.fromkeys((name for name, is_trained in trained.items() if is_trained), 0)
    problems = list[str]()
    for number, pattern in enumerate(patterns, 1):
        fresh = [name for name in fits[pattern] if numbers.get(name) == 0]
        numbers |= dict.fromkeys(fresh, number)
        if not fits[pattern]:
            others = ((name, own) for name, own in further_names(units).items() if fnmatchcase(name, pattern))
            shared = next((f": {name} goes by its first name, {own}" for name, own in others), "")
            example = shared or f", such as {next(iter(trained), 'none')}"
            problems.append(f"{pattern!r} fits the name of no parameter{example}")
        elif not any(trained[name] for name in fits[pattern]):
            problems.append(f"{pattern!r} fits frozen parameters alone, such as {fits[pattern][0]}")
        elif not fresh:
            problems.append(f"{pattern!r} fits parameters of earlier patterns alone, such as {fits[pattern][0]}")
    return numbers, problems
