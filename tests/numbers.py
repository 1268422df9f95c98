"""Random numbers that are the same on every processor: torch.randn takes logarithms and cosines, whose last bits depend
on its instruction set. What is recorded of other programs was made from these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_TERMS, _HALF = 4, 2**20


def bell(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """About normally distributed numbers with mean 0 and variance 1, float64: sums of four whole random numbers, scaled
    once.
    """
    whole = torch.randint(-_HALF, _HALF + 1, (_TERMS, *shape), generator=generator).sum(0)
    return whole.double() * ((3 / _TERMS) ** 0.5 / _HALF)
