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
Cost = Callable[[Values], float]
DRAWS = 20
"""Cases that are drawn for each that is chosen."""
TRIES = 400
"""Draws after which two values are taken not to go together."""


def pairs(values: Values) -> Iterator[Pair]:
    """Every two values of a case, in the order of its fields."""
    return combinations(values.items(), 2)


def all_pairs(axes: Axes) -> list[Pair]:
    """Every two values of different axes."""
    named = [[(name, value) for value in dict.fromkeys(values)] for name, values in axes.items()]
    return [(one, other) for first, second in combinations(named, 2) for one in first for other in second]


def fitted(values: Values, fit: Fit, wanted: Values) -> Values | None:
    """The values of a case that has the wanted ones, if these values give such a case."""
    found = fit(values | wanted)
    return found if found is not None and all(found[name] == value for name, value in wanted.items()) else None


def drawn(axes: Axes, fit: Fit, source: random.Random, wanted: Values) -> Values | None:
    """The values of a case that has the wanted ones, if one draw gives such a case."""
    choice = source.choice
    return fitted({name: choice(of) for name, of in axes.items()}, fit, wanted)


def covering(
    axes: Axes, fit: Fit, source: random.Random, required: Sequence[Values] = (), cost: Cost = lambda values: 1.0
) -> Iterator[Values]:
    """Cases without end: first one with each of the required values. Each other has a pair that is new, as long as
    there is one. Of some that are drawn with these values or this pair, it is the one with the most other pairs that
    are new for its cost, and each other value of it has been tried for more of them.
    """
    missing = dict.fromkeys(all_pairs(axes))  # a dict, because the order of a set differs from process to process
    waiting = [*required]

    def worth(values: Values) -> float:
        return sum(map(missing.__contains__, pairs(values))) / cost(values)

    while True:
        pair = source.choice([*missing]) if missing and not waiting else ()
        wanted = waiting.pop(0) if waiting else dict(pair)
        draws = [*filter(None, (drawn(axes, fit, source, wanted) for _ in range(DRAWS)))]
        if not draws:
            draws = [*filter(None, (drawn(axes, fit, source, wanted) for _ in range(TRIES)))][:1]
        if not draws:
            assert pair, f"no case has the required {wanted}"
            del missing[pair]
            continue
        best = max(draws, key=worth)
        for name, of in axes.items():
            others = (fitted(best | {name: value}, fit, wanted) for value in dict.fromkeys(of) if value != best[name])
            best = max([best, *filter(None, others)], key=worth)
        for met in pairs(best):
            missing.pop(met, None)
        yield best


def table(
    axes: Axes,
    fit: Fit,
    seed: int,
    count: int,
    required: Sequence[Values] = (),
    cost: Cost = lambda values: 1.0,
) -> list[Values]:
    """`count` different cases: one with each of the required values, then those with the most new pairs first."""
    chosen: list[Values] = []
    for values in covering(axes, fit, random.Random(seed), required, cost):
        chosen += [values] * (values not in chosen)
        if len(chosen) == count:
            break
    return chosen
