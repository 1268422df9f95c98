"""What the command line and the documentation need to know about a field, kept as its metadata."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(
    default: Any,
    *aliases: str,
    choices: tuple[str, ...] | None = None,
    extended_by: str | None = None,
    many: bool = False,
    metavar: str | None = None,
    alone: str | None = None,
    derived: str | None = None,
    common: bool = False,
) -> Any:
    """A field of a dataclass whose fields are flags.

    aliases  further flags for the same option
    choices      the words that it takes
    extended_by  the group of entry points (`config.extensions`) that adds to the choices
    many         whether it takes one word or more
    metavar      what stands for its value in the help
    alone        what the flag without a word means
    derived      where the default is not the value itself: what it is or follows from, in words
    common       whether most runs need it: `--help` shows these, `--help-all` all
    """
    metadata = {"aliases": aliases, "choices": choices, "many": many, "metavar": metavar, "alone": alone}
    return field(
        default=default, metadata={**metadata, "extended_by": extended_by, "derived": derived, "common": common}
    )
