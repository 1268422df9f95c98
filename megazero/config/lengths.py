"""Numbers as people write them: whole numbers, bytes with units, and lengths of the learning-rate schedule, which are
iterations, samples, or a share of another length.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from types import MappingProxyType

from megazero.system.reading import shown


class Measure(Enum):
    """What a length counts. The values end the names that say so: --lr-warmup-iters, --lr-warmup-fraction."""

    ITERATIONS = "iters"
    SAMPLES = "samples"
    SHARE = "fraction"

    __hash__ = object.__hash__


_WORDS = MappingProxyType(
    {
        **dict.fromkeys(("", "iteration", "iterations", "iter", "iters"), Measure.ITERATIONS),
        **dict.fromkeys(("sample", "samples"), Measure.SAMPLES),
        "%": Measure.SHARE,
    }
)
_PARTS = re.compile(r"\s*(?P<number>[^\s%]*?)\s*(?P<word>%|[a-z]*)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Length:
    """A number and what it counts.

    number   of iterations or samples; of a share, 0.05 for 5%
    measure  what it counts
    by_name  whether the name with which it was given says what it counts, as in --lr-warmup-iters 500
    """

    number: float
    measure: Measure
    by_name: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        whole = isinstance(self.number, int) and not isinstance(self.number, bool)
        share = self.measure is Measure.SHARE and isinstance(self.number, float) and math.isfinite(self.number)
        if not isinstance(self.measure, Measure) or not (share if self.measure is Measure.SHARE else whole):
            raise ValueError(f"{self.number!r} {self.measure!r} is no length")

    @classmethod
    def parsed(cls, text: str) -> Length:
        """500, 500 iterations, 2000 samples or 5%. Raises ValueError for other words."""
        parts = _PARTS.fullmatch(text)
        measure = _WORDS.get(parts["word"].lower()) if parts else None
        try:
            if parts is None or measure is None:
                raise ValueError(text)
            if measure is Measure.SHARE:
                return cls(float(Decimal(parts["number"]) / 100), measure)
            return cls(whole_number(parts["number"]), measure)
        except (ValueError, ArithmeticError):
            reason = f"{shown(text)} is not a length, such as 500 (iterations), 2000 samples or 5%"
            raise ValueError(reason) from None

    def __str__(self) -> str:
        """What `parsed` reads. A share is shifted as a decimal, since a product with 100 may not lead back to it."""
        if self.measure is Measure.SHARE:
            return f"{(Decimal(repr(self.number)) * 100).normalize():f}%"
        return f"{self.number} {'samples' if self.measure is Measure.SAMPLES else 'iterations'}"

    @property
    def as_given(self) -> str:
        """What stands behind the name with which it was given."""
        if not self.by_name:
            return str(self)
        return f"{self.number:g}" if self.measure is Measure.SHARE else str(self.number)

    def behind(self, flag: str) -> str:
        """The flag and the length as they were given: `--lr-warmup 500 iterations`, `--lr-warmup-iters 500`."""
        return f"{flag}{f'-{self.measure.value}' if self.by_name else ''} {self.as_given}"


def whole_number(value: str | int | float) -> int:
    """An integer, which may be written as 220_000_000 or 2e8. Raises ValueError."""
    try:
        return int(value) if not isinstance(value, float) else _exact(value)
    except ValueError:
        return _exact(float(value))


_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def bytes_of(value: str | int | float) -> int:
    """A number of bytes: 500000, 500KB, 1.5 GB (powers of 1000), 2GiB (of 1024), in any case. Raises ValueError."""
    words = value.strip().lower() if isinstance(value, str) else ""
    unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if words.endswith(unit)), None)
    if unit is None:
        return whole_number(value)
    return round(float(words.removesuffix(unit)) * _UNITS[unit])


def _exact(number: float) -> int:
    if not number.is_integer():
        raise ValueError(number)
    return int(number)
