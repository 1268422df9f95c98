"""Numbers of a tensor, and of the difference of two, gathered window by window in float64.

Mean and sum of squared deviations of two parts are joined as Chan, Golub and LeVeque do (Updating formulae and a
pairwise algorithm for computing sample variances, 1979): sums of squares would lose everything where the mean is large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.checkpoint.window import Tensors, windows

WINDOW = 1 << 22
"""Elements looked at together: 32 MB in float64, a few times."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Statistics:
    """Of the finite elements: least, most, mean, squares (sum of squared deviations from the mean), power (sum of
    squares).

    count  elements, those that are not finite included; nan, inf: how many of them are
    """

    count: int = 0
    nan: int = 0
    inf: int = 0
    zero: int = 0
    least: float = math.inf
    most: float = -math.inf
    mean: float = 0.0
    squares: float = 0.0
    power: float = 0.0

    @property
    def finite(self) -> int:
        return self.count - self.nan - self.inf

    @property
    def std(self) -> float:
        """Of the whole population, not of a sample; NaN without finite elements."""
        return math.sqrt(self.squares / self.finite) if self.finite else math.nan

    @property
    def norm(self) -> float:
        return math.sqrt(self.power)

    def add(self, values: Tensor) -> None:
        """One more part, 1-D of any float dtype."""
        before, wide = self.finite, values.double()
        self.count += values.numel()
        total = float(wide.sum())
        if not math.isfinite(total):  # a mask costs more than all the rest: only where something is not finite
            self.nan += int(values.isnan().sum())
            self.inf += int(values.isinf().sum())
            wide = wide[wide.isfinite()]
            total = float(wide.sum())
        if wide.numel() == 0:
            return
        self.zero += wide.numel() - int(wide.count_nonzero())
        least, most = wide.aminmax()
        self.least, self.most = min(self.least, float(least)), max(self.most, float(most))
        mean = total / wide.numel()
        self.power += float(wide.dot(wide))
        step, joined = mean - self.mean, before + wide.numel()
        centred = wide - mean
        self.squares += float(centred.dot(centred)) + step * step * before * (wide.numel() / joined)
        self.mean += step * wide.numel() / joined

    def record(self) -> dict[str, float | int | None]:
        """For JSON: None where there is no number."""
        known = self.finite > 0
        return {
            "elements": self.count,
            "min": self.least if known else None,
            "max": self.most if known else None,
            "mean": self.mean if known else None,
            "std": self.std if known else None,
            "norm": self.norm if known else None,
            "zeros": self.zero,
            "nan": self.nan,
            "inf": self.inf,
        }


def statistics(tensors: Tensors, name: str, column: str, elements: int = WINDOW) -> Statistics:
    """Those of one column of a tensor. Memory: a few windows. Raises Damaged."""
    found = Statistics()
    for start, stop in windows(tensors.shapes[name].numel, elements):
        found.add(tensors.window(name, column, start, stop))
    return found


@dataclass
class Difference:
    """Of two tensors a and b of one shape.

    equal    elements with the same bits (with different dtypes: with the same value)
    largest  of |a - b| where the bits differ; inf where one of the two is no finite number
    scale    the largest |a| that is finite
    """

    count: int = 0
    equal: int = 0
    largest: float = 0.0
    scale: float = 0.0

    @property
    def same(self) -> bool:
        return self.equal == self.count

    @property
    def relative(self) -> float:
        """The largest difference over the largest value of a."""
        return 0.0 if self.largest == 0 else self.largest / self.scale if self.scale else math.inf

    def add(self, a: Tensor, b: Tensor) -> None:
        """One more part of both, 1-D."""
        same = bits(a) == bits(b) if a.dtype == b.dtype else a.double() == b.double()
        equal = int(same.sum())
        self.count += a.numel()
        self.equal += equal
        scale = float(a.abs().max()) if a.numel() else 0.0
        if not math.isfinite(scale):
            finite = a[a.isfinite()]
            scale = float(finite.abs().max()) if finite.numel() else 0.0
        self.scale = max(self.scale, scale)
        if equal < a.numel():
            largest = float((a.double() - b.double()).abs().max())
            if not math.isfinite(largest):  # of equal infinities too, which are no difference
                distance = (a[~same].double() - b[~same].double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
                largest = float(distance.max())
            self.largest = max(self.largest, largest)

    def record(self) -> dict[str, float | int | None]:
        """For JSON, which knows no infinity: None."""
        numbers = {"largest": self.largest, "relative": self.relative}
        return {
            "elements": self.count,
            "bit_equal": self.equal,
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        }


def bits(values: Tensor) -> Tensor:
    """The elements as integers, so that NaN equals itself and -0 is not 0."""
    return values.contiguous().view(_INTEGERS[values.element_size()])


def difference(a: Tensors, b: Tensors, name: str, column: str, elements: int = WINDOW) -> Difference:
    """That of one column of a tensor that both hold in one shape, whatever layouts they were written in.

    Memory: a few windows.
    """
    assert a.shapes[name].shape == b.shapes[name].shape
    found = Difference()
    for start, stop in windows(a.shapes[name].numel, elements):
        found.add(a.window(name, column, start, stop), b.window(name, column, start, stop))
    return found
