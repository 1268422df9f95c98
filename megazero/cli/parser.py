"""How a command shows its help: what it does, examples in both forms, its flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megazero.cli.exit_status import say


class Parser(argparse.ArgumentParser):
    """argparse's parser, with a status for a help that cannot be written; argparse ignores that error."""

    def print_help(self, file: Any = None) -> None:
        """Print the help. If it cannot be written, end the program with status 141 or 1."""
        say(self.format_help().rstrip("\n"))


def command_parser(name: str, description: str, examples: Sequence[str], epilog: str = "") -> Parser:
    """A parser without flags. description and epilog are shown as they are written."""
    shown = "\n".join(f"  {example}" for example in examples)
    return Parser(
        f"megazero {name}",
        description=f"{description.strip()}\n\nexamples:\n{shown}",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def given_word(text: str) -> str:
    """The type of a flag whose value may not be empty, as that of an unset shell variable is."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return text


def given_path(text: str) -> Path:
    """The same for a path. Path("") is the working folder, which the user did not name."""
    return Path(given_word(text))


def pop_flag(argv: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """(the value of a flag, the other words). If the flag is repeated, its last value counts; None if it is absent."""
    words, rest, value = iter(argv), [], None
    for word in words:
        if word == flag:
            value = next(words, "")
        elif word.startswith(flag + "="):
            value = word.split("=", 1)[1]
        else:
            rest.append(word)
    return value, rest
