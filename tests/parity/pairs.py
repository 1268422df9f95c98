"""Tables of cases in which every two values meet that can: few cases instead of all combinations.

A case is a NamedTuple, and an axis a field of it with the values to draw from. A fault nearly always depends on one or
two values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

Axes = Mapping[str, Sequence[Any]]
Values = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
Fit = Callable[[Values], Values | None]
"""From drawn values to those of a case: changed where they do not go together; None where there is no such case."""
DRAWS = 60
"""Cases that are drawn for each that is chosen."""
TRIES = 400
"""Draws after which two values are taken not to go together."""


def pairs(values: Values) -> set[Pair]:
    """Every two values of a case, in the order of its fields."""
    return {*combinations(values.items(), 2)}


def all_pairs(axes: Axes) -> list[Pair]:
    """Every two values of different axes."""
    named = [[(name, value) for value in dict.fromkeys(values)] for name, values in axes.items()]
    return [(one, other) for first, second in combinations(named, 2) for one in first for other in second]


def drawn(axes: Axes, fit: Fit, source: random.Random, pair: Pair | None = None) -> Values | None:
    """The values of a case that has this pair, if one draw gives such a case."""
    values = {name: source.choice(of) for name, of in axes.items()} | dict(pair or ())
    found = fit(values)
    return found if found is not None and all(found[name] == value for name, value in pair or ()) else None


def covering(axes: Axes, fit: Fit, source: random.Random) -> Iterator[Values]:
    """Cases without end. Each has a pair that is new, as long as there is one, and of some that are drawn with this
    pair the most others.
    """
    missing = set(all_pairs(axes))
    while True:
        # Sorted, because the order of a set of strings differs from process to process.
        pair = source.choice(sorted(missing, key=repr)) if missing else None
        found = [values for _ in range(DRAWS) if (values := drawn(axes, fit, source, pair)) is not None]
        if not found:
            found = [values for _ in range(TRIES) if (values := drawn(axes, fit, source, pair)) is not None][:1]
        if not found:
            missing -= {pair} if pair is not None else set()
            continue
        best = max(found, key=lambda values: len(pairs(values) & missing))
        missing -= pairs(best)
        yield best


def table(axes: Axes, fit: Fit, seed: int, count: int) -> list[Values]:
    """`count` different cases, those with the most new pairs first."""
    chosen: list[Values] = []
    for values in covering(axes, fit, random.Random(seed)):
        chosen += [values] * (values not in chosen)
        if len(chosen) == count:
            break
    return chosen
