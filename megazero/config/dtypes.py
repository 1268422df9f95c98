"""The dtypes of a --precision. The only file of this room that imports torch."""

from __future__ import annotations

import torch

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISION_OF = {dtype: precision for precision, dtype in _DTYPES.items()}
"""The precision whose parameters have this dtype."""


def compute_dtype(precision: str) -> torch.dtype:
    """Dtype of parameters, activations and messages between stages."""
    return _DTYPES[precision]


def state_dtype(precision: str) -> torch.dtype:
    """Dtype of master weights, moments and accumulated gradients: fp32 for 16-bit parameters, else their own."""
    return torch.float32 if precision in ("bf16", "fp16") else _DTYPES[precision]


def grad_reduce_dtype(precision: str, wanted: str = "auto") -> torch.dtype:
    """Dtype in which gradients are reduced. wanted: `ParallelConfig.grad_reduce_dtype`."""
    return state_dtype(precision) if wanted == "auto" else _DTYPES[wanted]
