"""Words for people that every room uses."""

from __future__ import annotations


def counted(number: int, noun: str, nouns: str = "") -> str:
    """A number and its noun: 1 document, 2,000 documents. nouns: a plural that is no s behind the noun (batches)."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"
