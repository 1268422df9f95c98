"""How a command shows its help: what it does, examples in both forms, its flags."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megazero.cli.exit_status import end_rank, say
from megazero.config.foreign_flags import our_value_for
from megazero.config.options import did_you_mean, did_you_mean_flag_of
from megazero.config.source import ConfigError
from megazero.system.reading import shown
from megazero.system.status import MISTAKEN

_PHRASES = (
    (r"^argument ", ""),
    (r"^the following arguments are required", "these are missing"),
    (r"invalid int value: (.*)", r"\1 is not a whole number"),
    (r"invalid float value: (.*)", r"\1 is not a number"),
    (r"expected one argument", "takes one value, and none follows"),
    (r"expected at least one argument", "needs one value or more"),
)
"""Patterns of argparse's phrases, and what the messages about a run's flags say in their place."""


class Parser(argparse.ArgumentParser):
    """argparse's parser with messages as those of a run's flags: one line, which names the nearest flag or value.

    A help that cannot be written ends the program with status 141 or 1; argparse ignores that error.

    of_ranks: whether the command's processes may be ranks of one grid, of which those with other flags have to know
    why one of them ends.
    """

    of_ranks = False

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # so -1xhdr and -5e-4 are values, too: no flag begins so

    def print_help(self, file: Any = None) -> None:
        say(self.format_help().rstrip("\n"))

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """The flags' values. Ends the program with status 2 and one line for what it does not know.

        Unknown flags are reported first. argparse reports missing flags first, even where one of them is misspelled.
        """
        argv = sys.argv[1:] if args is None else list(args)
        unknown = [] if {"-h", "--help"} & {*argv} else self._unknown(argv)
        if unknown:
            known = [flag for flag in self._option_string_actions if flag.startswith("--")]
            self.error(" and ".join(f"there is no {flag}{did_you_mean_flag_of(flag, known)}" for flag in unknown))
        values, unparsed = self.parse_known_args(argv, namespace)
        if unparsed and unparsed[0].startswith("-"):
            self.error(f"there is no {unparsed[0]}")
        if unparsed:
            self.error(f"{unparsed[0]!r} stands alone: a value follows its --flag")
        return values

    def error(self, message: str) -> NoReturn:
        """End the program with status 2 and one line, which only one of several ranks prints."""
        for pattern, phrase in _PHRASES:
            message = re.sub(pattern, phrase, message)
        message = f"{message} ({self.prog} --help lists the flags)"
        if self.of_ranks and os.environ.get("WORLD_SIZE", "1") != "1":

            def refuse(environment: object) -> NoReturn:
                raise ConfigError([message])

            end_rank(refuse, ())
        self.exit(MISTAKEN, f"error: {message}\n")

    def _unknown(self, argv: Sequence[str]) -> list[str]:
        """The flags that the command does not have. A word with a blank is a value, as for argparse."""
        before_values = argv[: argv.index("--")] if "--" in argv else argv  # behind -- nothing is a flag
        flags = (word.partition("=")[0] for word in before_values if word.startswith("--") and " " not in word)
        return [flag for flag in flags if not any(known.startswith(flag) for known in self._option_string_actions)]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is none of the choices. argparse calls this for every value."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        our_value = our_value_for(action.dest, str(value))  # for a word of another program
        hint = f"; did you mean {our_value}?" if our_value in choices else did_you_mean(str(value).lower(), choices)
        raise argparse.ArgumentError(action, f"{shown(str(value))} is not one of {', '.join(choices)}{hint}")


def command_parser(name: str, description: str, examples: Sequence[str], epilog: str = "") -> Parser:
    """A parser without flags. description and epilog are shown as they are written."""
    indented = "\n".join(f"  {example}" for example in examples)
    return Parser(
        f"megazero {name}",
        description=f"{description.strip()}\n\nexamples:\n{indented}",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def given_word(text: str) -> str:
    """The type of a flag whose value may not be empty, as that of an unset shell variable is."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return text


def given_path(text: str) -> Path:
    """The type of a flag whose value is a path. Path("") is the working folder, which the user did not name."""
    return Path(given_word(text))


def not_positive(args: argparse.Namespace, *fields: str) -> Iterator[str]:
    """A sentence for each of these flags that is set and below 1."""
    for field in fields:
        value = getattr(args, field)
        if value is not None and value < 1:
            yield f"{flag_of(field)} {value}: must be at least 1"


def flag_of(field: str) -> str:
    """The flag of a field of argparse's namespace."""
    return "--" + field.replace("_", "-")


def pop_flag(argv: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """(the value of a flag, the other words). If the flag is repeated, its last value counts; None if it is absent."""
    value, other_words = None, []
    remaining = iter(argv)
    for word in remaining:
        if word == flag:
            value = next(remaining, "")
        elif word.startswith(flag + "="):
            value = word.split("=", 1)[1]
        else:
            other_words.append(word)
    return value, other_words
