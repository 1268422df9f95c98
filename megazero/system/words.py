"""Words for people that every room uses."""

from __future__ import annotations

from collections.abc import Iterable


def counted(number: int, noun: str, nouns: str = "") -> str:
    """A number and its noun: 1 document, 2,000 documents. nouns: a plural that is no s behind the noun (batches)."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def either(words: Iterable[str]) -> str:
    """Words to choose from: "a, b or c"."""
    return " or ".join(", ".join(words).rsplit(", ", 1))


def value_words(value: object) -> str:
    """The value of a setting as a person writes it: on, off, none, or the words of a sequence."""
    if isinstance(value, list | tuple):
        return " ".join(map(value_words, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
