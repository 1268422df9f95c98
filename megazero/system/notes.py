"""Notes of exceptions, which Python has from 3.11 on."""

from __future__ import annotations


def add_note(error: BaseException, text: str) -> None:
    """Have a traceback end with a line more, where Python can do so."""
    if (add := getattr(error, "add_note", None)) is not None:
        add(text)
