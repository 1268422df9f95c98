"""The command line: from words to settings.

The flags are those of `options.run_options()`. argparse is not used, since it stops at the first mistake and accepts
abbreviations. Libraries that make flags from dataclasses (jsonargparse, tyro, simple-parsing, Hydra) were compared:
none has aliases and a negation per field and also reports every mistake of a command line in one message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from megazero.config.fields import option
from megazero.config.lengths import measured_name
from megazero.config.options import Option, did_you_mean_flag, options_of, run_options
from megazero.config.source import ConfigSource

SHORT_FORMS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"--fp16": ("precision", "fp16"), "--bf16": ("precision", "bf16")}
)
"""A flag without a value -> (the field that it sets, the value)."""


@dataclass(frozen=True)
class CommandOptions:
    """Where the run's settings come from, and what to do with the run."""

    preset: str | None = option(None, metavar="NAME", derived="none", common=True)
    "A published model and its recipe, as bloom-560m."
    config: str | None = option(None, metavar="FILE.yaml", derived="none", common=True)
    "A YAML file of settings, as a saved run's run.yaml."
    deepspeed_config: str | None = option(None, metavar="FILE.json", derived="none")
    "Settings from a DeepSpeed configuration file, between --preset and --config. It may not contradict a flag."
    validate_only: bool = option(False, common=True)
    "Check the run and its files; start nothing."
    skip_files: bool = option(False)
    "With --validate-only: do not look for the files, which may be on another machine."
    print_config: bool = option(False, common=True)
    "Print the run as YAML for --config; start nothing."
    world_size: int | None = option(None, metavar="N", derived="torchrun's, else 1", common=True)
    "Number of ranks for --validate-only and --print-config."
    ranks: int | None = option(None, metavar="N", derived="a launcher's, else 1", common=True)
    "Start N ranks on this host, end with their status."
    help: bool = option(False, "-h", common=True)
    "Show the flags that most runs need."
    help_all: bool = option(False, common=True)
    "Show all flags, by what they are for."

    @property
    def starts_nothing(self) -> bool:
        """Whether the run is only checked or printed."""
        return self.validate_only or self.print_config

    def ranks_to_check(self, here: int | None) -> int | None:
        """The number of ranks for which the run is checked. here: the number if no flag gives one."""
        return next((number for number in (self.world_size, self.ranks) if number is not None), here)

    @property
    def looks_at_files(self) -> bool:
        """Whether the files that the run names must exist."""
        return not self.skip_files if self.validate_only else not self.print_config


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line: flags of `CommandOptions` are in `command`, all others in `source`."""

    source: ConfigSource
    command: CommandOptions


@dataclass(frozen=True)
class _Meaning:
    """The effect of a flag: it sets `option` to `constant`, or, if that is None, to the words behind the flag."""

    option: Option
    constant: Any = None


def known_flags() -> frozenset[str]:
    """All flags of a run, with both dashes."""
    return frozenset(_flag_table())


@cache
def _flag_table() -> Mapping[str, _Meaning]:
    table: dict[str, _Meaning] = {}

    def add(flag: str, meaning: _Meaning) -> None:
        assert flag not in table, f"{flag} means two things"
        table[flag] = meaning

    commands = options_of(CommandOptions, "command")
    for known in (*commands, *run_options().values()):
        for flag in known.flags:
            add(flag, _Meaning(known, True if known.kind is bool else None))
        for flag in known.negations if known.section != "command" else ():
            add(flag, _Meaning(known, False))
    for flag, (name, value) in SHORT_FORMS.items():
        add(flag, _Meaning(run_options()[name], value))
    return MappingProxyType(table)


def option_called(word: str) -> Option | None:
    """The option of a file's key: a field's name or an alias, with dashes or underscores."""
    meaning = _flag_table().get("--" + word.lstrip("-").replace("_", "-"))
    usable = meaning is not None and meaning.option.section != "command" and meaning.constant in (None, True)
    return meaning.option if meaning is not None and usable and word.lstrip("-") not in ("fp16", "bf16") else None


def fields_for_flags(text: str) -> str:
    """A message with the names of fields in place of flags: "--tp 3" is "parallel.tp 3"."""

    def field(found: re.Match[str]) -> str:
        meaning = _flag_table().get(found[0])
        if meaning is None or meaning.option.section == "command":
            return found[0]
        value = {None: "", True: "", False: " false"}.get(meaning.constant, f" {meaning.constant}")
        measure = meaning.option.measure_of(found[0])
        name = meaning.option.name if measure is None else measured_name(meaning.option.name, measure)
        return f"{meaning.option.section}.{name}{value}"

    return re.sub(r"(?<![\w-])--[a-z0-9][a-z0-9-]*", field, text)


def _is_flag(word: str) -> bool:
    """Whether a word is a flag, and not the value of the flag before it."""
    if not word.startswith("-") or word == "-":
        return False
    rest = word[1:].lstrip()
    # No flag begins with a number. What is wrong with -1, -5%, -2 samples or the list -1,1,1 is said as of a value.
    return not rest[:2].lstrip(".")[:1].isdigit() and rest.lower() not in ("inf", "infinity", "nan")


def _cut(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """(words before any flag, [(flag, its words)])."""
    stray: list[str] = []
    groups: list[tuple[str, list[str]]] = []
    for word in argv:
        if _is_flag(word):
            flag, equals, value = word.partition("=")
            groups.append((flag, [value] if equals else []))
        else:
            (groups[-1][1] if groups else stray).append(word)
    return stray, groups


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Parse a command line. Mistakes in it are collected in the source's `problems`.

    Of a repeated flag the last one counts, so that flags behind a script's override it.
    """
    source, command = ConfigSource("the command line"), {}
    stray, groups = _cut(argv)
    source.problems += [
        f"{word!r} stands alone: a value follows its --flag, such as --data-path my-data" for word in stray
    ]
    for flag, words in groups:
        meaning = _flag_table().get(flag)
        if meaning is None:
            shown = " ".join([flag, *words])
            source.problems.append(f"{shown}: there is no {flag}{did_you_mean_flag(flag, _flag_table())}")
            continue
        known = meaning.option
        try:
            if meaning.constant is not None:
                if words:
                    raise ValueError(f"takes no value, but {' '.join(words)!r} follows" + _negation(known))
                value = meaning.constant
            else:
                value = known.from_words(words, known.measure_of(flag))
        except ValueError as reason:
            source.problems.append(f"{flag}: {reason}")
            source.bad.add(known.name)
            continue
        if known.section == "command":
            command[known.name] = value
            continue
        source.put(known.name, value, flag)
    return CommandLine(source, CommandOptions(**command))


def _negation(known: Option) -> str:
    return f" (write {known.flag} or {known.negations[0]})" if known.kind is bool and known.section != "command" else ""
