"""Sum of squares."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_ops.blocks import DEVICE_ELEMENTS, HOST_ELEMENTS
from fused_ops.native.library import kernels, suffix


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum of x^2 as a 0-dim float64 tensor on x's device; x of any shape and floating dtype.

    Squares and sums are float64, so they do not overflow or round in the tensor's own dtype. Inf and NaN are
    propagated. The order of summation does not depend on the number of threads: the same tensor gives the same bits.
    """
    flat = x.detach().reshape(-1)
    library = kernels(flat)
    if library is not None:
        total = flat.new_empty((), dtype=torch.float64)
        library.call(f"sum_of_squares_{suffix(flat.dtype)}", flat.numel(), flat.contiguous(), total)
        return total
    size = HOST_ELEMENTS if x.device.type == "cpu" else DEVICE_ELEMENTS
    partial = [torch.dot(block, block) for block in (piece.double() for piece in flat.split(size))]
    return torch.stack(partial).sum() if partial else torch.zeros((), dtype=torch.float64, device=x.device)
