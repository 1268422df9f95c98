"""Which body of each op runs on a device."""

from __future__ import annotations

import torch

from fused_ops.native.library import choice, cpu_library, torch_library

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

COMPILABLE = ("softmax", "swiglu", "rotary", "layernorm", "rmsnorm")
"""Those whose reference body torch.compile makes fewer passes of. An activation is one pass in torch; the others run outside the blocks, or
in loops over blocks of rows (dropout)."""


def describe(device: torch.device | str = "cpu") -> dict[str, str]:
    """Op -> the body that runs on the device, for the banner: "avx512 kernel" or "torch reference" (which fp64 always takes)."""
    kind = str(device).partition(":")[0]
    on_cpu = kind == "cpu" or (kind == "auto" and not torch.cuda.is_available())
    bodies: dict[str, str] = {}
    for ops, load in ((OPS, cpu_library), (MATRIX_OPS, torch_library)):
        library = load(choice()) if on_cpu else None
        bodies |= dict.fromkeys(ops, REFERENCE if library is None else f"{library.level} kernel")
    return bodies


def compiled(device: torch.device | str, dtype: torch.dtype) -> tuple[str, ...]:
    """The ops that `compiled_bodies` compiles on the device: those that have no kernel there, for fp64 all that can be."""
    bodies = describe(device)
    return tuple(op for op in COMPILABLE if bodies[op] == REFERENCE or dtype == torch.float64)
