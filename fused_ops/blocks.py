"""Block sizes of the reference bodies: the temporaries of a block fit into the cache (CPU) or fill the device (GPU)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fused_ops.native.stand_in import kind_of, witness

HOST_ELEMENTS = 1 << 16
DEVICE_ELEMENTS = 1 << 24

HALVES = (torch.bfloat16, torch.float16)
"""The 16-bit dtypes."""


def block_elements(device: torch.device) -> int:
    """Number of elements of a temporary in a reference body. On the CPU it grows with torch's threads."""
    return HOST_ELEMENTS * torch.get_num_threads() if kind_of(device) == "cpu" else DEVICE_ELEMENTS


def row_blocks(x: Tensor, rows: int, columns: int) -> Iterator[slice]:
    """The blocks of `rows` rows of `columns` elements on x's device. On the meta device two are enough, unless
    work is counted: each takes the same memory, beside what the names of a loop still hold of the one before.
    """
    size = rows_of(x, columns)
    for start in range(0, min(rows, 2 * size) if x.is_meta and witness() is None else rows, size):
        yield slice(start, start + size)


def opmath_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are computed: fp32 for 16-bit dtypes, else `dtype`."""
    return torch.float32 if dtype in HALVES else dtype


def rows_of(x: Tensor, columns: int) -> int:
    """Number of rows of `columns` elements in one block on x's device; at least 1."""
    return max(1, block_elements(x.device) // max(1, columns))
