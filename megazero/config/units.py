"""Units of a model by name: the embedding, each block, the head. A placement may name those that leave the device."""

from __future__ import annotations

import re
from collections.abc import Iterable

EMBEDDING, HEAD = "embedding", "head"
_WORD = re.compile(r"blocks? (?P<first>[0-9]{1,9})(-(?P<last>[0-9]{1,9}))?")


def block(number: int | str) -> str:
    """The name of a block."""
    return f"block {number}"


def plain(word: str) -> str:
    """The words of a unit without what is said around them: "the embedding" is "embedding"."""
    return " ".join(word.split()).removeprefix("the ")


def has_unit(word: str, unit: str) -> bool:
    """Whether a unit is among those that a word such as "embedding", "block 3" or "blocks 0-5" stands for."""
    number = unit.removeprefix("block ")
    return word == unit or (number.isdecimal() and int(number) in _blocks(word))


def unknown_units(words: Iterable[str], layers: int) -> list[str]:
    """Those of the words that stand for a unit which a model with so many layers does not have."""

    def known(word: str) -> bool:
        blocks = _blocks(word)
        return word in (EMBEDDING, HEAD) or 0 < blocks.stop <= layers

    return [word for word in words if not known(word)]


def all_units(layers: int) -> str:
    """The units of a model with so many layers, in words."""
    return f"{EMBEDDING}, blocks 0-{layers - 1}, {HEAD}" if layers > 1 else f"{EMBEDDING}, {block(0)}, {HEAD}"


def _blocks(word: str) -> range:
    """The blocks that a word stands for; none: it is another unit, or no name of one."""
    found = _WORD.fullmatch(word)
    if found is None:
        return range(0)
    first, last = int(found["first"]), int(found["last"] or found["first"])
    return range(first, last + 1) if first <= last else range(0)
