"""Statistics of a tensor, and of the difference of two tensors, computed window by window in float64.

Mean and sum of squared deviations of two parts are combined by the formulae of Chan, Golub and LeVeque (Updating
formulae and a pairwise algorithm for computing sample variances, 1979). A variance from sums of squares would lose its
digits where the mean is large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.checkpoint.window import WindowedTensors, windows

WINDOW = 1 << 22
"""Elements of a window: 32 MB in float64, of which there are a few copies."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Statistics:
    """Statistics of a tensor.

    count        number of elements, finite or not
    nan, inf     number of elements that are NaN or infinite; all other statistics are of the finite elements
    zero         number of zeros
    least, most  smallest and largest element
    squares      sum of squared deviations from the mean
    power        sum of squares
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
        """Standard deviation of the population, not of a sample; NaN without finite elements."""
        return math.sqrt(self.squares / self.finite) if self.finite else math.nan

    @property
    def norm(self) -> float:
        return math.sqrt(self.power)

    def add(self, values: Tensor) -> None:
        """Add a part of the tensor: 1-D, any float dtype."""
        before, wide = self.finite, values.double()
        self.count += values.numel()
        total = float(wide.sum())
        if not math.isfinite(total):  # masks are expensive, so they are made only if an element is not finite
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
        """The statistics as JSON values; null for a statistic of no finite elements."""
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


def statistics(tensors: WindowedTensors, name: str, column: str, elements: int = WINDOW) -> Statistics:
    """Statistics of one column of a tensor. Memory: a few windows of `elements`. Raises Damaged."""
    found = Statistics()
    for start, stop in windows(tensors.shapes[name].numel, elements):
        found.add(tensors.window(name, column, start, stop))
    return found


@dataclass
class Difference:
    """The difference of two tensors a and b of one shape.

    count    number of elements
    equal    number of elements with the same bits (with different dtypes: with the same value)
    largest  the largest |a - b| where the elements differ; inf if one of the two is not finite
    scale    the largest finite |a|
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
        """`largest` divided by `scale`."""
        return 0.0 if self.largest == 0 else self.largest / self.scale if self.scale else math.inf

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add the same part of both tensors, 1-D."""
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
            if not math.isfinite(largest):  # also NaN from equal infinities, which do not differ
                distance = (a[~same].double() - b[~same].double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
                largest = float(distance.max())
            self.largest = max(self.largest, largest)

    def record(self) -> dict[str, float | int | None]:
        """The difference as JSON values; null for infinity."""
        numbers = {"largest": self.largest, "relative": self.relative}
        return {
            "elements": self.count,
            "bit_equal": self.equal,
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        }


def bits(values: Tensor) -> Tensor:
    """The elements' bits as integers of the same width: NaN equals itself, and -0 differs from 0."""
    return values.contiguous().view(_INTEGERS[values.element_size()])


def difference(a: WindowedTensors, b: WindowedTensors, name: str, column: str, elements: int = WINDOW) -> Difference:
    """Difference of one column of a tensor that both checkpoints hold in the same shape; their layouts may differ.

    Memory: a few windows of `elements`. Raises Damaged.
    """
    assert a.shapes[name].shape == b.shapes[name].shape
    found = Difference()
    for start, stop in windows(a.shapes[name].numel, elements):
        found.add(a.window(name, column, start, stop), b.window(name, column, start, stop))
    return found
