"""Which cases of an exhaustive grid run: all of them in `make test-all`, elsewhere a sample that another seed draws anew.

A test with the mark `sampled` has a grid of parameters. A sample of strength 2 has every pair of values of every two parameters in some case,
one of strength 1, as `sampled(strength=1)` asks for, every value of each. What a fault depends on is nearly always one value or two; a third is
left to other seeds and to `make test-all`, which also has the tests with the mark `exhaustive`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import pytest

from fused_ops.native.library import EMULATED

STRENGTHS = {"check": (1, 0), "test": (2, 1)}
"""Of a sampled test, and of the cases on emulated CUDA kernels of any test, which are slow. Beyond these depths is `all`."""

Case = dict[str, str]
"""Values by the names of parameters, as text."""


def covered(case: Case, strength: int) -> set[tuple[tuple[str, str], ...]]:
    """The combinations of `strength` values that a case has; of all its values where it has fewer parameters."""
    return set(combinations(sorted(case.items()), min(strength, len(case))))


def sample(cases: Sequence[Case], strength: int, random_: random.Random) -> list[int]:
    """Numbers of cases that together have every combination of `strength` values that any case has, drawn greedily."""
    order = random_.sample(range(len(cases)), len(cases))
    offers = {number: covered(cases[number], strength) for number in order}
    missing = set().union(*offers.values())
    chosen = []
    while missing:
        # What a case can still add only shrinks, so that the first whose new count is at least the next one's old is the best.
        ranked = sorted(order, key=lambda number: -len(offers[number]))
        best, most = ranked[0], 0
        for number in ranked:
            if len(offers[number]) <= most:
                break
            offers[number] &= missing
            if len(offers[number]) > most:
                best, most = number, len(offers[number])
        chosen.append(best)
        missing -= offers.pop(best)
        order.remove(best)
    return sorted(chosen)


def thinned(items: list[pytest.Item], depth: str, seed: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """(tests that run, tests that do not) at this depth."""
    grids: dict[tuple[str, int], list[pytest.Function]] = {}
    for item in items:
        if depth != "all" and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            strength = _strength(item, depth)
            if strength is not None:
                grids.setdefault((item.nodeid.partition("[")[0], strength), []).append(item)
    out = {id(item) for item in items if not _belongs(item, depth)}
    for (name, strength), grid in grids.items():
        cases = [{key: repr(value) for key, value in item.callspec.params.items()} for item in grid]
        kept = set(sample(cases, strength, random.Random(f"{seed} {name}"))) if strength else set()
        out |= {id(item) for number, item in enumerate(grid) if number not in kept}
    return [item for item in items if id(item) not in out], [item for item in items if id(item) in out]


def _belongs(item: pytest.Item, depth: str) -> bool:
    """Whether the test itself, whatever its case, is for this depth."""
    if depth == "check" and item.get_closest_marker("slow"):
        return item.get_closest_marker("lint") is not None
    return depth == "all" or item.get_closest_marker("exhaustive") is None


def _strength(item: pytest.Function, depth: str) -> int | None:
    """That of the sample which a test is in; None: it runs."""
    if item.get_closest_marker("gpu"):  # who has a card wants all of them
        return None
    of_sampled, of_emulated = STRENGTHS[depth]
    mark = item.get_closest_marker("sampled")
    sampled = min(of_sampled, mark.kwargs.get("strength", 2)) if mark else None
    if EMULATED in (item.callspec.params.get("level"), item.callspec.params.get("cuda_level")):
        return of_emulated if sampled is None else min(sampled, of_emulated)
    return sampled
