"""Launchers of CUDA kernels against a stand-in for the runtime (stand_in_runtime.cpp): what they launch, and where."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fused_ops.native import compile as compiling
from fused_ops.native.cuda import MORE_SCRATCH, CudaLibrary

STREAM = 0x5EED0
"""Where every launch has to be."""
MOST_OF_GRID, MOST_OF_BLOCK, THREADS = (2**31 - 1, 65535, 65535), (1024, 1024, 64), 1024


class Record(ctypes.Structure):
    """A launch, as stand_in_runtime.cpp writes it down."""

    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
    ]

    def faults(self) -> Iterator[str]:
        threads = self.block[0] * self.block[1] * self.block[2]
        if self.stream != STREAM:
            yield f"is on stream {self.stream}"
        if not all(1 <= n <= most for n, most in zip(self.grid, MOST_OF_GRID, strict=True)):
            yield f"has a grid of {tuple(self.grid)}"
        if not all(1 <= n <= most for n, most in zip(self.block, MOST_OF_BLOCK, strict=True)):
            yield f"has blocks of {tuple(self.block)}"
        if threads > THREADS or threads % 32:
            yield f"has blocks of {threads} threads"


def link(objects: Sequence[Path], folder: Path) -> Path:
    """A library of the objects of kernels, with the stand-in for the runtime. Nothing may be missing in it."""
    made, source = folder / "stood_in.so", Path(__file__).with_suffix(".cpp")
    words = [compiling.compiler(), "-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,-z,defs", str(source)]
    subprocess.run([*words, *map(str, objects), "-o", str(made)], check=True, capture_output=True, text=True)
    return made


class Watched(CudaLibrary):
    """Kernels over the stand-in. Every call is made again with each of its launches failing, and with large sizes.
    `faults` has what was wrong, `launched` how often each function launched.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "watched")
        self.faults: list[str] = []
        self.launched: dict[str, int] = {}

    def function(self, name: str) -> Any:
        found = super().function(name)
        return found if name in ("error_text", "cuda_versions") else Launcher(self, name, found)

    def begin(self, failing: int = -1, code: int = 0) -> None:
        super().function("stand_in_begin")(failing, code)

    def records(self) -> list[Record]:
        first = ctypes.POINTER(Record)()
        count = super().function("stand_in_launches")(ctypes.byref(first))
        return first[:count]


class Launcher:
    """A function of the library whose launches are looked at."""

    argtypes: Sequence[Any]

    def __init__(self, library: Watched, name: str, function: Any) -> None:
        self.library, self.name, self.function = library, name, function

    def __call__(self, launch: Any, *given: Any) -> int:
        launch._obj.stream, self.function.argtypes = STREAM, self.argtypes
        self.library.begin()
        code = self.function(launch, *given)
        records = self.library.records()
        wrong = [f"{record.kernel.decode()} {fault}" for record in records for fault in record.faults()]
        if code == MORE_SCRATCH:
            wrong += [f"launches {len(records)} kernels and asks for scratch memory"] * bool(records)
        else:
            wrong += [f"returns {code}"] * bool(code)
            wrong += [*self.failures(launch, given, len(records)), *self.at_large(launch, given)]
            self.library.launched[self.name] = self.library.launched.get(self.name, 0) + len(records)
        self.library.faults += [f"{self.name}: {words}" for words in wrong]
        return code

    def failures(self, launch: Any, given: Sequence[Any], count: int) -> Iterator[str]:
        """What is wrong where one of its launches fails."""
        for failing in range(count):
            self.library.begin(failing, 700 + failing)
            code = self.function(launch, *given)
            if code != 700 + failing:
                yield f"returns {code} where its launch {failing} fails with {700 + failing}"
            if len(self.library.records()) > failing + 1:
                yield f"goes on where its launch {failing} fails"

    def at_large(self, launch: Any, given: Sequence[Any]) -> Iterator[str]:
        """What is wrong with its launches for very many rows and for long ones, or for many ranges that the host lists.
        The memory of a card is touched by nobody here.
        """
        sizes = [at for at, kind in enumerate(self.argtypes[1:]) if kind is ctypes.c_int64][:2]
        larger = [(at, times) for at, times in zip(sizes, (1 << 18, 1 << 10), strict=False)]
        if lists := any(isinstance(value, bytes) for value in given):
            larger = [(sizes[0], 100)]
        held, launch._obj.bytes = launch._obj.bytes, 1 << 62
        for at, times in larger:
            many = [value * times if isinstance(value, bytes) else value for value in given]
            many[at] = given[at] * times
            self.library.begin()
            code = self.function(launch, *many)
            records = self.library.records()
            wrong = [f"returns {code}"] * bool(code) + [fault for record in records for fault in record.faults()]
            wrong += [*self.failures(launch, many, len(records))] if lists else []
            yield from (f"{fault} with {times} times its argument {at}" for fault in wrong)
        launch._obj.bytes = held
