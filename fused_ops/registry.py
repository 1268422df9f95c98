"""The body of each op that runs on a device, for the banner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from fused_ops import linear, products
from fused_ops.attention import kernel
from fused_ops.blocks import HALVES
from fused_ops.native.binding import Library
from fused_ops.native.library import SUFFIXES, choice, cpu_library, cuda_library, suffix, torch_library

REFERENCE = "torch reference"
COMPILED = "torch reference, compiled"
OPS = (
    "softmax",
    "adam",
    "sgd",
    "sum_of_squares",
    "activation",
    "gated",
    "rotary",
    "layernorm",
    "rmsnorm",
    "head_norm",
    "dropout",
    "embedding",
    "cross_entropy",
    "quantise",
    "decode",
)
MATRIX_OPS: Mapping[str, Callable[[Library, torch.dtype], str]] = MappingProxyType(
    {"attention": kernel.refusal, "weight_gradient": linear.refusal}
)
"""Ops whose kernels use torch's block products (compiled at first use) -> a function that tells why a dtype's kernel is
refused on this machine.
"""
_DTYPES = MappingProxyType({"attention": tuple(SUFFIXES), "weight_gradient": HALVES})
_LAYOUTS = ("as float", "in pairs of rows", "in rows")
"""Layouts of a block product's right operand, by the number that the kernels use."""

FP8_OPS = ("fp8_cast",)

COMPILABLE = ("softmax", "gated", "rotary", "layernorm", "rmsnorm", "head_norm")
"""Ops whose reference bodies --compile compiles, into fewer passes. An activation is one pass already. The other ops
run outside the blocks, or in loops over blocks of rows (dropout).
"""


def describe(
    device: torch.device | str = "cpu", *, dtype: torch.dtype | None = None, fp8: bool = False
) -> dict[str, str]:
    """Op -> the body that runs on the device, in words: "avx512 kernel" or "torch reference". fp64 always uses the
    latter.

    dtype  of the tensors; a kernel that is refused for it does not count. With a dtype, on a CPU, the products of
           matrices are an op more
    fp8    include the casts of --fp8, for which only GPUs have a kernel
    """
    kind, _, index = str(device).partition(":")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    libraries: dict[str, Library | None] = dict.fromkeys((*OPS, *MATRIX_OPS))
    if kind == "cpu":
        matrix = torch_library(choice())
        libraries |= dict.fromkeys(OPS, cpu_library(choice()))
        libraries |= {op: None if refusal(op, dtype) else matrix for op in MATRIX_OPS}
    elif kind == "cuda" and torch.cuda.is_available():
        libraries |= dict.fromkeys(OPS, cuda_library(choice(), int(index or torch.cuda.current_device())))
    if fp8:
        library = libraries[OPS[0]]
        libraries |= dict.fromkeys(FP8_OPS, library if library is not None and library.on_device else None)
    bodies = {op: REFERENCE if library is None else f"{library.level} kernel" for op, library in libraries.items()}
    if kind == "cpu" and dtype is not None:
        bodies["product"] = products.body_of(dtype)
        if bodies["product"] != products.TORCH:
            bodies["weight_gradient"] = bodies["product"]
        elif dtype not in HALVES:
            bodies["weight_gradient"] = REFERENCE
    return bodies


def refusal(op: str, dtype: torch.dtype | None) -> str:
    """Why the CPU kernel of a matrix op is not used for a dtype, by a trial; empty if it is used, there is none, or
    another computes the op here.
    """
    library = torch_library(choice())
    if library is None or dtype not in _DTYPES[op] or (op == "weight_gradient" and products.lacks(dtype)):
        return ""
    return MATRIX_OPS[op](library, dtype)


def refusals() -> dict[str, str]:
    """ "op in dtype" -> why this kernel is refused on this machine's CPU, for the matrix ops whose kernel is."""
    found = {f"{op} in {suffix(dtype)}": refusal(op, dtype) for op in MATRIX_OPS for dtype in _DTYPES[op]}
    return {what: why for what, why in found.items() if why}


def block_products() -> str:
    """The layouts of operands that torch's block products need on this CPU, by a trial; empty without such kernels."""
    library = torch_library(choice())
    if library is None:
        return ""
    answer, found = torch.zeros((), dtype=torch.int64, device="cpu"), []
    for name in SUFFIXES.values():
        library.call(f"block_layout_{name}", answer)
        found.append(f"{name} {_LAYOUTS[int(answer)]}")
    return ", ".join(found)


def product_bodies() -> str:
    """How products of each dtype are computed on this CPU."""
    bodies = {name: products.body_of(dtype) for dtype, name in SUFFIXES.items()}
    return "; ".join(f"{name} by {'the ' * body.endswith(' kernel')}{body}" for name, body in bodies.items())


def compiled(device: torch.device | str, dtype: torch.dtype, *, fp8: bool = False) -> tuple[str, ...]:
    """The ops that `compiled_bodies` compiles on the device: those of `COMPILABLE` without a kernel; for fp64 all."""
    bodies, ops = describe(device, fp8=fp8), (*COMPILABLE, *(FP8_OPS if fp8 else ()))
    return tuple(op for op in ops if bodies[op] == REFERENCE or dtype == torch.float64)
