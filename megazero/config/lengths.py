"""Numbers as people write them: whole numbers, bytes with units, and lengths of a run and of its learning rate.
Lengths are iterations, samples, epochs, or a share of another length.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum

from megazero.system.reading import shown
from megazero.system.words import either


class Measure(Enum):
    """What a length counts. The values end the names that say so: --lr-warmup-iters, --lr-warmup-fraction, --epochs."""

    ITERATIONS = "iters"
    SAMPLES = "samples"
    EPOCHS = "epochs"
    SHARE = "fraction"

    __hash__ = object.__hash__


_WORDS = {
    **dict.fromkeys(("", "iteration", "iterations", "iter", "iters"), Measure.ITERATIONS),
    **dict.fromkeys(("sample", "samples"), Measure.SAMPLES),
    **dict.fromkeys(("epoch", "epochs"), Measure.EPOCHS),
    "%": Measure.SHARE,
}
_EXAMPLES = {
    Measure.ITERATIONS: "500 (iterations)",
    Measure.SAMPLES: "2000 samples",
    Measure.EPOCHS: "2 epochs",
    Measure.SHARE: "5%",
}
COUNTED: Mapping[Measure, str] = {
    Measure.ITERATIONS: "iterations",
    Measure.SAMPLES: "samples",
    Measure.EPOCHS: "epochs",
    Measure.SHARE: "a share",
}
FRACTIONS = frozenset({Measure.EPOCHS, Measure.SHARE})
"""Measures of which a length may have a fraction, such as half an epoch."""
_PARTS = re.compile(r"\s*(?P<number>[^\s%]*?)\s*(?P<word>%|[a-z]*)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Length:
    """A number and what it counts.

    number   of iterations or samples, or (a float) of epochs; of a share, 0.05 for 5%
    by_name  whether the name with which it was given says what it counts, as in --lr-warmup-iters 500
    """

    number: float
    measure: Measure
    by_name: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        whole = isinstance(self.number, int) and not isinstance(self.number, bool)  # a bool is an int
        fraction = isinstance(self.number, float) and math.isfinite(self.number)
        if not isinstance(self.measure, Measure) or not (fraction if self.measure in FRACTIONS else whole):
            raise ValueError(f"{self.number!r} {self.measure!r} is no length")

    @classmethod
    def parsed(cls, text: str, measures: Collection[Measure] = tuple(Measure)) -> Length:
        """500, 500 iterations, 2000 samples, 2 epochs or 5%. Raises ValueError, with examples of these measures."""
        parts = _PARTS.fullmatch(text)
        measure = _WORDS.get(parts["word"].lower()) if parts else None
        try:
            if parts is None or measure is None:
                raise ValueError(text)
            if measure is Measure.SHARE:
                return cls(float(Decimal(parts["number"]) / 100), measure)  # 1.1% is 0.011; 1.1 / 100 is not
            return cls(float(parts["number"]) if measure is Measure.EPOCHS else whole_number(parts["number"]), measure)
        except (ValueError, ArithmeticError):
            examples = either(_EXAMPLES[known] for known in measures)
            raise ValueError(f"{shown(text)} is not a length, such as {examples}") from None

    def __str__(self) -> str:
        """What `parsed` reads."""
        if self.measure is Measure.SHARE:
            # as a decimal: a product with 100 may not lead back to the share
            return f"{(Decimal(repr(self.number)) * 100).normalize():f}%"
        counted = COUNTED[self.measure]
        return f"{self.plain} {counted.removesuffix('s') if self.number == 1 else counted}"

    @property
    def plain(self) -> str:
        """The number alone."""
        return repr(self.number).removesuffix(".0")  # `repr` of a number of epochs leads back to it

    @property
    def as_given(self) -> str:
        """What stands behind the name with which it was given."""
        if not self.by_name:
            return str(self)
        return f"{self.number:g}" if self.measure is Measure.SHARE else self.plain

    def behind(self, flag: str) -> str:
        """The flag and the length as they were given: `--lr-warmup 500 iterations`, `--lr-warmup-iters 500`."""
        name = measured_name(flag.removeprefix("--"), self.measure) if self.by_name else flag.removeprefix("--")
        return f"--{name.replace('_', '-')} {self.as_given}"


def measured_name(name: str, measure: Measure) -> str:
    """The name of a length that says what it counts: lr_warmup_iters of lr_warmup, train_iters of train_length."""
    if measure is Measure.EPOCHS:
        return measure.value  # only a run is counted in epochs
    return f"{name.replace('-', '_').removesuffix('_length')}_{measure.value}"


def whole_number(value: str | int | float) -> int:
    """An integer, which may be written as 220_000_000 or 2e8. Raises ValueError."""
    if not isinstance(value, float):
        with suppress(ValueError):
            return int(value)  # not by way of a float, which rounds a large number
    number = float(value)
    if not number.is_integer():
        raise ValueError(value)
    return int(number)


_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def bytes_of(value: str | int | float) -> int:
    """A number of bytes: 500000, 500KB, 1.5 GB (powers of 1000), 2GiB (of 1024), in any case. Raises ValueError."""
    text = value.strip().lower() if isinstance(value, str) else ""
    unit = next((unit for unit in _UNITS if text.endswith(unit)), None)
    if unit is None:
        return whole_number(value)
    return round(float(text.removesuffix(unit)) * _UNITS[unit])
