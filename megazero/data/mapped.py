"""Files mapped into memory, and a look at whether they are still as long as they were.

Reading a mapping beyond its file's end kills the process with SIGBUS, which names no file. So who reads one that may change under a run asks
first; what changes between the question and the answer still kills.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class DataError(ValueError):
    """A file of data is missing, incomplete, inconsistent, or does not fit the run."""


@dataclass(frozen=True)
class Mapping:
    """A whole file in memory, as long as it was when it was opened."""

    path: Path
    memory: mmap.mmap

    def require_whole(self) -> None:
        """Raises DataError where the file has become shorter. One question to the system, no more."""
        size = self.memory.size()
        if size < len(self.memory):
            raise cut_off(self.path, len(self.memory), size)


def cut_off(path: Path, before: int, now: int) -> DataError:
    return DataError(f"{path} has {now} bytes, {before} when it was opened: it was cut off while it was read")


def map_bytes(path: Path) -> tuple[NDArray[np.uint8], Sequence[Mapping]]:
    """A file as bytes, and its mapping; an empty file has none."""
    with open(path, "rb") as file:
        if not file.seek(0, 2):
            return np.empty(0, np.uint8), ()
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(memory, dtype=np.uint8), (Mapping(path, memory),)


def map_npy(path: Path) -> tuple[NDArray[Any], Sequence[Mapping]]:
    """An .npy file as an array, and its mapping; an array without elements is none."""
    if path.stat().st_size <= 128:
        return np.load(path), ()
    array = np.load(path, mmap_mode="r")
    assert isinstance(array.base, mmap.mmap), "as numpy documents it"
    return np.asarray(array), (Mapping(path, array.base),)
