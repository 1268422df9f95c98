"""Which body of each op runs on a device."""

from __future__ import annotations

import torch

from fused_ops.native.binding import Library
from fused_ops.native.library import choice, cpu_library, cuda_library, torch_library

REFERENCE = "torch reference"
COMPILED = "torch reference, compiled"
OPS = (
    "softmax",
    "adam",
    "sgd",
    "sum_of_squares",
    "activation",
    "swiglu",
    "rotary",
    "layernorm",
    "rmsnorm",
    "dropout",
    "embedding",
    "cross_entropy",
)
MATRIX_OPS = ("attention", "weight_gradient")
"""Those that rest on torch's block products, which are compiled at first use."""

FP8_OPS = ("fp8_cast",)

COMPILABLE = ("softmax", "swiglu", "rotary", "layernorm", "rmsnorm")
"""Those whose reference body torch.compile makes fewer passes of. An activation is one pass in torch; the others run outside the blocks, or
in loops over blocks of rows (dropout)."""


def describe(device: torch.device | str = "cpu", *, fp8: bool = False) -> dict[str, str]:
    """Op -> the body that runs on the device, for the banner: "avx512 kernel" or "torch reference" (which fp64 always takes).

    fp8: with the casts of --fp8, for which only GPUs have a kernel.
    """
    kind, _, index = str(device).partition(":")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    libraries: dict[tuple[str, ...], Library | None] = dict.fromkeys((OPS, MATRIX_OPS))
    if kind == "cpu":
        libraries = {OPS: cpu_library(choice()), MATRIX_OPS: torch_library(choice())}
    elif kind == "cuda" and torch.cuda.is_available():
        libraries[OPS] = cuda_library(choice(), int(index or torch.cuda.current_device()))
    if fp8:
        library = libraries[OPS]
        libraries[FP8_OPS] = library if library is not None and library.on_device else None
    return {op: REFERENCE if library is None else f"{library.level} kernel" for ops, library in libraries.items() for op in ops}


def compiled(device: torch.device | str, dtype: torch.dtype, *, fp8: bool = False) -> tuple[str, ...]:
    """The ops that `compiled_bodies` compiles on the device: those that have no kernel there, for fp64 all that can be."""
    bodies, ops = describe(device, fp8=fp8), (*COMPILABLE, *(FP8_OPS if fp8 else ()))
    return tuple(op for op in ops if bodies[op] == REFERENCE or dtype == torch.float64)
