"""Metadata of a field for the command line and the documentation."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from megazero.config.lengths import Measure


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
    expert: bool = False,
    size: bool = False,
    earlier: str | None = None,
    measures: tuple[Measure, ...] = (),
    needs: str | None = None,
    idle_without: str | None = None,
) -> Any:
    """A field of a dataclass whose fields are flags.

    default      the value without the flag
    aliases      further flags for the same field
    choices      the words that it takes; None: any
    extended_by  the group of entry points (`system.extensions`) that adds choices
    many         whether it takes several words, as a tuple
    metavar      the name of its value in the help
    alone        its value if the flag has no word behind it
    derived      the default in words, where it is not `default` itself
    common       whether `--help` shows it; `--help-all` shows all
    expert       whether hardly anybody turns it: its key and its flag are taken, and no help lists it; the reference
                 has a section of such settings
    size         whether it is a number of bytes, which may be written as 4GB
    earlier      the section that had the field in earlier versions, whose files and checkpoints are still read
    measures     what a length may count; each has a flag and a key of its own, which earlier versions had as fields
    needs        without what the flag has no effect and is an error (`config.idle_flags`), as "--save DIR"
    idle_without  without what the flag has no effect and is a line in the banner
    """
    arguments = locals()  # each is a field of `options.Option`, which is made of them
    return field(default=default, metadata={name: value for name, value in arguments.items() if name != "default"})
