"""A setting that the user left open, the value that it got, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Decision:
    """What was decided about one field of a run.

    field  name of the field
    value  its value, of the field's type
    why    a few words: what the value follows from
    """

    field: str
    value: Any
    why: str
