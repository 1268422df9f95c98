"""Rotary positions of a model: their base, how much of a head turns, and how their frequencies are scaled for sequences
that are longer than those of the first training.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megazero.system.words import either

Value = float | tuple[float, ...]

ORIGINAL = "original_max_position_embeddings"
NUMBER, COUNT, NOT_NEGATIVE, SWITCH, NUMBERS = "number", "count", "not negative", "switch", "numbers"

ASKED: Mapping[str, str] = MappingProxyType(
    {
        NUMBER: "a number above 0",
        COUNT: "a whole number above 0",
        NOT_NEGATIVE: "a number, 0 or more",
        SWITCH: "0 or 1",
        NUMBERS: "numbers above 0 with commas between them, such as 1,1.1,1.3",
    }
)
"""What a value has to be -> in words."""


@dataclass(frozen=True)
class ScalingKind:
    """The keys of a kind of scaling, in the order in which they are printed -> what their values have to be."""

    required: Mapping[str, str]
    optional: Mapping[str, str]

    @property
    def keys(self) -> dict[str, str]:
        return {**self.required, **self.optional}


KINDS: Mapping[str, ScalingKind] = MappingProxyType(
    {
        "linear": ScalingKind({"factor": NUMBER}, {}),
        "dynamic": ScalingKind({"factor": NUMBER}, {ORIGINAL: COUNT}),
        "llama3": ScalingKind(
            {"factor": NUMBER, "low_freq_factor": NUMBER, "high_freq_factor": NUMBER, ORIGINAL: COUNT}, {}
        ),
        "yarn": ScalingKind(
            {"factor": NUMBER, ORIGINAL: COUNT},
            {
                "beta_fast": NUMBER,
                "beta_slow": NUMBER,
                "mscale": NOT_NEGATIVE,
                "mscale_all_dim": NOT_NEGATIVE,
                "attention_factor": NUMBER,
                "truncate": SWITCH,
            },
        ),
        "longrope": ScalingKind(
            {"short_factor": NUMBERS, "long_factor": NUMBERS, ORIGINAL: COUNT},
            {"factor": NUMBER, "attention_factor": NUMBER},
        ),
    }
)
"""Kind -> its keys, with the names of transformers' `rope_parameters`."""


@dataclass(frozen=True)
class RotaryScaling:
    """A scaling of rotary frequencies, `kind` of `KINDS` with its values.

    values: (key, value) in any order; they are kept in the order of the kind's table, so equal scalings are equal. A
    switch is 0.0 or 1.0. Raises ValueError for an unknown kind, a key that is unknown, missing or given twice, and a
    value that is none.
    """

    kind: str
    values: tuple[tuple[str, Value], ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"rotary scaling {self.kind!r} is unknown{_near(self.kind, KINDS)}: {either(KINDS)}")
        keys, names = KINDS[self.kind].keys, [name for name, _ in self.values]
        for name in names:
            if name not in keys:
                raise ValueError(
                    f"rotary scaling {self.kind} has no key {name!r}{_near(name, keys)}: it has {', '.join(keys)}"
                )
            if names.count(name) > 1:
                raise ValueError(f"rotary scaling {self.kind}: {name} is given {names.count(name)} times")
        missing = [name for name in KINDS[self.kind].required if name not in names]
        if missing:
            raise ValueError(f"rotary scaling {self.kind} needs {', '.join(missing)} too")
        valid = {name: _checked(self.kind, name, keys[name], value) for name, value in self.values}
        object.__setattr__(self, "values", tuple((name, valid[name]) for name in keys if name in valid))
        self._check_together()

    def _check_together(self) -> None:
        low, high = self.number("low_freq_factor", 0.0), self.number("high_freq_factor", 1.0)
        if low >= high:
            raise ValueError(
                f"rotary scaling {self.kind}: low_freq_factor={low:g} has to be less than high_freq_factor={high:g}"
            )
        short, long = self.numbers("short_factor"), self.numbers("long_factor")
        if len(short) != len(long):
            raise ValueError(
                f"rotary scaling {self.kind}: short_factor has {len(short)} numbers and long_factor {len(long)}; each "
                "has one for each pair that turns"
            )

    @classmethod
    def parsed(cls, text: str) -> RotaryScaling:
        """The scaling of a text such as "llama3 factor=8 low_freq_factor=1 ...": a kind, then key=value, with spaces.

        Raises ValueError as the class does.
        """
        kind, *rest = text.split() or [""]
        pairs = [word.partition("=") for word in rest]
        for name, sign, _ in pairs:
            if not sign:
                raise ValueError(f"rotary scaling {kind}: {name!r} is no key=value, such as factor=8")
        return cls(kind, tuple((name, _read(kind, name, value)) for name, _, value in pairs))

    def __str__(self) -> str:
        """The text that `parsed` reads."""
        return " ".join([self.kind, *(f"{name}={printed(value)}" for name, value in self.values)])

    def number(self, name: str, default: float) -> float:
        """The value of a key that is one number."""
        value = dict(self.values).get(name, default)
        assert not isinstance(value, tuple)
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """The value of a key that is a list; empty without one."""
        value = dict(self.values).get(name, ())
        assert isinstance(value, tuple)
        return value

    def original(self, trained_length: int) -> int:
        """The sequence length of the first training: the value of its key, or `trained_length` without it.

        Raises ValueError where neither is known.
        """
        length = int(self.number(ORIGINAL, float(trained_length)))
        if length <= 0:
            raise ValueError(f"rotary scaling {self.kind} needs {ORIGINAL}, or a model with a trained length")
        return length


@dataclass(frozen=True)
class RotarySettings:
    """Which angles turn which part of a head.

    base         pair i of d turns by position / base^(2i/d), d being the elements that turn
    share        the part of each head that turns: its first int(share * head_dim) elements
    interleaved  whether pairs are neighbours (2i, 2i + 1) instead of (i, i + d/2)
    scaling      of the frequencies; None: they are as they were trained first

    Raises ValueError for a base that is not above 0 and a share outside of (0, 1], and TypeError for a scaling in
    words.
    """

    base: float = 10000.0
    share: float = 1.0
    interleaved: bool = False
    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.base) and self.base > 0):
            raise ValueError(f"the base of rotary positions is a number above 0, not {self.base:g}")
        if not 0 < self.share <= 1:
            raise ValueError(f"rotary positions turn a share of each head above 0 and at most 1, not {self.share:g}")
        if not isinstance(self.scaling, RotaryScaling | None):
            kind = type(self.scaling).__name__
            raise TypeError(f"scaling {self.scaling!r} is a {kind}; RotaryScaling.parsed makes a scaling of a text")

    def turned(self, head_dim: int) -> int:
        """The elements of a head that turn, as transformers rounds them. Raises ValueError where they make no pairs."""
        elements = int(head_dim * self.share)
        if elements % 2 or not elements:
            if self.share == 1:
                raise ValueError(f"rotary positions need an even head dimension, not {head_dim}")
            raise ValueError(
                f"rotary positions turn pairs: a share of {self.share:g} of a head of {head_dim} is {elements} "
                "elements, which has to be an even number above 0"
            )
        return elements


OF_MODEL: Mapping[str, str] = MappingProxyType(
    {
        "rotary_base": "base",
        "rotary_share": "share",
        "rotary_interleaved": "interleaved",
        "rotary_scaling": "scaling",
    }
)
"""Field of a model -> the field of the settings of its own rotary positions."""


def _near(name: str, names: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _read(kind: str, name: str, text: str) -> Value:
    """The value of a key in a text; what the numbers have to be, the class checks."""
    asked = KINDS[kind].keys.get(name, NUMBER) if kind in KINDS else NUMBER
    try:
        return tuple(map(float, text.split(","))) if asked == NUMBERS else float(text)
    except ValueError:
        raise ValueError(f"rotary scaling {kind}: {name}={text} is not {ASKED[asked]}") from None


def _checked(kind: str, name: str, asked: str, value: Value) -> Value:
    """The value with floats in it."""
    several = isinstance(value, tuple)
    numbers = tuple(map(float, value)) if isinstance(value, tuple) else (float(value),)
    least = 0.0 if asked in (NOT_NEGATIVE, SWITCH) else math.ulp(0.0)
    whole = asked in (COUNT, SWITCH)
    right = several == (asked == NUMBERS) and len(numbers) > 0
    right &= all(math.isfinite(x) and x >= least and not (whole and x % 1) for x in numbers)
    if not right or (asked == SWITCH and numbers[0] > 1):
        raise ValueError(f"rotary scaling {kind}: {name}={printed(value)} is not {ASKED[asked]}")
    return numbers if several else numbers[0]


def printed(value: Value) -> str:
    """A number, or several with commas between them, as a text that gives the same."""
    if isinstance(value, tuple):
        return ",".join(map(printed, value))
    return str(int(value)) if math.isfinite(value) and value % 1 == 0 and abs(value) < 1e15 else repr(float(value))
