"""The options of a run as a table, read from the dataclasses: name, type, choices, aliases and the sentence of each.

`Option.from_words` and `Option.from_value` turn what a command line or a file holds into a field's value, or raise
ValueError with a reason that the caller prefixes with where the value stood.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from megazero.config import extensions
from megazero.config.schema import Run
from megazero.config.vocabulary import choice_elsewhere, flag_elsewhere
from megazero.system.reading import shown

_WORDS = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}


@dataclass(frozen=True)
class Option:
    """One field of one section."""

    section: str
    name: str
    kind: type
    optional: bool
    many: bool
    default: Any
    choices: tuple[str, ...] | None
    extended_by: str | None
    aliases: tuple[str, ...]
    metavar: str | None
    alone: str | None
    derived: str | None
    common: bool
    sentence: str

    @property
    def known_choices(self) -> tuple[str, ...]:
        """The choices with those that installed packages add."""
        added = () if self.extended_by is None else extensions.names(self.extended_by)
        return (*(self.choices or ()), *(name for name in added if name not in (self.choices or ())))

    @property
    def shown_default(self) -> str:
        """The default as help and documentation show it: the value, or in words what it follows from."""
        if self.derived is not None:
            return self.derived
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag, *self.aliases)

    @property
    def negations(self) -> tuple[str, ...]:
        """Flags that switch a boolean off: --no-x for --x, and --x where the field itself is called no_x."""
        if self.kind is not bool:
            return ()
        return tuple("--" + flag[5:] if flag.startswith("--no-") else "--no-" + flag[2:] for flag in self.flags)

    def from_words(self, words: Sequence[str]) -> Any:
        """The value that the words after a flag stand for; "none" is what takes a preset's choice back."""
        if self.optional and list(words) == ["none"] and (self.kind is not str or self.choices):
            return None
        if self.many:
            if not words:
                raise ValueError("needs one value or more")
            parts = [part for word in words for part in word.split(",") if part] if self.kind is not str else words
            return tuple(self._scalar(part) for part in parts)
        if not words and self.alone is not None:
            return self.alone
        if len(words) != 1:
            raise ValueError(f"takes one value, not {len(words)}" + (f" ({' '.join(words)})" if words else ""))
        return self._scalar(words[0])

    def from_value(self, value: object) -> Any:
        """The value that a YAML or JSON value stands for."""
        if value is None and self.optional:
            return None
        if self.many:
            if isinstance(value, str | int | float) and not isinstance(value, bool):
                value = [value] if self.kind is not str else str(value).split()
            if not isinstance(value, list | tuple):
                raise ValueError(f"{shown(value)} is not a list")
            return tuple(self._scalar(item) for item in value)
        return self._scalar(value)

    def _scalar(self, value: object) -> Any:
        if self.choices is not None:
            return self._choice(value)
        if isinstance(value, bool) != (self.kind is bool) or not isinstance(value, str | int | float):
            raise ValueError(f"{shown(value)} is not {_WORDS[self.kind]}")
        if self.kind is bool:
            return value
        if self.kind is str:
            if value == "":  # what an unset shell variable leaves: --save "$DIR" would train and keep nothing
                raise ValueError("is empty")
            return str(value)
        try:
            if self.kind is int:
                return whole_number(value)
            number = float(value)
        except (ValueError, OverflowError):
            raise ValueError(f"{shown(value)} is not {_WORDS[self.kind]}") from None
        if not math.isfinite(number):
            raise ValueError(f"{shown(value)} is not a finite number")
        return number

    def _choice(self, value: object) -> str:
        assert self.choices is not None
        for choice in self.choices:
            if str(value).lower() == choice.lower():
                return choice
        known = self.known_choices
        if value in known:
            return str(value)
        ours = choice_elsewhere(self.name, str(value))
        hint = f"; did you mean {ours}?" if ours else did_you_mean(str(value).lower(), known)
        listed = ", ".join(known) or f"any, for no installed package adds to {self.extended_by}"
        raise ValueError(f"{shown(str(value))} is not one of {listed}{hint}")


def whole_number(value: str | int | float) -> int:
    """An integer, also where it is written 220_000_000 or 2e8."""
    try:
        return int(value) if not isinstance(value, float) else _exact(value)
    except ValueError:
        return _exact(float(value))


def _exact(number: float) -> int:
    if not number.is_integer():
        raise ValueError(number)
    return int(number)


def did_you_mean_flag(flag: str, known: Iterable[str]) -> str:
    """`; did you mean --x?`: what a flag of another program is here, else a flag that is spelled alike."""
    elsewhere = flag_elsewhere(flag)
    if elsewhere is None:
        return did_you_mean("--" + flag.lstrip("-").replace("_", "-"), known)
    return f"; did you mean {elsewhere}?" if elsewhere.startswith("--") else f"; it is {elsewhere}"


def did_you_mean_key(key: str, known: Iterable[str]) -> str:
    """The same for a key of a file, where flags are spelled without dashes in front and with underscores."""
    elsewhere = flag_elsewhere(key)
    return f"; here it is {elsewhere}" if elsewhere else did_you_mean(key.replace("-", "_"), known)


def did_you_mean(word: str, known: Iterable[str], most: int = 1) -> str:
    """`; did you mean X?`, with the nearest names, or nothing where nothing is near."""
    bare = {name.lstrip("-"): name for name in sorted(set(known))}  # dashes that all have in common are no likeness
    near = difflib.get_close_matches(word.lstrip("-"), bare, n=most, cutoff=0.66)
    return f"; did you mean {' or '.join(bare[name] for name in near)}?" if near else ""


def sentences(cls: type) -> dict[str, str]:
    """The string literal under each field of a class, which Python itself throws away."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            assert isinstance(statement.target, ast.Name)
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def options_of(cls: type, section: str) -> tuple[Option, ...]:
    """The options that the fields of a dataclass are."""
    hints, under = get_type_hints(cls), sentences(cls)
    made = []
    for item in fields(cls):
        assert item.default is not MISSING and item.name in under, (
            f"{cls.__name__}.{item.name} needs a default and a sentence"
        )
        kind, optional, many = _taken_apart(hints[item.name])
        meta = item.metadata
        assert item.default not in (None, ()) or meta["derived"], f"{cls.__name__}.{item.name}: what is its default?"
        made.append(
            Option(
                section=section,
                name=item.name,
                kind=kind,
                optional=optional,
                many=many,
                default=item.default,
                choices=meta["choices"],
                extended_by=meta["extended_by"],
                aliases=meta["aliases"],
                metavar=meta["metavar"],
                alone=meta["alone"],
                derived=meta["derived"],
                common=meta["common"],
                sentence=under[item.name],
            )
        )
        assert many == meta["many"], item.name
    return tuple(made)


def _taken_apart(hint: Any) -> tuple[type, bool, bool]:
    """(int, float, bool or str; whether None is allowed; whether it is a tuple) of a field's type."""
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
        optional = True
    if get_origin(hint) is tuple:
        return get_args(hint)[0], optional, True
    return hint, optional, False


@cache
def sections() -> Mapping[str, type]:
    """Section name -> dataclass, in the order of `Run`."""
    return types.MappingProxyType(dict(get_type_hints(Run)))


@cache
def run_options() -> Mapping[str, Option]:
    """Field name -> option of every section; names are unique over the sections."""
    table: dict[str, Option] = {}
    for section, cls in sections().items():
        for option in options_of(cls, section):
            assert option.name not in table, f"{option.name} is a field of two sections"
            table[option.name] = option
    return types.MappingProxyType(table)
