"""The command line: words to settings, and `--help`.

The flags are those of `options.run_options()`. argparse writes the help, and that is all it does here: it stops at
the first mistake, takes abbreviations, and converts with messages that know nothing of each other. Maintained
libraries that make flags from dataclasses (jsonargparse, tyro, simple-parsing, Hydra) were looked at: none carries
aliases and a negation per field and also reports every mistake of a command line in one message, so the few lines
that cut words into flags and values stand below.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from megazero.config.level import Level
from megazero.config.options import Option, did_you_mean_flag, options_of, run_options, sections
from megazero.config.schema import option

_SHORT_FORMS = {"--fp16": ("precision", "fp16"), "--bf16": ("precision", "bf16")}


@dataclass(frozen=True)
class Command:
    """What to run, apart from what the run is."""

    preset: str | None = option(None, metavar="NAME")
    "A published model with its training recipe, beneath all other settings; names are listed below."
    config: str | None = option(None, metavar="FILE.yaml")
    "Settings from a YAML file, sections as below; flags win over it. A run saves its own as such a file."
    deepspeed_config: str | None = option(None, metavar="FILE.json")
    "Settings from a DeepSpeed configuration file, between --preset and --config; it may not contradict a flag."
    validate_only: bool = option(False)
    "Check the run and what it names (data, tokenizer, checkpoint), print a verdict, start nothing."
    skip_files: bool = option(False)
    "With --validate-only: leave out what is named, which may be on another machine."
    print_config: bool = option(False)
    "Print the resolved run as YAML, which --config takes, and start nothing."
    world_size: int | None = option(None, metavar="N")
    "With --validate-only or --print-config: the number of ranks to check for. torchrun sets it otherwise."
    help: bool = option(False, "-h")
    "Show this and exit."

    @property
    def starts_nothing(self) -> bool:
        """Whether the run is only looked at."""
        return self.validate_only or self.print_config

    @property
    def looks_at_files(self) -> bool:
        """Whether what the run names has to be there."""
        return not self.skip_files if self.validate_only else not self.print_config


@dataclass(frozen=True)
class CommandLine:
    """A command line taken apart: flags of `Command` are in `command`, all others in `level`."""

    level: Level
    command: Command


@dataclass(frozen=True)
class _Meaning:
    """What a flag does: sets `option` to `constant`, or to the words that follow."""

    option: Option
    constant: Any = None


@cache
def _flag_table() -> Mapping[str, _Meaning]:
    table: dict[str, _Meaning] = {}

    def add(flag: str, meaning: _Meaning) -> None:
        assert flag not in table, f"{flag} means two things"
        table[flag] = meaning

    commands = options_of(Command, "command")
    for known in (*commands, *run_options().values()):
        for flag in known.flags:
            add(flag, _Meaning(known, True if known.kind is bool else None))
        for flag in known.negations if known.section != "command" else ():
            add(flag, _Meaning(known, False))
    for flag, (name, value) in _SHORT_FORMS.items():
        add(flag, _Meaning(run_options()[name], value))
    return MappingProxyType(table)


def option_called(word: str) -> Option | None:
    """The option of a file's key: a field's name or an alias, with dashes or underscores."""
    meaning = _flag_table().get("--" + word.lstrip("-").replace("_", "-"))
    usable = meaning is not None and meaning.option.section != "command" and meaning.constant in (None, True)
    return meaning.option if meaning is not None and usable and word.lstrip("-") not in ("fp16", "bf16") else None


def _is_flag(word: str) -> bool:
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


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
    """Take a command line apart; what is wrong with it is in the level's problems. Of a repeated flag the last counts,
    so that a script's flags can be overridden behind it."""
    level, command = Level("the command line"), {}
    stray, groups = _cut(argv)
    level.problems += [f"{word!r} stands alone: a value follows its --flag" for word in stray]
    for flag, words in groups:
        meaning = _flag_table().get(flag)
        if meaning is None:
            shown = " ".join([flag, *words])
            level.problems.append(f"{shown}: there is no {flag}{did_you_mean_flag(flag, _flag_table())}")
            continue
        known = meaning.option
        try:
            if meaning.constant is not None:
                if words:
                    raise ValueError(f"takes no value, but {' '.join(words)!r} follows" + _negation(known))
                value = meaning.constant
            else:
                value = known.from_words(words)
        except ValueError as reason:
            level.problems.append(f"{flag}: {reason}")
            level.bad.add(known.name)
            continue
        if known.section == "command":
            command[known.name] = value
            continue
        level.put(known.name, value, flag)
    return CommandLine(level, Command(**command))


def _negation(known: Option) -> str:
    return f" (write {known.flag} or {known.negations[0]})" if known.kind is bool and known.section != "command" else ""


def _metavar(known: Option) -> str:
    if known.choices:
        return "{" + ",".join(known.choices) + "}"
    return known.metavar or {int: "N", float: "X", str: "WORD"}[known.kind]


def _described(known: Option) -> str:
    text = known.sentence
    tells = "default" in text.lower() or known.section == "command"
    if not tells and known.default not in (None, (), ""):
        shown = {True: "on", False: "off"}[known.default] if known.kind is bool else known.default
        shown = f"{shown:g}" if known.kind is float else shown
        text = f"{text} (default: {shown})"
    if known.kind is bool and known.default is True:
        text += f" {known.negations[0]} switches it off."
    extra = [f for f in known.aliases if f.startswith("--")]
    if known.name == "precision":
        extra += ["--fp16", "--bf16"]
    return (text + (f" Also: {', '.join(extra)}." if extra else "")).replace("%", "%%")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps flags whole: argparse itself breaks lines at their dashes."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)


def help_text(program: str = "pretrain_gpt.py", presets: Sequence[str] = ()) -> str:
    """The whole `--help`: one group per section, one entry per option with its sentence."""
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"torchrun --nproc-per-node N {program} [flags]\n       python {program} [flags]        (one rank)",
        description=textwrap.fill(
            "Pretrain GPT- and BLOOM-style language models with tensor, pipeline and data parallelism and ZeRO. "
            "Without any flag, a 12-layer model is trained on the source of Python's standard library for 100 "
            "iterations or 10 minutes.",
            width - 2,
        ),
        epilog=_epilog(presets),
        add_help=False,
        allow_abbrev=False,
        formatter_class=lambda prog: _Formatter(prog, max_help_position=34, width=width),
    )
    command = parser.add_argument_group("what to run")
    for known in options_of(Command, "command"):
        _add(command, known)
    for section, cls in sections().items():
        group = parser.add_argument_group(section, (cls.__doc__ or "").strip())
        for known in run_options().values():
            if known.section == section:
                _add(group, known)
    return parser.format_help()


def _add(group: argparse._ArgumentGroup, known: Option) -> None:
    flags = ([a for a in known.aliases if not a.startswith("--")]) + [known.flag]
    if known.kind is bool:
        group.add_argument(*flags, action="store_true", help=_described(known))
    else:
        group.add_argument(
            *flags,
            metavar=_metavar(known),
            nargs="+" if known.many else "?" if known.alone else None,
            help=_described(known),
        )


def _epilog(presets: Sequence[str]) -> str:
    lines = [
        "Flags win over --config, that over --deepspeed-config, that over --preset, that over the defaults.",
        "Booleans have a negation: --no-overlap. Of a repeated flag the last one counts.",
        "A default that is derived comes back with the word none: --rampup-batch-size none.",
        "Exit codes: 0 finished or stopped as asked, 2 the configuration is wrong (all of it is said at once), 1 "
        "anything else.",
    ]
    families: dict[str, list[str]] = {}
    for preset in presets:
        families.setdefault(preset.split("-")[0], []).append(preset)
    return "\n".join(
        lines + ["", "presets:"] * bool(families) + [f"  {' '.join(names)}" for names in families.values()]
    )
