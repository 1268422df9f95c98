"""Arrays in files, read by offset and not mapped into memory.

If a mapped file is truncated, reading beyond its end kills the process with SIGBUS, without the file's name. A call to
read returns fewer bytes instead, and this becomes an error with the file's name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from megazero.system.reading import open_file, raised_as


class DataError(ValueError):
    """A file of data is missing, incomplete, inconsistent, or does not fit the run."""


class OpenFile:
    """An open file. Threads and forked processes may share it. Raises DataError where it cannot be opened.

    size: bytes when it was opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with raised_as(DataError):
            self._file = open_file(path)
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on. Raises DataError if the file has been truncated since it was opened."""
        found = os.pread(self._file.fileno(), count, offset)
        while len(found) < count:  # a system call reads 2 GiB at most
            more = os.pread(self._file.fileno(), count - len(found), offset + len(found))
            if not more:
                now = os.fstat(self._file.fileno()).st_size
                raise DataError(
                    f"{self.path} has {now} bytes, {self.size} when it was opened: it was cut off while it was read"
                )
            found += more
        return found


class ArrayRows(Protocol):
    """The common interface of a numpy array and a `FileArray`: rows are read by number or by range."""

    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, at: int) -> Any: ...

    @overload
    def __getitem__(self, at: slice | NDArray[Any]) -> NDArray[Any]: ...


class FileArray:
    """An array [rows, ...] in a file. Each indexing reads from the file: a row, a range, or rows by an array of
    numbers.

    `[:]` reads all. Raises DataError if the file has been truncated.
    """

    def __init__(self, file: OpenFile, offset: int, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self._file, self._offset = file, offset
        self._row = dtype.itemsize * math.prod(self.shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    @overload
    def __getitem__(self, at: int) -> Any: ...

    @overload
    def __getitem__(self, at: slice | NDArray[Any]) -> NDArray[Any]: ...

    def __getitem__(self, at: int | slice | NDArray[Any]) -> Any:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            assert step == 1
            return self._array(self._read(start, max(stop - start, 0)))
        if isinstance(at, np.ndarray):
            return self._array(b"".join([self._read(number, 1) for number in at.tolist()]))
        return self._array(self._read(range(len(self))[at], 1))[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self[:] if dtype is None else self[:].astype(dtype)

    def _read(self, row: int, count: int) -> bytes:
        return self._file.read(self._offset + row * self._row, count * self._row)

    def _array(self, data: bytes) -> NDArray[Any]:
        return np.frombuffer(data, dtype=self.dtype).reshape(-1, *self.shape[1:])
