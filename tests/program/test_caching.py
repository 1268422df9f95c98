"""The search for what a cache holds: the least bytes of all possible contents, and a bound that needs no search."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.program.passes import caching
from megazero.program.passes.caching import CacheSearch, as_bits, fewest_bytes


def least_of_all(uses: Sequence[Sequence[int]], sizes: Sequence[int], capacity: int) -> int:
    """The least bytes that are loaded, by trying every content of the cache at every use."""
    everything = [
        (content, size)
        for content in range(1 << len(sizes))
        if (size := sum(own for item, own in enumerate(sizes) if content >> item & 1)) <= capacity
    ]
    costs = {0: 0}
    for use in uses:
        now, reached = as_bits(use), dict[int, int]()
        for held, cost in costs.items():
            new = cost + sum(sizes[item] for item in set(use) if not held >> item & 1)
            for content, _ in everything:
                if now & ~content == 0 and content & ~(held | now) == 0:
                    reached[content] = min(new, reached.get(content, new))
        costs = reached
    return min(costs.values())


def replayed(uses: Sequence[Sequence[int]], sizes: Sequence[int], capacity: int, held: Sequence[int]) -> int:
    """The bytes that a plan loads. Fails unless it holds what is used, and never more than the capacity."""
    for use, content in zip(uses, held, strict=True):
        assert as_bits(use) & ~content == 0
        assert sum(size for item, size in enumerate(sizes) if content >> item & 1) <= capacity
    loads = [now & ~before for before, now in pairwise([0, *held])]
    return sum(size for load in loads for item, size in enumerate(sizes) if load >> item & 1)


@st.composite
def problems(draw: st.DrawFn, most_sizes: int) -> tuple[list[list[int]], list[int], int]:
    """Uses of up to five items, their sizes, and a capacity from that of the largest use to that of everything."""
    kinds = draw(st.lists(st.integers(1, 9), min_size=1, max_size=most_sizes))
    sizes = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5))
    items = st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=2, unique=True)
    uses = draw(st.lists(items, min_size=1, max_size=12))
    largest = max(sum(sizes[item] for item in use) for use in uses)
    return uses, sizes, draw(st.integers(largest, max(largest, sum(sizes))))


@given(problems(most_sizes=4))
def test_the_search_finds_the_least_of_all(problem: tuple[list[list[int]], list[int], int]) -> None:
    found, least = CacheSearch(*problem).run(), least_of_all(*problem)
    assert found.loaded == least and found.least
    assert replayed(*problem, found.held) == least
    assert fewest_bytes(*problem) <= least


@given(problems(most_sizes=1))
def test_the_bound_is_reached_with_one_size(problem: tuple[list[list[int]], list[int], int]) -> None:
    assert fewest_bytes(*problem) == least_of_all(*problem)


def test_a_table_gives_way_to_blocks_where_they_save_more() -> None:
    """A table of 3 bytes, used at both ends, and between them three blocks of 2, each used twice."""
    uses, sizes = [[0], [1], [2], [3], [1], [2], [3], [0]], [3, 2, 2, 2]
    wide, narrow, tight = (CacheSearch(uses, sizes, capacity).run() for capacity in (9, 6, 5))
    assert wide.loaded == 3 + 3 * 2, "there is room for all"
    assert narrow.loaded == 3 + 3 * 2 + 3 and not narrow.held[4] & 1, "the blocks stay, the table is loaded twice"
    assert tight.loaded == 3 + 4 * 2 + 3, "two blocks fit: of six uses two find theirs"


def test_a_search_that_gives_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one content at a time it is still a solution, not a proof."""
    sizes = [5, 3, 2, 7, 4]
    uses = [[0], [1], [2], [3], [4], [0], [2], [1], [4], [3], [1], [0], [2], [4]]
    wide = CacheSearch(uses, sizes, 12).run()
    monkeypatch.setattr(caching, "WIDTH", 1)
    narrow = CacheSearch(uses, sizes, 12).run()
    assert wide.least and not narrow.least
    assert fewest_bytes(uses, sizes, 12) <= wide.loaded <= narrow.loaded == replayed(uses, sizes, 12, narrow.held)


@given(problems(most_sizes=4), st.integers(0, 4))
def test_what_goes_without_a_search_makes_a_solution_too(
    problem: tuple[list[list[int]], list[int], int], tries: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caching, "TRIES", tries)
        found = CacheSearch(*problem).run()
    assert replayed(*problem, found.held) == found.loaded >= least_of_all(*problem)
    assert not found.least or found.loaded == least_of_all(*problem)


def test_the_work_of_a_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 blocks of five buckets, each of another size, there and back eight times: near the bound with few tries."""
    parts = (64, 48, 37, 21, 5)
    blocks = [tuple(range(5 * block, 5 * block + 5)) for block in range(40)]
    problem = [*blocks, *reversed(blocks)] * 8, parts * 40, 10 * sum(parts) + 99
    monkeypatch.setattr(caching, "TRIES", 20_000)
    search = CacheSearch(*problem)
    found = search.run()
    assert search.tried < 2 * caching.TRIES
    assert replayed(*problem, found.held) == found.loaded <= 1.05 * fewest_bytes(*problem)
