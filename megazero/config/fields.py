"""Metadata of a field for the command line and the documentation, and what its type says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import cache
from types import MappingProxyType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

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
    none_is_a_value: bool = False,
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
    none_is_a_value  whether the word none is one of its values, and does not say that there is none
    earlier      the section that had the field in earlier versions, whose files and checkpoints are still read
    measures     what a length may count; each has a flag and a key of its own, which earlier versions had as fields
    needs        without what the flag has no effect and is an error (`config.idle_flags`), as "--save DIR"
    idle_without  without what the flag has no effect and is a line in the banner
    """
    arguments = locals()  # each is a field of `options.Option`, which is made of them
    return field(default=default, metadata={name: value for name, value in arguments.items() if name != "default"})


class Section:
    """A section of the configuration. Raises TypeError for a word or a number in the place of a value of a class."""

    def __post_init__(self) -> None:
        section: type = type(self)
        for name, kind in _classes(section).items():
            value = getattr(self, name)
            for part in value if isinstance(value, tuple) else (value,):
                if part is not None and not isinstance(part, kind):
                    place, needed = f"{section.__name__}.{name}", kind.__name__
                    raise TypeError(f"{place} is {part!r}, not a {needed}; {needed}.parsed makes one of a text")


@cache
def _classes(section: type) -> Mapping[str, type]:
    """Field -> the class of its value, or of the items of its tuple, where that is no plain word or number."""
    kinds = {name: taken_apart(hint)[0] for name, hint in get_type_hints(section).items()}
    return MappingProxyType({name: kind for name, kind in kinds.items() if kind not in (int, float, str, bool)})


def taken_apart(hint: Any) -> tuple[type, bool, bool]:
    """For a field's type: the kind of its value, of a tuple that of its items; whether None is allowed; whether it is a
    tuple.
    """
    optional = False
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
        optional = True
    if get_origin(hint) is tuple:
        return get_args(hint)[0], optional, True
    return hint, optional, False
