"""What a program hands to a function: the value, or an error that names the argument, what was given, and what is
needed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from megazero.system.reading import fault_of_path, shown


def kind(value: object) -> str:
    """The name of a value's type in a message, with the value if it is short."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"{type(value).__name__} {shown(value)}" if isinstance(value, str | int | float) else type(value).__name__


def is_whole(value: object) -> bool:
    """Whether the value is a whole number of Python or numpy; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def given_path(name: str, value: Any) -> Path:
    """The path, with ~ resolved. Raises TypeError, and ValueError for one that no file can have, and for an empty one,
    which Path takes for ".".
    """
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes):
        raise TypeError(f"{name} is {kind(value)}: a path is needed, as str or pathlib.Path")
    if not os.fspath(value):
        raise ValueError(f"{name} is empty: a path is needed")
    if fault := fault_of_path(os.fspath(value)):
        raise ValueError(f"{name} is {shown(os.fspath(value))}, which {fault}: a path is needed")
    return Path(value).expanduser()


def given_count(name: str, value: Any, why: str = "a whole number from 1 on is needed") -> int:
    """The number, which is 1 or more. why: ends the message for less. Raises TypeError, ValueError."""
    if not is_whole(value):
        raise TypeError(f"{name} is {kind(value)}: a whole number from 1 on is needed")
    if value < 1:
        raise ValueError(f"{name} is {value}: {why}")
    return int(value)


def given_time(name: str, value: Any) -> float:
    """A time, which is finite and not negative. Raises TypeError, ValueError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {kind(value)}: a time is a number")
    number: Any = value  # Real has no comparison for the type checker
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} is {value}: a time is finite, and at least 0")
    return float(number)


def given_words(name: str, value: Any) -> Sequence[str]:
    """The words of a command line. Raises TypeError."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f'{name} is {kind(value)}: a list of words is needed, such as ["--lr", "1e-3"]')
    for place, word in enumerate(value):
        if not isinstance(word, str):
            raise TypeError(f'{name}[{place}] is {kind(word)}: a word is needed, such as "{word}"')
    return value
