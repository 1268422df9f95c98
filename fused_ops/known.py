"""Test numbers for trials of kernels, and the comparison of their results.

A trial compares results, since a kernel can be wrong without raising an error. The numbers are random: zeros, ones and
constants would not show an operand in a wrong order, a missing addition or a wrong mask.
"""

from __future__ import annotations

import torch
from torch import Tensor


def known_numbers(*shape: int, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Normally distributed numbers of this shape, the same on every device. Global random state does not change."""
    values = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32, device="cpu")
    return values.to(device=device, dtype=dtype)


def error(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference relative to that of `exact`; infinite if one of them is not finite."""
    found, exact = found.detach().double(), exact.detach().double()
    off = float((found - exact).norm() / exact.norm())
    return off if off < float("inf") else float("inf")


def disagreement(found: Tensor, exact: Tensor, allowed: float) -> str:
    """A sentence on the error of a result; empty if `error` is at most `allowed`."""
    off = error(found, exact)
    return "" if off <= allowed else f"its numbers are off by {off:.1e} of what they should be"
