"""Which body of each op runs on a device."""

from __future__ import annotations

import torch

from fused_ops.native.library import choice, cpu_library

REFERENCE = "torch reference"
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


def describe(device: torch.device | str = "cpu") -> dict[str, str]:
    """Op -> the body that runs on the device, for the banner: "avx512 kernel" or "torch reference" (which fp64 always takes)."""
    kind = str(device).partition(":")[0]
    on_cpu = kind == "cpu" or (kind == "auto" and not torch.cuda.is_available())
    library = cpu_library(choice()) if on_cpu else None
    return dict.fromkeys(OPS, REFERENCE if library is None else f"{library.level} kernel")
