"""A loaded library of kernels: C functions that take pointers, sizes and numbers."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Library:
    """A loaded library. `call` hands tensors over as pointers and numbers as they are declared.

    level      what its code is for, in the words of the banner
    on_device  whether a call only queues the work, so that what it reads must not be waited for on the host
    """

    on_device = False
    result: Any = None
    """What its functions return, as ctypes says it."""

    def __init__(self, path: Path, level: str) -> None:
        self.path, self.level = path, level
        _load_openmp()
        self._handle = ctypes.CDLL(str(path))
        self._functions: dict[str, Any] = {}

    def call(self, name: str, *arguments: Tensor | int | float | None) -> None:
        """Run `name`. Tensors (contiguous, on the CPU) and None become pointers, int int64, float float; threads come first."""
        self.function(name)(ctypes.c_int64(torch.get_num_threads()), *map(converted, arguments))

    def function(self, name: str) -> Any:
        """The C function `name`."""
        found = self._functions.get(name)
        if found is None:
            found = self._functions[name] = getattr(self._handle, name)
            found.restype = self.result
        return found


def converted(argument: Tensor | int | float | None) -> Any:
    """An argument as C takes it."""
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p(None)
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


@cache
def _load_openmp() -> None:
    """Make the functions of torch's OpenMP runtime visible to the kernels, which are linked to none."""
    try:
        loaded = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line.rsplit("/", 1)[-1]]
    except OSError:
        loaded = []
    ctypes.CDLL(loaded[0] if loaded else "libgomp.so.1", ctypes.RTLD_GLOBAL)
