"""A fault that is planted: one changed line. docs/testing.md says how to add one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    """A fault of one line, and the test that catches it.

    number   of the row in the list of faults that other trainers have shipped; None: it is not in the list
    name     short, unique
    text     what goes wrong, and in whose trainer that happened
    path     the file that is changed
    line     text of one line, which occurs once in the file
    planted  the text that takes its place
    test     path and function of the test; where its grid is sampled, one of the cases of `make test` catches it
    thread   a public thread about such a fault, as owner/repository#number; empty: the row of the list names it, or
             nobody is known to have shipped it
    """

    number: int | None
    name: str
    text: str
    path: str
    line: str
    planted: str
    test: str
    thread: str = ""

    @property
    def area(self) -> str:
        """The room of the file that is changed."""
        parts = Path(self.path).parts
        return parts[1] if parts[0] == "megazero" else parts[0]
