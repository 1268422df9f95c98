"""Block sizes of the reference bodies: temporaries of one block stay in the cache (CPU) or fill the device (GPU)."""

from __future__ import annotations

import torch
from torch import Tensor

HOST_ELEMENTS = 1 << 16
DEVICE_ELEMENTS = 1 << 24


def block_elements(device: torch.device) -> int:
    """Elements that one temporary of a reference body holds. On the CPU each thread of torch gets one cache's share."""
    return HOST_ELEMENTS * torch.get_num_threads() if device.type == "cpu" else DEVICE_ELEMENTS


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are computed: fp32 for 16-bit ones, else their own."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def rows_of(x: Tensor, columns: int) -> int:
    """Rows of `columns` elements that fill one block on x's device; at least one."""
    return max(1, block_elements(x.device) // max(1, columns))
