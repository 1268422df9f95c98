"""The options of a run as a table, read from the dataclasses: name, type, choices, aliases and sentence of each.

`Option.from_words` and `Option.from_value` convert the words of a command line or the value of a file to a field's
value. They raise ValueError with a reason, before which the caller puts the place of the value.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import re
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Any, get_type_hints

from megazero.config.fields import taken_apart
from megazero.config.foreign_flags import FLAGS, OF_COMMANDS, normalise_flag, our_flag_for, our_value_for
from megazero.config.layers.pattern import LayerPattern, RotarySet
from megazero.config.lengths import COUNTED, FRACTIONS, Length, Measure, bytes_of, measured_name, whole_number
from megazero.config.rotary import RotaryScaling
from megazero.config.schema import Run
from megazero.config.tiers import TierShare
from megazero.system import extensions
from megazero.system.reading import fault_of_path, shown
from megazero.system.words import either

_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a word",
    bool: "true or false",
    TierShare: "a word",
    LayerPattern: "a word",
    RotaryScaling: "a word",
    RotarySet: "a word",
    Length: "a length",
}

PARSED: tuple[type, ...] = (TierShare, LayerPattern, RotaryScaling, RotarySet)
"""Types of values that are words in files and flags: `parsed` makes one of its word, and `str` gives the word."""

_PLACE = re.compile(r"(NAME )?(DIR|FILE|PATH|PREFIX)(\.\w+)?")
"""The name of a value that is the name of a file or folder."""


@dataclass(frozen=True)
class Option:
    """One field of one section. The other fields are those of `config.fields.option`.

    section   name of the section of `Run`
    name      name of the field
    kind      int, float, bool, str, Length or one of `PARSED`; of a tuple, the type of its items
    optional  whether None is allowed
    many      whether it is a tuple
    sentence  the string literal under the field
    """

    section: str
    name: str
    kind: type
    optional: bool
    many: bool
    default: Any
    sentence: str
    choices: tuple[str, ...] | None
    extended_by: str | None
    aliases: tuple[str, ...]
    metavar: str | None
    alone: str | None
    derived: str | None
    common: bool
    expert: bool
    size: bool
    none_is_a_value: bool
    earlier: str | None
    measures: tuple[Measure, ...]
    needs: str | None
    idle_without: str | None

    @property
    def known_choices(self) -> tuple[str, ...]:
        """The choices, with those that installed packages add."""
        added = () if self.extended_by is None else extensions.names(self.extended_by)
        return (*(self.choices or ()), *(name for name in added if name not in (self.choices or ())))

    @property
    def is_place(self) -> bool:
        """Whether the value names files or folders of a host, as the name of the value in the help says."""
        return self.kind is str and _PLACE.fullmatch(self.metavar or "") is not None

    @property
    def shown_default(self) -> str:
        """The default as help and documentation show it: the value, or `derived`."""
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
        return (self.flag, *self.aliases, *("--" + key.replace("_", "-") for key in self.measured_keys))

    @property
    def measured_keys(self) -> tuple[str, ...]:
        """Names of a length that say what it counts, as keys of a file: lr_warmup_iters, train_samples."""
        return tuple(measured_name(self.name, measure) for measure in self.measures)

    def measure_of(self, name: str) -> Measure | None:
        """What a length counts that is given by this flag or key; None where its value says so."""
        return next((measure for measure in self.measures if name.endswith(measure.value)), None)

    @property
    def negations(self) -> tuple[str, ...]:
        """Flags that switch a boolean off: --no-x for --x, and --x where the field itself is called no_x."""
        if self.kind is not bool:
            return ()
        return tuple("--" + flag[5:] if flag.startswith("--no-") else "--no-" + flag[2:] for flag in self.flags)

    def value_in(self, run: Run) -> Any:
        return getattr(getattr(run, self.section), self.name)

    @property
    def knows_none(self) -> bool:
        """Whether the word none says that there is no value. Where any word is a value, none is one."""
        any_word = self.none_is_a_value or (self.kind is str and not self.choices)
        return not any_word and (self.optional or self.default == ())

    @property
    def no_value(self) -> Any:
        """What the word none says: nothing, or the derived default, is None, and no items are an empty tuple."""
        return None if self.optional else ()

    def from_words(self, words: Sequence[str], measure: Measure | None = None) -> Any:
        """The value of the words after a flag. measure: `measure_of` the flag. Raises ValueError."""
        if list(words) == ["none"] and self.knows_none:
            return self.no_value
        if self.many:
            if not words:
                raise ValueError("needs one value or more")
            numbers = self.kind in (int, float)  # whose commas stand between values
            parts = [part for word in words for part in word.split(",") if part] if numbers else words
            return tuple(self._scalar(part) for part in parts)
        if not words and self.alone is not None:
            return self.alone
        if self.kind is Length and len(words) == 2 and measure is None:
            words = [" ".join(words)]
        if len(words) != 1:
            raise ValueError(
                f"takes one value, not {len(words)} ({' '.join(words)})"
                if words
                else "takes one value, and none follows"
            )
        return self._scalar(words[0]) if self.kind is not Length else self._length(words[0], measure)

    def from_value(self, value: object, measure: Measure | None = None) -> Any:
        """The field's value for a YAML or JSON value. measure: `measure_of` the key. Raises ValueError."""
        if (value is None and self.optional) or (value == "none" and self.knows_none):
            return self.no_value
        if self.many:
            if isinstance(value, str | int | float) and not isinstance(value, bool):
                value = str(value).split() if self.kind is str else [value]
            if not isinstance(value, list | tuple):
                raise ValueError(f"{shown(value)} is not a list")
            return tuple(self._scalar(item) for item in value)
        return self._scalar(value) if self.kind is not Length else self._length(value, measure)

    def _length(self, value: object, measure: Measure | None) -> Length:
        if isinstance(value, Length):
            length = value
        elif measure is not None:
            count = replace(self, kind=float if measure in FRACTIONS else int)
            return Length(count._scalar(value), measure, by_name=True)
        elif isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"{shown(value)} is not {_WORDS[self.kind]}")
        else:
            length = Length.parsed(str(value), self.measures)
        if length.measure not in self.measures:
            taken = either(COUNTED[known] for known in self.measures)
            verb = "is" if length.measure is Measure.SHARE else "counts"
            raise ValueError(f"{length} {verb} {COUNTED[length.measure]}; it takes {taken}")
        return length

    def _scalar(self, value: object) -> Any:
        if self.choices is not None:
            return self._choice(value)
        if self.kind in PARSED and isinstance(value, self.kind):
            return value
        if isinstance(value, bool) != (self.kind is bool) or not isinstance(value, str | int | float):
            raise ValueError(f"{shown(value)} is not {_WORDS[self.kind]}")
        if self.kind is bool:
            return value
        if self.kind is str or self.kind in PARSED:
            if value == "":  # from an unset shell variable: --save "$DIR" would train and save nothing
                raise ValueError("is empty")
            if fault := fault_of_path(str(value)):  # nearly all words are paths, and no other word needs one of these
                raise ValueError(f"{shown(value)} {fault}")
            return str(value) if self.kind is str else self.kind.parsed(str(value))  # type: ignore[attr-defined]
        try:
            if self.size:
                return bytes_of(value)
            if self.kind is int:
                return whole_number(value)
            number = float(value)
        except (ValueError, OverflowError):
            kind = "a number of bytes, such as 500MB or 4GB" if self.size else _WORDS[self.kind]
            raise ValueError(f"{shown(value)} is not {kind}") from None
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
        ours = our_value_for(self.name, str(value))
        hint = f"; did you mean {ours}?" if ours else did_you_mean(str(value).lower(), known)
        listed = ", ".join(known) or f"any, for no installed package adds to {self.extended_by}"
        raise ValueError(f"{shown(str(value))} is not one of {listed}{hint}")


def did_you_mean_flag(flag: str, known: Iterable[str]) -> str:
    """`; did you mean --x?` for a flag of another program or a misspelled one; empty if nothing is similar."""
    elsewhere = our_flag_for(flag)
    if elsewhere is None:
        return did_you_mean("--" + flag.lstrip("-").replace("_", "-"), known) or _similar_elsewhere(flag)
    return f"; did you mean {elsewhere}?" if elsewhere.startswith("--") else f"; it is {elsewhere}"


def did_you_mean_flag_of(flag: str, known: Iterable[str]) -> str:
    """The same for a command with few flags: a flag of another program counts where it means one of these."""
    known, word = tuple(known), normalise_flag(flag)
    here = [ours for ours, names in OF_COMMANDS.items() if word in names and ours in known]
    elsewhere = our_flag_for(flag)
    if not here and elsewhere is not None and re.split("[ ,]", elsewhere)[0] in known:
        here = [elsewhere]
    return f"; did you mean {here[0]}?" if here else did_you_mean("--" + word, known)


def did_you_mean_key(key: str, known: Iterable[str]) -> str:
    """The same for a key of a file, in which names have underscores and no leading dashes."""
    elsewhere = our_flag_for(key)
    if elsewhere is not None:
        return f"; here it is {elsewhere}"
    return did_you_mean(key.replace("-", "_"), known) or _similar_elsewhere(key)


def _similar_elsewhere(word: str) -> str:
    """The same for a misspelled name of other programs: `learning-rte`, `max_seqlen`."""
    near = difflib.get_close_matches(normalise_flag(word), sorted(FLAGS), n=1, cutoff=0.8)
    return f"; did you mean {near[0]}, which here is {FLAGS[near[0]]}?" if near else ""


def did_you_mean(word: str, known: Iterable[str], most: int = 1) -> str:
    """`; did you mean X?` with the most similar known names, `most` at most; empty if none is similar."""
    bare = {name.lstrip("-"): name for name in sorted(set(known))}  # leading dashes would make all flags similar
    near = difflib.get_close_matches(word.lstrip("-"), bare, n=most, cutoff=0.66)
    return f"; did you mean {' or '.join(bare[name] for name in near)}?" if near else ""


def sentences(cls: type) -> dict[str, str]:
    """Field name -> the string literal under the field, read from the source, since Python does not keep it."""
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
    """The options of a dataclass's fields."""
    hints, under = get_type_hints(cls), sentences(cls)
    made = []
    for item in fields(cls):
        assert item.default is not MISSING and item.name in under, (
            f"{cls.__name__}.{item.name} needs a default and a sentence"
        )
        kind, optional, many = taken_apart(hints[item.name])
        assert many == item.metadata["many"], item.name
        derived = item.metadata["derived"]
        assert item.default not in (None, ()) or derived, f"{cls.__name__}.{item.name}: what is its default?"
        made.append(
            Option(section, item.name, kind, optional, default=item.default, sentence=under[item.name], **item.metadata)
        )
    return tuple(made)


@cache
def sections() -> Mapping[str, type]:
    """Section name -> dataclass, in the order of `Run`."""
    return types.MappingProxyType(dict(get_type_hints(Run)))


@cache
def listed_options() -> Mapping[str, Option]:
    """Those of `run_options` that the help lists: not the settings that hardly anybody turns."""
    return types.MappingProxyType({name: known for name, known in run_options().items() if not known.expert})


@cache
def run_options() -> Mapping[str, Option]:
    """Field name -> option, of all sections. Names are unique over the sections."""
    table: dict[str, Option] = {}
    for section, cls in sections().items():
        for option in options_of(cls, section):
            assert option.name not in table, f"{option.name} is a field of two sections"
            table[option.name] = option
    return types.MappingProxyType(table)


def build_run(settings: Mapping[str, Any]) -> Run:
    """The run with these settings (field name -> value) and defaults for all other fields. Nothing is checked."""
    parts: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for name, value in settings.items():
        parts[run_options()[name].section][name] = value
    return Run(**{section: cls(**parts[section]) for section, cls in sections().items()})
