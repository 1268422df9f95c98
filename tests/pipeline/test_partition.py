"""Partitions are checked against all partitions, by brute force."""

from __future__ import annotations

import random
from itertools import combinations_with_replacement, pairwise

import pytest

from megazero.pipeline.partition import partition


def loads(sizes, costs, first, last):
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    found = [sum(costs[a:b]) for a, b in pairwise(bounds)]
    found[0] += first
    found[-1] += last
    return found


def every_partition(layers: int, parts: int):
    for cuts in combinations_with_replacement(range(layers + 1), parts - 1):
        sizes = tuple(b - a for a, b in pairwise((0, *cuts, layers)))
        if all(sizes[1:-1]):
            yield sizes


def test_bloom_176b_over_12_stages():
    hidden, vocabulary = 14336, 250880
    block = 12 * hidden * hidden + 13 * hidden
    sizes = partition([block] * 70, vocabulary * hidden + 2 * hidden, vocabulary * hidden + 2 * hidden, 12)
    assert sizes == (5, *[6] * 10, 5)


def test_largest_chunk_is_minimal_and_the_rest_as_even_as_can_be():
    source = random.Random(3)
    for _ in range(300):
        layers, parts = source.randint(0, 8), source.randint(1, 6)
        if layers < parts - 2:
            continue
        costs = [source.choice([0, 1, 1, 2, 3, 5]) for _ in range(layers)]
        first, last = source.choice([0, 1, 4]), source.choice([0, 2, 4])
        sizes = partition(costs, first, last, parts)
        assert len(sizes) == parts and sum(sizes) == layers and all(sizes[1:-1])
        every = [loads(s, costs, first, last) for s in every_partition(layers, parts)]
        mine = loads(sizes, costs, first, last)
        best = min((max(x), sum(c * c for c in x)) for x in every)
        assert (max(mine), sum(c * c for c in mine)) == best, (costs, first, last, parts, sizes)


def test_measured_times_tie_as_the_numbers_they_are():
    assert partition([0.1] * 9, 0.1, 0.1, 3) == (3, 3, 3)
    assert partition([0.1, 0.2, 0.3] * 2, 0.0, 0.0, 2) == (3, 3)


@pytest.mark.parametrize(
    ("layers", "extra", "parts", "wanted"),
    [
        *((7, 0, 3, (2, 3, 2)), (3, 1, 5, (0, 1, 1, 1, 0)), (10, 0, 4, (2, 3, 3, 2)), (12, 3, 4, (2, 4, 4, 2))),
        *((20, 3, 4, (4, 6, 6, 4)), (12, 0, 1, (12,)), (0, 1, 1, (0,)), (0, 1, 2, (0, 0)), (2, 1, 4, (0, 1, 1, 0))),
    ],
)
def test_shapes(layers, extra, parts, wanted):
    assert partition([1] * layers, extra, extra, parts) == wanted


def test_too_many_chunks_and_wrong_numbers_are_refused():
    with pytest.raises(
        ValueError, match=r"2 layers cannot fill 5 model chunks.*3 layers are needed, or at most 4 chunks"
    ):
        partition([1, 1], 1, 1, 5)
    with pytest.raises(ValueError, match="at least 1"):
        partition([1, 1], 1, 1, 0)
    with pytest.raises(ValueError, match="negative"):
        partition([1, -1], 1, 1, 2)
