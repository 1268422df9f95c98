"""The compiled kernels of this process: they are found, or compiled once per machine, and loaded.

`MEGAZERO_FUSED` chooses the bodies of the ops. `auto` (the default) uses CUDA kernels on a GPU, and on a CPU the
kernels of its best instruction set. `reference` uses the plain torch bodies. `avx512_bf16`, `avx512`, `avx2` and
`generic` limit the instruction set on a CPU. `emulated` runs the CUDA kernels on the CPU, very slowly, for their tests.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fused_ops.native import compile as compiling
from fused_ops.native.binding import Library
from fused_ops.native.cache import find_or_build
from fused_ops.native.card_trial import card_refusal
from fused_ops.native.compile import CompileError, Target, processor_flags
from fused_ops.native.cuda import CudaLibrary
from fused_ops.native.stand_in import META, kind_of, stand_in

EMULATED = "emulated"
CHOICES = ("auto", "reference", *compiling.LEVELS, EMULATED)
SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_CAPABILITIES = {"AVX512": "avx512", "AVX2": "avx2"}


def choice() -> str:
    """The value of MEGAZERO_FUSED. Raises ValueError for an unknown one."""
    asked = os.environ.get("MEGAZERO_FUSED", "auto").lower()
    if asked not in CHOICES:
        raise ValueError(f"MEGAZERO_FUSED={asked}: choose one of {', '.join(CHOICES)}")
    return asked


def kernels(*tensors: Tensor) -> Library | None:
    """The kernels for these tensors, which must be on one device and of one dtype among fp32, bf16, fp16; else None."""
    return kernels_on(tensors[0].device) if _can_take(tensors) else None


def kernels_on(device: torch.device) -> Library | None:
    """The kernels of a device, for functions that take other dtypes."""
    if device.type == META:
        return stand_in()
    if device.type == "cpu":
        return cpu_library(choice())
    return cuda_library(choice(), device.index) if device.type == "cuda" else None


def matrix_kernels(*tensors: Tensor) -> Library | None:
    """As `kernels`, for the kernels that use torch's block products; on the CPU only."""
    device = tensors[0].device
    if kind_of(device) != "cpu" or not _can_take(tensors):
        return None
    return stand_in() if device.type == META else torch_library(choice())


def _can_take(tensors: tuple[Tensor, ...]) -> bool:
    dtype, device = tensors[0].dtype, tensors[0].device
    if dtype not in SUFFIXES:
        return False
    return all([tensor.dtype == dtype and tensor.device == device for tensor in tensors])  # noqa: C419 - a generator takes twice as long


def suffix(dtype: torch.dtype) -> str:
    """The suffix of kernels' names for a dtype."""
    return SUFFIXES[dtype]


def level() -> str:
    """The best level of this processor. torch does not report AVX-512's bf16 conversions, so Linux's flags are used."""
    found = _CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), "generic")
    return "avx512_bf16" if found == "avx512" and "avx512_bf16" in processor_flags() else found


@cache
def cpu_library(asked: str) -> Library | None:
    """The CPU kernels for a choice of MEGAZERO_FUSED, loaded once.

    None for `reference`, and, with one warning, where they cannot be compiled or loaded, or fail the
    trial.
    """
    if asked == "reference":
        return None
    if asked == EMULATED:
        return CudaLibrary(find_or_build(compiling.emulated_target()), "emulated CUDA")
    best = list(compiling.LEVELS).index(level())
    wanted = level() if asked == "auto" else list(compiling.LEVELS)[max(best, list(compiling.LEVELS).index(asked))]
    try:
        return Library(find_or_build(compiling.cpu_target(wanted)), wanted)
    except (CompileError, OSError) as error:
        warnings.warn(
            f"megazero runs without its compiled kernels, a training step takes about twice as long: {error}",
            stacklevel=2,
        )
        return None


def host_library(asked: str) -> Library | None:
    """As `cpu_library`, for functions that only CPU kernels have (collectives within a host); not emulated."""
    return cpu_library("auto" if asked == EMULATED else asked)


@cache
def torch_library(asked: str) -> Library | None:
    """The kernels that use torch's block products, for a choice of MEGAZERO_FUSED. None where `cpu_library` is None
    too.
    """
    base = None if asked == EMULATED else cpu_library(asked)
    if base is None:
        return None
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    libraries = f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"
    headers = str(root / "include"), str(root / "include/torch/csrc/api/include")
    flags = (
        *compiling.FLAGS,
        *compiling.WARNINGS,
        *compiling.LEVELS[base.level],
        abi,
        f"-DMZ_TORCH={torch.__version__}",
    )
    try:
        return Library(find_or_build(Target(f"torch_{base.level}", "torch", flags, headers, libraries)), base.level)
    except (CompileError, OSError) as error:
        warnings.warn(f"megazero runs without its attention and matrix kernels: {error}", stacklevel=2)
        return None


@cache
def cuda_library(asked: str, index: int) -> Library | None:
    """The CUDA kernels for GPU `index`, compiled for its compute capability at first use, and tried there.

    None for `reference`, and, with one warning, where they cannot be compiled or loaded, or fail the
    trial.
    """
    if asked == "reference":
        return None
    major, minor = torch.cuda.get_device_capability(index)
    try:
        library = CudaLibrary(find_or_build(compiling.cuda_target(f"{major}{minor}")), f"CUDA sm_{major}{minor}")
        refusal = card_refusal(library, torch.device("cuda", index))
    except (CompileError, OSError) as error:
        refusal = str(error)
    if refusal:
        warnings.warn(f"megazero runs without its CUDA kernels, with torch's own ops instead: {refusal}", stacklevel=2)
        return None
    return library
