"""Loading a library of kernels and calling its C functions, which take pointers, sizes and numbers."""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

Argument: TypeAlias = Tensor | int | float | tuple[Tensor | int | float | None, ...] | None
"""What a function of a library is given. A tuple is an array in memory of the host, which the function reads before it
returns: 8 bytes for each element, which are a pointer, an int64 or a double.
"""


class Library:
    """A loaded library of kernels. `call` passes tensors as pointers.

    level      the instruction set or GPU for which it is compiled, as the banner shows it
    on_device  whether a call only launches its work; then the host must not wait for its inputs
    """

    on_device = False
    ahead: Any = ctypes.c_int64
    """The ctypes type of the argument in front: the number of threads."""
    result: Any = None
    """The ctypes type that its functions return."""

    def __init__(self, path: Path, level: str) -> None:
        self.path, self.level = path, level
        _load_openmp()
        self._handle = ctypes.CDLL(str(path))
        self._functions: dict[str, Any] = {}
        self._typed: dict[str, tuple[Any, list[int], list[int]]] = {}

    def call(self, name: str, *arguments: Argument) -> None:
        """Call the function `name` with the number of threads and these arguments.

        Tensors (on the CPU) and None are passed as pointers, int as int64, float as float, tuples as in `Argument`.
        """
        function, pointers, arrays = self._typed.get(name) or self._types(name, arguments)
        given: list[Any] = [*arguments]
        for at in pointers:
            if arguments[at] is not None:
                given[at] = arguments[at].data_ptr()  # type: ignore[union-attr]
        for at in arrays:
            given[at] = host_array(given[at])
        function(torch.get_num_threads(), *given)

    def _types(self, name: str, arguments: tuple[Argument, ...]) -> tuple[Any, list[int], list[int]]:
        """(function, the places of its pointers, of its arrays). It declares the types, which makes calls faster."""
        function, types = self.function(name), [type(as_c_argument(argument)) for argument in arguments]
        function.argtypes = [self.ahead, *types]
        pointers, arrays = (
            [at for at, kind in enumerate(types) if kind is wanted] for wanted in (ctypes.c_void_p, ctypes.c_char_p)
        )
        found = self._typed[name] = function, pointers, arrays
        return found

    def function(self, name: str) -> Any:
        """The C function `name`."""
        found = self._functions.get(name)
        if found is None:
            found = self._functions[name] = getattr(self._handle, name)
            found.restype = self.result
        return found


def host_array(values: tuple[Tensor | int | float | None, ...]) -> bytes:
    """The memory of a tuple as in `Argument`."""
    if {*map(type, values)} == {int}:  # in a third of the time
        return struct.pack(f"={len(values)}q", *values)
    kinds = "".join(["d" if isinstance(value, float) else "q" for value in values])
    plain = [value.data_ptr() if isinstance(value, Tensor) else 0 if value is None else value for value in values]
    return struct.pack(f"={kinds}", *plain)


def as_c_argument(argument: Argument) -> Any:
    """An argument as a ctypes value."""
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, tuple):
        return ctypes.c_char_p(host_array(argument))
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


@cache
def _load_openmp() -> None:
    """Make the functions of torch's OpenMP runtime visible to the kernels, which are not linked to any."""
    try:
        loaded = [
            line.split()[-1]
            for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
            if "omp" in line.rsplit("/", 1)[-1]
        ]
    except OSError:
        loaded = []
    ctypes.CDLL(loaded[0] if loaded else "libgomp.so.1", ctypes.RTLD_GLOBAL)
