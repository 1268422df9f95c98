"""The search for the cheapest selection beside all selections, with its bound where it is cut short."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from megazero.plan import knapsack
from megazero.plan.knapsack import Integers, OptionGroup, Selection, select


def groups_of(random: np.random.Generator, groups: int, options: int, limits: int) -> list[OptionGroup]:
    """What costs more takes less, but not of every limit."""
    found = []
    for _ in range(groups):
        costs = 3 * random.integers(0, 40, options)
        takes = random.integers(0, 60, (options, limits)) + 2 * (120 - costs)[:, None]
        found.append(OptionGroup(costs, takes))
    return found


def least_of_all(groups: list[OptionGroup], limit: int | Integers) -> int | None:
    costs = [
        sum(int(group.costs[option]) for group, option in zip(groups, options, strict=True))
        for options in product(*(range(len(group.costs)) for group in groups))
        if (sum(group.takes[option] for group, option in zip(groups, options, strict=True)) <= limit).all()
    ]
    return min(costs, default=None)


def fits(groups: list[OptionGroup], found: Selection, limit: int | Integers) -> bool:
    taken = sum(group.takes[option] for group, option in zip(groups, found.options, strict=True))
    cost = sum(int(group.costs[option]) for group, option in zip(groups, found.options, strict=True))
    return bool((taken <= limit).all()) and cost == found.cost


def limits_of(groups: list[OptionGroup]) -> list[int]:
    """From one that nothing fits to one that everything fits."""
    least, most = (sum(int(edge(group.takes)) for group in groups) for edge in (np.min, np.max))
    return [least - 1, *(least + (most - least) * part // 8 for part in range(1, 8)), most]


@pytest.mark.parametrize("few", [0, knapsack.FEW])
def test_no_other_selection_costs_less(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """few: 0 has prices and bounds work on problems that are small enough to try everything."""
    monkeypatch.setattr(knapsack, "FEW", few)
    random, nothing = np.random.default_rng(5), 0
    for groups in [groups_of(random, *size) for size in [(1, 9, 3), (2, 6, 1), (3, 5, 4), (4, 4, 2)] * 3]:
        for limit in limits_of(groups):
            found, least = select(groups, limit), least_of_all(groups, limit)
            assert (found and found.cost) == least, (limit, found)
            nothing += found is None
            if found is not None:
                assert fits(groups, found, limit) and found.bound == found.cost
    assert nothing >= 12


def test_what_frees_and_limits_that_others_imply() -> None:
    """Options take less than nothing of limits that differ. Each limit has a twin that is less, by as much as some
    selections take of it more, so that it is implied for some limits and not for others.
    """
    random, counts = np.random.default_rng(3), set[int]()
    for _ in range(40):
        groups = groups_of(random, 3, 5, 2)
        limits = random.integers(150, 500, 2)
        apart = random.integers(0, 9, 2)
        twins = [
            OptionGroup(group.costs, np.hstack([group.takes - 90, group.takes - 90 - random.integers(0, 9, (5, 2))]))
            for group in groups
        ]
        limits = np.hstack([limits - 270, limits - 270 - apart])
        counts.add(len(knapsack._not_implied(twins, limits)))
        found, least = select(twins, limits), least_of_all(twins, limits)
        assert (found and found.cost) == least
        assert found is None or (fits(twins, found, limits) and found.bound == found.cost)
    assert {2, 3, 4} <= counts


def test_a_search_that_is_cut_short_says_what_it_may_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knapsack, "FEW", 0)
    monkeypatch.setattr(knapsack, "MOST", 12)
    random, cut, found_all = np.random.default_rng(7), 0, 0
    for _ in range(6):
        groups = groups_of(random, 4, 5, 3)
        for limit in limits_of(groups)[2:]:
            found, least = select(groups, limit), least_of_all(groups, limit)
            if found is None or least is None:
                continue
            found_all += 1
            assert fits(groups, found, limit)
            assert found.bound <= least <= found.cost, (limit, found, least)
            cut += found.bound < found.cost
    assert found_all > 30 and cut > 3, "without a cut the test shows nothing"
