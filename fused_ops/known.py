"""Numbers that a trial multiplies, and how far off a result is: what works on a machine is found by comparing, not by
the absence of an error.

Zeros, ones and constants would not show an operand that is read in another order, a sum that is not added to, or a mask
at the wrong place; that a result is finite says nothing about it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def known(*shape: int, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Normally distributed, no two alike, the same on every device; nobody else's random numbers change."""
    values = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32, device="cpu")
    return values.to(device=device, dtype=dtype)


def error(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference relative to that of `exact`; infinite where one of the two is not finite."""
    found, exact = found.detach().double(), exact.detach().double()
    off = float((found - exact).norm() / exact.norm())
    return off if off < float("inf") else float("inf")


def disagreement(found: Tensor, exact: Tensor, allowed: float) -> str:
    """In words how far off a result is; empty: `error` is at most `allowed`."""
    off = error(found, exact)
    return "" if off <= allowed else f"its numbers are off by {off:.1e} of what they should be"
