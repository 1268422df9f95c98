"""Emulated CUDA kernels whose accesses to memory are seen: `accesses.cpp` counts them and finds races."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from torch import Tensor

from fused_ops.native import compile as compiling
from fused_ops.native.binding import Argument
from fused_ops.native.cache import find_or_build
from fused_ops.native.compile import EMULATION_FLAGS, WARNINGS, Target
from fused_ops.native.cuda import CudaLibrary

HOOKS = Path(__file__).with_name("accesses.cpp")
WATCHED_FLAGS = (
    *("-O1" if flag == "-O2" else flag for flag in EMULATION_FLAGS),
    "-DMZ_WATCHED",
    "-fsanitize=thread",
    *(f"-fno-tree-{what}" for what in ("fre", "dominator-opts", "dse", "loop-im", "sink")),
)
"""The second half keeps the compiler from joining two accesses to one address: on a card they are `volatile`."""


@dataclass(frozen=True)
class _Hooks(Target):
    @property
    def sources(self) -> list[Path]:
        return [HOOKS]

    inputs = sources


class _Count(ctypes.Structure):
    """`Count` in accesses.cpp."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("read", "fetched", "written", "stored")] + [
        (name, ctypes.c_uint64 * 5) for name in ("loads", "stores")
    ]


@dataclass(frozen=True)
class Traffic:
    """Bytes that launches move in a range of memory.

    read, written    of all accesses
    fetched, stored  of different addresses in each launch: what a card's memory moves at least. What a launch reads
                     that it has written before is not fetched.
    loads, stores    numbers of accesses of 1, 2, 4, 8 and 16 bytes
    """

    read: int = 0
    fetched: int = 0
    written: int = 0
    stored: int = 0
    loads: tuple[int, ...] = (0,) * 5
    stores: tuple[int, ...] = (0,) * 5

    def __add__(self, other: Traffic) -> Traffic:
        sums = [getattr(self, name) + getattr(other, name) for name in ("read", "fetched", "written", "stored")]
        wide = [
            tuple(a + b for a, b in zip(getattr(self, name), getattr(other, name), strict=True))
            for name in ("loads", "stores")
        ]
        return Traffic(*sums, *wide)

    @property
    def moved(self) -> int:
        return self.fetched + self.stored

    @property
    def accessed(self) -> int:
        return self.read + self.written


@dataclass(frozen=True)
class Call:
    """A call of a kernel library, with the elements of tuples as arguments.

    of       the traffic of each argument, None for those that are no tensors
    rest     that of other memory, which is the scratch memory of the launcher
    kernels  the addresses of those that ran
    """

    name: str
    arguments: tuple[Argument, ...]
    of: tuple[Traffic | None, ...]
    rest: Traffic
    kernels: tuple[int, ...] = ()


@dataclass
class Record:
    calls: list[Call] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@cache
def hooks() -> ctypes.CDLL:
    """The library that kernels tell of their accesses. Its names have to be known before theirs are loaded."""
    flags = tuple(flag for flag in compiling.FLAGS if flag not in ("-fopenmp", "-fvisibility=hidden"))
    path = find_or_build(_Hooks("emulation_accesses", "", flags + WARNINGS, links=("-ldl", "-lpthread")))
    found = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    found.watch_fault.restype = ctypes.c_char_p
    found.watch_kernel.restype = found.watch_launches.restype = found.watch_faults.restype = ctypes.c_size_t
    found.watch_count.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(_Count)]
    found.watch_fault.argtypes = found.watch_kernel.argtypes = [ctypes.c_size_t]
    found.watch_range.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return found


@cache
def watched_kernels() -> CudaLibrary:
    """All kernels, compiled once per machine."""
    hooks()
    return CudaLibrary(find_or_build(Target("cuda_watched", "cuda", WATCHED_FLAGS + WARNINGS)), "watched CUDA")


def watched_sources(folder: Path) -> CudaLibrary:
    """The sources of a folder, which may include those headers of ours that it has not itself."""
    target = Target("watched", str(folder), WATCHED_FLAGS, includes=(str(compiling.SOURCES / "cuda"),))
    (path,) = compiling.build([target], folder / "made", folder / "work")
    hooks()
    return CudaLibrary(path, "watched CUDA")


@contextmanager
def watching(library: CudaLibrary) -> Iterator[Record]:
    """What the library's calls do, until the end."""
    record, call = Record(), library.call

    def watched(name: str, *arguments: Argument) -> None:
        flat = [one for argument in arguments for one in (argument if isinstance(argument, tuple) else (argument,))]
        with watching_one(name, flat, library.path, record):
            call(name, *arguments)

    library.call = watched  # type: ignore[method-assign]
    try:
        yield record
    finally:
        library.call = call  # type: ignore[method-assign]


@contextmanager
def watching_one(name: str, arguments: Sequence[Argument], path: Path, record: Record) -> Iterator[None]:
    """What one call does, which is added to the record."""
    seen = hooks()
    seen.watch_begin()
    for argument in arguments:
        seen.watch_range(*_range(argument))
    try:
        yield
    finally:
        seen.watch_end()
    launches = range(seen.watch_launches())
    of = [sum((_traffic(launch, i) for launch in launches), Traffic()) for i in range(len(arguments) + 1)]
    only_tensors = [traffic if isinstance(a, Tensor) else None for traffic, a in zip(of, arguments, strict=False)]
    kernels = tuple(seen.watch_kernel(launch) for launch in launches)
    record.calls.append(Call(name, tuple(arguments), tuple(only_tensors), of[-1], kernels))
    for i in range(seen.watch_faults()):
        record.faults.append(f"{name}: {_named(seen.watch_fault(i).decode(), path)}")


def _range(argument: Argument) -> tuple[int, int]:
    """(address, bytes) of what a view spans."""
    if not isinstance(argument, Tensor) or not argument.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True))
    return argument.data_ptr(), (last + 1) * argument.element_size()


def _traffic(launch: int, number: int) -> Traffic:
    count = _Count()
    hooks().watch_count(launch, number, ctypes.byref(count))
    return Traffic(count.read, count.fetched, count.written, count.stored, tuple(count.loads), tuple(count.stores))


def _named(fault: str, path: Path) -> str:
    """A fault with its kernel's name, where `nm` tells it."""
    names = _kernels_of(path)
    return re.sub(r"kernel (0x[0-9a-f]+)", lambda found: f"kernel {names.get(int(found[1], 16), found[1])}", fault)


@cache
def _kernels_of(path: Path) -> dict[int, str]:
    if shutil.which("nm") is None:
        return {}
    listed = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True).stdout
    lines = [line.split(maxsplit=2) for line in listed.splitlines()]
    return {int(words[0], 16): words[2] for words in lines if len(words) == 3 and words[1] in "tTwWuV"}
