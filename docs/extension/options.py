"""The options of a run as the reference lists them."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.config.flags import CommandOptions
from megazero.config.lengths import Length
from megazero.config.options import PARSED, Option, options_of, run_options, sections

COMMAND = "command"
"""The section of what is no configuration: --config, --validate-only, ..."""
_KINDS = dict.fromkeys(PARSED, "word") | {
    int: "whole number",
    float: "number",
    str: "word",
    Length: "length",
    bool: "switch",
}


def all_options() -> Sequence[Option]:
    """Those of the command line first, then those of each section of the configuration."""
    return [*options_of(CommandOptions, COMMAND), *run_options().values()]


def options_in(section: str) -> Sequence[Option]:
    """Those that the help lists too. Raises ValueError for a section that is none."""
    known = [COMMAND, *sections()]
    if section not in known:
        raise ValueError(f"{section!r} is not one of {', '.join(known)}")
    return [option for option in all_options() if option.section == section and not option.expert]


def settings_for_a_file() -> Sequence[Option]:
    """Those that hardly anybody turns, which the help does not list."""
    return [option for option in run_options().values() if option.expert]


def about(section: str) -> str:
    """The sentence of a section."""
    of = CommandOptions if section == COMMAND else sections()[section]
    return (of.__doc__ or "").strip()


def anchor(option: Option) -> str:
    """Where an option's entry is on its page."""
    return "flag-" + option.flag.lstrip("-")


def takes(option: Option) -> str:
    """What a value may be, in words."""
    kind = " | ".join(option.choices) if option.choices else _KINDS[option.kind]
    return f"{kind}, one or more" if option.many else kind
