"""One option of each group, so that all limits are kept at the least cost: a knapsack problem with several limits.

A bound makes the search short. Let everything above a limit cost a price. Then each group chooses for itself, and the
sum of these choices, less what the limits are worth, is at most the least cost, whatever the prices are (Lagrangian
relaxation). A subgradient method looks for prices that make this bound high, and finds good selections on its way.

Before that, limits are left out that others imply, and options that cost and take no less than another one of their
group.

The search takes the groups one after the other. It keeps each beginning of a selection that can fit and whose bound
leaves room for a selection better than the best so far, and so is exact. If more than `MOST` beginnings are left, it
first drops those that promise less than `GAP`, and then those with the highest bounds. The result says what was missed
at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, inf, prod

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

MOST = 100_000
"""Beginnings of selections that the search works on at a time."""
GAP = 0.005
"""Share of the cost that may be missed if there are more beginnings than that; or the smallest step of costs."""
FEW = 20_000
"""Selections that are all tried, without prices."""
ROUNDS = 200
"""Of the subgradient method, at most."""


@dataclass(frozen=True)
class OptionGroup:
    """Options of which one is taken.

    costs  [options], at least 0
    takes  [options, limits]: what an option takes of each limit; below 0: what it frees
    """

    costs: Integers
    takes: Integers


@dataclass(frozen=True)
class Selection:
    """The number of the option of each group, and their cost. bound: no selection that fits costs less than this."""

    options: tuple[int, ...]
    cost: int
    bound: int


def select(groups: Sequence[OptionGroup], limit: int | Integers) -> Selection | None:
    """The selection that takes at most `limit` of everything at the least cost; None if none is found that fits.

    limit: of everything, or [limits]
    """
    if not groups:
        return Selection((), 0, 0) if np.all(limit >= 0) else None
    limits = np.broadcast_to(limit, groups[0].takes.shape[1])
    kept = _not_implied(groups, limits)
    useful = [_useful(group.costs, group.takes[:, kept]) for group in groups]
    # what is better costs at least a step less, so that a bound prunes all that promises less than a whole one
    step = max(1, gcd(*(int(cost) for group in groups for cost in group.costs)))
    groups = [
        OptionGroup(group.costs[rows] // step, group.takes[np.ix_(rows, kept)])
        for group, rows in zip(groups, useful, strict=True)
    ]
    limits, prices, best = limits[kept], np.zeros(len(kept)), None
    if prod(map(len, useful)) > FEW and len(groups) > 1:
        prices, best = _prices(groups, limits)
    selection = _search(groups, limits, prices, best)
    if selection is None:
        return None
    options = tuple(int(rows[option]) for rows, option in zip(useful, selection.options, strict=True))
    return Selection(options, selection.cost * step, selection.bound * step)


def _not_implied(groups: Sequence[OptionGroup], limits: Integers) -> NDArray[np.intp]:
    """The numbers of limits without those that every selection keeps that keeps another one."""
    kept = np.ones(len(limits), bool)
    for number in np.argsort(limits, kind="stable"):
        if kept[number]:
            # what every selection takes of this limit more than of each other one, at least
            more = sum((group.takes[:, [number]] - group.takes).min(0) for group in groups)
            kept &= (more < limits[number] - limits) | (np.arange(len(limits)) == number)
    return np.flatnonzero(kept)


def _useful(costs: Integers, takes: Integers) -> NDArray[np.intp]:
    """The numbers of options without those that are no better than another one in any respect."""
    rows, useful = np.column_stack([costs, takes]), list[int]()
    for option in np.lexsort((takes.sum(1), costs)):
        if not (rows[useful] <= rows[option]).all(1).any():
            useful.append(int(option))
    return np.sort(useful)


def _cost(groups: Sequence[OptionGroup], options: Sequence[int]) -> int:
    return sum(int(group.costs[option]) for group, option in zip(groups, options, strict=True))


def _taken(groups: Sequence[OptionGroup], options: Sequence[int]) -> Integers:
    return np.sum([group.takes[option] for group, option in zip(groups, options, strict=True)], 0)


def _prices(groups: Sequence[OptionGroup], limits: Integers) -> tuple[Floats, tuple[int, ...] | None]:
    """Prices of the limits with a high bound, and the best selection that was met on the way."""
    dearest = sum(int(group.costs.max()) for group in groups)
    prices = kept = np.zeros(groups[0].takes.shape[1])
    best, highest, factor, without_gain = None, -inf, 1.0, 0
    known: dict[tuple[int, ...], tuple[int, ...] | None] = {}
    for _ in range(ROUNDS):
        options = tuple(int(np.argmin(group.costs + group.takes @ prices)) for group in groups)
        over = _taken(groups, options) - limits
        bound = _cost(groups, options) + float(over @ prices)
        without_gain += 1
        if bound > highest:
            highest, kept, without_gain = bound, prices, 0
        if options not in known:
            known[options] = fitting = _repaired(groups, options, limits)
            if fitting is not None and (best is None or _cost(groups, fitting) < _cost(groups, best)):
                best = fitting
        aim = dearest if best is None else _cost(groups, best)
        if highest > dearest or (best is not None and aim - highest < 1) or not over.any():
            break
        if without_gain == 10:
            factor, without_gain = factor / 2, 0
        prices = np.maximum(0.0, prices + factor * (aim - bound + 1) / float(over.astype(float) @ over) * over)
    return kept, best


def _repaired(groups: Sequence[OptionGroup], options: Sequence[int], limits: Integers) -> tuple[int, ...] | None:
    """A selection that fits, made from any: first with the options that free most for their cost, then with those that
    cost less and still fit. None if that does not end in one.
    """
    chosen, used = list(options), _taken(groups, options)
    while (used > limits).any():
        excess = np.maximum(used - limits, 0).sum()
        best = 0.0, 0, 0
        for number, group in enumerate(groups):
            others = used - group.takes[chosen[number]]
            freed = excess - np.maximum(others + group.takes - limits, 0).sum(1)
            worth = np.maximum(freed, 0) / np.maximum(group.costs - group.costs[chosen[number]], 0.5)
            best = max(best, (float(worth.max()), number, int(worth.argmax())))
        worth_of_best, number, option = best
        if not worth_of_best:
            return None
        used = used - groups[number].takes[chosen[number]] + groups[number].takes[option]
        chosen[number] = option
    for number, group in enumerate(groups):
        others = used - group.takes[chosen[number]]
        fits = (others + group.takes <= limits).all(1)
        chosen[number] = int(np.where(fits, group.costs, np.iinfo(np.int64).max).argmin())
        used = others + group.takes[chosen[number]]
    return tuple(chosen)


def _search(
    groups: Sequence[OptionGroup], limits: Integers, prices: Floats, best: tuple[int, ...] | None
) -> Selection | None:
    """The selection of least cost, from one that fits and prices. A beginning is a row of each array."""
    least = np.array([group.takes.min(0) for group in groups])
    priced = [group.costs + group.takes @ prices for group in groups]
    cost = sum(int(group.costs.max()) for group in groups) + 1 if best is None else _cost(groups, best)
    room = 1e-6 * cost  # of bounds, which are rounded
    used, values, chosen = np.zeros_like(least[:1]), np.zeros(1), np.zeros((1, 0), np.int32)
    missed = inf
    for number, group in enumerate(groups):
        ahead = sum(float(row.min()) for row in priced[number + 1 :]) - float((limits * prices).sum())
        bounds = values[:, None] + priced[number] + ahead
        rows, options = np.nonzero(bounds <= cost - 1 + room)
        if len(rows) > MOST:
            few = _most_promising(bounds[rows, options], cost)
            missed = min(missed, float(np.delete(bounds[rows, options], few).min()))
            rows, options = rows[few], options[few]
        used = used[rows] + group.takes[options]
        fits = (used + least[number + 1 :].sum(0) <= limits).all(1)
        rows, options, used = rows[fits], options[fits], used[fits]
        values = values[rows] + priced[number][options]
        chosen = np.column_stack([chosen[rows], options.astype(np.int32)])
    costs = sum((group.costs[chosen[:, i]] for i, group in enumerate(groups)), np.zeros(len(chosen), np.int64))
    if len(chosen) and (best is None or costs.min() < cost):
        best, cost = tuple(map(int, chosen[costs.argmin()])), int(costs.min())
    bound = cost if missed >= cost else int(np.ceil(missed - room))
    return None if best is None else Selection(best, cost, min(bound, cost))


def _most_promising(bounds: Floats, cost: int) -> NDArray[np.intp]:
    """The numbers of at most `MOST` beginnings. cost: of the best selection so far."""
    few = np.flatnonzero(bounds <= cost - max(2.0, GAP * cost))
    return few if len(few) <= MOST else few[np.argpartition(bounds[few], MOST)[:MOST]]
