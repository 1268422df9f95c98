"""The compiled kernels of this process: found, or compiled once per machine, and loaded.

`MEGAZERO_FUSED` says which body of the ops runs on the CPU: `auto` (default: the best instruction set of the machine),
`reference` (the plain torch bodies), or one of `avx512_bf16`, `avx512`, `avx2`, `generic` at most.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_ops.native import compile as compiling
from fused_ops.native.compile import CompileError, Target

INSTALLED = Path(__file__).resolve().parents[1] / "_kernels"
CHOICES = ("auto", "reference", *compiling.LEVELS)
SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_CAPABILITIES = {"AVX512": "avx512", "AVX2": "avx2"}


class Library:
    """A loaded library. `call` hands tensors over as pointers and numbers as they are declared."""

    def __init__(self, path: Path, level: str) -> None:
        self.path, self.level = path, level
        _load_openmp()
        self._handle = ctypes.CDLL(str(path))
        self._functions: dict[str, Any] = {}

    def call(self, name: str, *arguments: Tensor | int | float | None) -> None:
        """Run `name`. Tensors (contiguous, on the CPU) and None become pointers, int int64, float float; threads come first."""
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = getattr(self._handle, name)
            function.restype = None
        function(ctypes.c_int64(torch.get_num_threads()), *[_converted(argument) for argument in arguments])


def _converted(argument: Tensor | int | float | None) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p(None)
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


def choice() -> str:
    """What MEGAZERO_FUSED asks for. Raises ValueError for anything but the choices."""
    asked = os.environ.get("MEGAZERO_FUSED", "auto").lower()
    if asked not in CHOICES:
        raise ValueError(f"MEGAZERO_FUSED={asked}: choose one of {', '.join(CHOICES)}")
    return asked


def kernels(*tensors: Tensor) -> Library | None:
    """The kernels, if they are there and can take these tensors: on the CPU, of one dtype among fp32, bf16, fp16; else None."""
    return cpu_library(choice()) if _can_take(tensors) else None


def matrix_kernels(*tensors: Tensor) -> Library | None:
    """As `kernels`, those that rest on torch's matrix products."""
    return torch_library(choice()) if _can_take(tensors) else None


def _can_take(tensors: tuple[Tensor, ...]) -> bool:
    first = tensors[0]
    return first.device.type == "cpu" and first.dtype in SUFFIXES and all(t.dtype == first.dtype for t in tensors[1:])


def suffix(dtype: torch.dtype) -> str:
    """The end of a kernel's name for a dtype."""
    return SUFFIXES[dtype]


def level() -> str:
    """The best level that this processor has. torch names AVX-512 but not its bf16 conversions; Linux does, where it saves their registers."""
    found = _CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), "generic")
    return "avx512_bf16" if found == "avx512" and "avx512_bf16" in processor_flags() else found


@cache
def processor_flags() -> frozenset[str]:
    """What Linux says this processor has, in its words (`avx512_bf16`); empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


@cache
def cpu_library(asked: str) -> Library | None:
    """The library for a choice of MEGAZERO_FUSED, loaded once. None for `reference`, and with one warning where none can be had."""
    if asked == "reference":
        return None
    best = list(compiling.LEVELS).index(level())
    wanted = level() if asked == "auto" else list(compiling.LEVELS)[max(best, list(compiling.LEVELS).index(asked))]
    try:
        return Library(built(compiling.cpu_target(wanted)), wanted)
    except (CompileError, OSError) as error:
        warnings.warn(f"megazero runs without its compiled kernels, a training step takes about twice as long: {error}", stacklevel=2)
        return None


@cache
def torch_library(asked: str) -> Library | None:
    """The kernels on torch's matrix products, for a choice of MEGAZERO_FUSED; as `cpu_library`, which must be there too."""
    base = cpu_library(asked)
    if base is None:
        return None
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    libraries = f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"
    headers = str(root / "include"), str(root / "include/torch/csrc/api/include")
    flags = (*compiling.FLAGS, *compiling.WARNINGS, *compiling.LEVELS[base.level], abi, f"-DMZ_TORCH={torch.__version__}")
    try:
        return Library(built(Target(f"torch_{base.level}", "torch", flags, headers, libraries)), base.level)
    except (CompileError, OSError) as error:
        warnings.warn(f"megazero runs without its attention and matrix kernels: {error}", stacklevel=2)
        return None


def built(target: Target) -> Path:
    """Where the target's library lies: installed, in the cache, or compiled into the cache now (once, whoever starts together).

    The cache holds a library per compiler. Without one, another machine's serves, where the cache is shared.
    """
    installed = INSTALLED / f"{target.name}.so"
    if installed.exists() and _is_current(installed):
        return installed
    folder = cache_folder() / target.digest()
    try:
        version = compiling.compiler_version(compiling.compiler())
    except CompileError:
        if others := sorted(folder.glob(f"*/{target.name}.so")):
            return others[0]
        raise
    found = folder / hashlib.sha256(version.encode()).hexdigest()[:8] / f"{target.name}.so"
    if not found.exists():
        found.parent.mkdir(parents=True, exist_ok=True)
        with _locked(found.with_suffix(".lock")):
            if not found.exists():
                with tempfile.TemporaryDirectory(dir=found.parent) as work:
                    compiling.build([target], found.parent, Path(work))
    return found


def cache_folder() -> Path:
    """Where kernels compiled at first use are kept: $MEGAZERO_KERNEL_CACHE, else under the user's cache folder."""
    given = os.environ.get("MEGAZERO_KERNEL_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(given) if given else Path(base) / "megazero" / "kernels"


def _is_current(installed: Path) -> bool:
    """Not so where somebody works on the sources of an editable install."""
    made = installed.stat().st_mtime
    return all(path.stat().st_mtime <= made for path in compiling.SOURCES.rglob("*.[ch]*"))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The kernel's own file lock: it goes with the process that holds it, so none is ever stale."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def _load_openmp() -> None:
    """Make the functions of torch's OpenMP runtime visible to the kernels, which are linked to none."""
    try:
        loaded = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line.rsplit("/", 1)[-1]]
    except OSError:
        loaded = []
    ctypes.CDLL(loaded[0] if loaded else "libgomp.so.1", ctypes.RTLD_GLOBAL)
