"""The one search beside a sort of all candidates: what a bound leaves out is never better than the answer."""

from __future__ import annotations

import random

import pytest

from megazero.plan.search import Answer, Pruned, Question, SearchLimits, least, search


@pytest.mark.parametrize("seed", range(30))
def test_the_best_are_those_of_all_that_fit(seed: int) -> None:
    """Costs are few numbers, so that many are equal: of these the first is best. Bounds are costs or less."""
    chance = random.Random(seed)
    costs = [chance.randint(1, 9) for _ in range(40)]
    bounds = [cost - chance.choice((0, 0, 1, 3)) for cost in costs]
    fitting, wanted, useless = (
        {n for n in range(40) if chance.random() < 0.7},
        chance.randint(1, 3),
        chance.randint(1, 9),
    )
    asked = list[int]()

    def cost(candidate: int) -> float:
        asked.append(candidate)
        return costs[candidate]

    question = Question[int](fitting.__contains__, cost, bounds.__getitem__, useless=useless, wanted=wanted)
    answer = search(question, range(25))
    search(question, range(25, 40), answer)
    best = sorted((n for n in fitting if bounds[n] <= useless), key=costs.__getitem__)[:wanted]
    assert [n for n in best if costs[n] <= useless] == [n for n in answer.best if costs[n] <= useless]
    assert answer.costs == [costs[n] for n in answer.best]
    assert answer.tried == len(asked) == 40 - answer.pruned.total() and set(asked) <= fitting


def test_what_cannot_be_better_is_not_asked_for() -> None:
    answer = search(Question[int](lambda n: n != 2, cost=float, bound=float), [5, 7, 2, 3, 5, 3])
    assert (answer.best, answer.tried) == ([3], 2)
    assert answer.pruned == {Pruned.BOUND: 3, Pruned.LIMITS: 1}


def test_a_walk_ends_at_what_costs_nothing_and_where_costs_rise() -> None:
    made = iter(range(10))
    assert search(Question[int](lambda n: n % 2 == 1, wanted=2), made).best == [1, 3] and next(made) == 4
    made = iter((5, 4, 6, 3))
    answer = search(Question[int](cost=float, falls=True), made)
    assert (answer.best, answer.tried, next(made)) == ([4], 3, 3)
    assert search(Question[int](), ()) == Answer()


@pytest.mark.parametrize("first", [1, 2, 37, 99, 100])
def test_the_least_that_fits(first: int) -> None:
    assert least(lambda n: n >= first, 100) == first


class Step:
    device_bytes, host_bytes, disk = 50, 30, 7


@pytest.mark.parametrize(
    ("limits", "excess"),
    [
        (SearchLimits(), (0, 0, 0, 0)),
        (SearchLimits(50, 30, 7, memory=30), (0, 0, 0, 0)),
        (SearchLimits(49, 28, 4, memory=26), (1, 2, 4, 3)),
        (SearchLimits(50, workspace=5, memory=84, is_one=True), (5, 0, 1, 0)),
    ],
)
def test_limits(limits: SearchLimits, excess: tuple[int, ...]) -> None:
    """Above the device's, the host's, that of memory and the disks'. Workspace is a part of what the device has."""
    assert limits.excess(Step()) == excess
    assert limits.hold(Step()) is not any(excess) and limits.hold_device(Step()) is not bool(excess[0])
