"""Values in a narrower dtype, as all take them that write or read weights: a finite number never becomes infinite."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.checkpoint.format import CheckpointError
from megazero.config.dtypes import PRECISION_OF


class OutOfRange(CheckpointError):
    """A finite number is too large for the dtype in which it would be written."""

    def __init__(self, name: str, number: float, dtype: torch.dtype) -> None:
        super().__init__(f"{name} holds {number:g}, and {dtype} ends at {torch.finfo(dtype).max:g}")
        self.fits = [wider for wider in reversed(PRECISION_OF) if torch.finfo(wider).max >= abs(number)]
        """The dtypes that hold the number, the narrowest first."""

    def nearest(self, flag: str) -> str:
        """The message with the values of a flag that hold the number."""
        return f"{self}; nearest: {flag} {' or '.join(PRECISION_OF[dtype] for dtype in self.fits)}"


def narrowed(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The values, [any], rounded to a dtype; the same tensor if they have it. Infinities and NaNs stay what they are.

    name: of the tensor that the values belong to. Raises OutOfRange for a finite number that rounds to infinity.
    """
    rounded = values.to(dtype)
    if values.dtype == dtype or values.numel() == 0 or torch.finfo(values.dtype).max <= torch.finfo(dtype).max:
        return rounded
    if rounded.abs().amax().isfinite():  # NaN where any is NaN
        return rounded
    overflowed = rounded.isinf() & values.isfinite()
    if overflowed.any():
        raise OutOfRange(name, values[overflowed].abs().max().item(), dtype)
    return rounded


def require_range(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The values as they are, if `narrowed` takes them. It takes no memory for a copy, and raises as that does."""
    wider = values.numel() > 0 and torch.finfo(values.dtype).max > torch.finfo(dtype).max
    if wider and not torch.stack(torch.aminmax(values)).to(dtype).isfinite().all():
        narrowed(values, dtype, name)
    return values
