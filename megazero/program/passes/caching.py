"""Offline caching: items of different sizes are used in a known order, and a cache holds some of them between uses.

The items of a use are in the cache during it. An item that is not there is loaded, which costs its size. Evicting an
item costs nothing: it can be loaded again. Which items stay, so that the fewest bytes are loaded?

With items of one size the answer is Belady's (IBM Systems Journal 5, 1966): evict the item whose next use is furthest.
With any sizes the problem is NP-hard (Chrobak et al. 2012, Caching is NP-hard even in the fault model). The buckets of
a rank have only a few sizes, those of blocks and of tables. So a search over the contents of the cache stays small:

- Items are evicted when room is needed, and no more of them than needed.
- Of items of one size, those go first whose next use is furthest. (A solution that keeps such an item and evicts a
  nearer one of the same size can keep the nearer one instead: it needs the same room for a shorter time.)
- A content A for which a bytes have been loaded makes a content B with b bytes superfluous if a + the bytes of what
  only B has are at most b: after loading these, A can do what B can.

Where units have a bucket each, a handful of contents are left at each use, and the result is the least. `WIDTH` bounds
their number. Where more are left, because large blocks have several buckets of different sizes, the search goes on from
the best, and its result may not be the least. `TRIES` bounds the work. After that many evictions have been tried, the
items whose next use is furthest go, of any size: with items that are small beside the cache this is near the least.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

WIDTH = 32
"""Most contents of the cache that the search follows from one use to the next."""

TRIES = 1_000_000
"""Most evictions that the search tries, about a second."""

Path = tuple[int, int, Any]
"""How a content was reached: the bytes that were loaded, the bytes of the content, and the contents at all uses so far,
the last one first, as pairs (content, pair of the use before).
"""


@dataclass(frozen=True)
class CachePlan:
    """A solution.

    held    the items in the cache during each use, as bits of an integer
    loaded  bytes that are loaded
    least   whether it is proven that no solution loads fewer
    """

    held: tuple[int, ...]
    loaded: int
    least: bool


class CacheSearch:
    """The search for the solution that loads the fewest bytes.

    uses      the items of each use, by number
    sizes     bytes of each item
    capacity  bytes of the cache: at least those of each use
    """

    def __init__(self, uses: Sequence[Sequence[int]], sizes: Sequence[int], capacity: int) -> None:
        self.uses, self.sizes, self.capacity = uses, sizes, capacity
        distinct = sorted(set(sizes), reverse=True)
        self.classes = [(size, as_bits(item for item, own in enumerate(sizes) if own == size)) for size in distinct]
        """(size, its items), the largest size first."""
        self.smallest = distinct[-1]
        self.queues: dict[int, list[tuple[int, int]]] = {size: [] for size in distinct}
        """By size: (next use, item) in order, for items that were used and will be used again."""
        self.tried = 0

    def run(self) -> CachePlan:
        """The best solution that was found. The same arguments give the same solution everywhere."""
        paths: dict[int, Path] = {0: (0, 0, None)}
        least = True
        for at, following in enumerate(_next_uses(self.uses)):
            self._renew_queues(at, following)
            now, over = as_bits(following), as_bits(item for item, later in following.items() if later is None)
            reached: dict[int, Path] = {}
            for held, path in paths.items():
                for content, (loaded, size, contents) in self._after(held, path, now):
                    kept = content & ~over
                    if kept not in reached or loaded < reached[kept][0]:
                        reached[kept] = loaded, size - self._size(content & over), contents
            paths = self._without_superfluous(reached)
            width = WIDTH if self.tried < TRIES else 1
            if len(paths) > width:
                least, paths = False, dict(list(paths.items())[:width])
        loaded, _, contents = min(paths.values(), key=lambda path: path[0])
        return CachePlan(_in_order(contents), loaded, least and self.tried < TRIES)

    def _size(self, items: int) -> int:
        total = 0
        for size, own in self.classes if items else ():  # asked a million times: a generator takes twice as long
            if found := items & own:
                total += size * found.bit_count()
        return total

    def _renew_queues(self, at: int, following: dict[int, int | None]) -> None:
        for item, later in following.items():
            queue = self.queues[self.sizes[item]]
            if queue and queue[0][0] == at:
                queue.pop(0)
            if later is not None:
                insort(queue, (later, item))

    def _after(self, held: int, path: Path, now: int) -> Iterator[tuple[int, Path]]:
        """The contents during a use of the items `now` that finds `held` in the cache, and how they are reached."""
        loaded, size, before = path
        missing = self._size(now & ~held)
        loaded, size, content = loaded + missing, size + missing, held | now
        if size <= self.capacity:
            yield content, (loaded, size, (content, before))
            return
        for left, over in self._evicted(content, size - self.capacity, now):
            yield left, (loaded, self.capacity + over, (left, before))
        if self.tried >= TRIES:
            left, over = self._without_furthest(content, size - self.capacity, now)
            yield left, (loaded, self.capacity + over, (left, before))

    def _evicted(self, content: int, over: int, fixed: int, level: int = 0, last: int = 0) -> Iterator[tuple[int, int]]:
        """What can be left of a content that is `over` bytes too large, and by how much (now at most 0) it still is.

        Not an item more than needed is evicted. fixed: items that stay. level, last: of the recursion over the sizes;
        `last` is the smallest size that was evicted. It ends early when `TRIES` are used up.
        """
        self.tried += 1
        if self.tried >= TRIES:
            return
        if over <= 0:
            if over + last > 0:
                yield content, over
            return
        if level == len(self.classes):
            return
        yield from self._evicted(content, over, fixed, level + 1, last)
        size, own = self.classes[level]
        free = content & own & ~fixed
        for _, item in reversed(self.queues[size]) if free else ():
            if free >> item & 1:
                content, over = content ^ 1 << item, over - size
                yield from self._evicted(content, over, fixed, level + 1, size)
                if over <= 0:
                    return

    def _without_furthest(self, content: int, over: int, fixed: int) -> tuple[int, int]:
        """What is left of such a content when the items with the furthest next use go, and by how much it is too large.

        Of items with the same next use the smallest goes that makes enough room, else the largest.
        """
        while over > 0:
            free = content & ~fixed
            last = {
                size: next((entry for entry in reversed(queue) if free >> entry[1] & 1), (-1, -1))
                for size, queue in self.queues.items()
            }
            furthest = max(later for later, _ in last.values())
            sizes = sorted(size for size, (later, _) in last.items() if later == furthest)
            size = next((size for size in sizes if size >= over), sizes[-1])
            content, over = content ^ 1 << last[size][1], over - size
        return content, over

    def _without_superfluous(self, reached: dict[int, Path]) -> dict[int, Path]:
        """The contents that no other one makes superfluous, the one with the fewest loaded bytes first: at most one
        more than `WIDTH`.
        """
        if len(reached) == 1:
            return reached
        left: dict[int, Path] = {}
        for content, path in sorted(reached.items(), key=lambda pair: (pair[1][0], -pair[1][1], pair[0])):
            for other, own in left.items():  # asked a million times: most answers need no sum of sizes
                missing, spare = content & ~other, path[0] - own[0]
                if not missing or (max(self.smallest, path[1] - own[1]) <= spare and self._size(missing) <= spare):
                    break
            else:
                left[content] = path
                if len(left) > WIDTH:
                    break
        return left


def fewest_bytes(uses: Sequence[Sequence[int]], sizes: Sequence[int], capacity: int) -> int:
    """A number of bytes that every solution loads at least, found without a search. Arguments as in `CacheSearch`.

    It is what would be loaded if an item could be evicted in part: then all bytes are items of one size, and evicting
    those whose next use is furthest is best. This is the value of the linear program that keeps a part between 0 and 1
    of each item in each gap between two of its uses. If all sizes are multiples of a unit, so is what a solution holds,
    and the capacity counts in whole units. So the bound is reached where all items have one size.
    """
    capacity -= capacity % math.gcd(*sizes)
    held = [0] * len(sizes)
    furthest: list[tuple[int, int]] = []
    loaded = full = 0
    for following in _next_uses(uses):
        for item in following:
            missing = sizes[item] - held[item]
            loaded, full, held[item] = loaded + missing, full + missing, sizes[item]
        while full > capacity:
            _, item = furthest[0]
            evicted = 0 if item in following else min(held[item], full - capacity)
            held[item], full = held[item] - evicted, full - evicted
            if not held[item]:
                heappop(furthest)
        for item, later in following.items():
            if later is not None:
                heappush(furthest, (-later, item))
            else:
                held[item], full = 0, full - sizes[item]
    return loaded


def as_bits(items: Iterable[int]) -> int:
    """A set of items as the bits of an integer."""
    found = 0
    for item in items:
        found |= 1 << item
    return found


def _next_uses(uses: Sequence[Sequence[int]]) -> list[dict[int, int | None]]:
    """For each use, by item: the number of the next use of the item; None after the last one."""
    later: dict[int, int] = {}
    found: list[dict[int, int | None]] = []
    for at in reversed(range(len(uses))):
        found.append({item: later.get(item) for item in uses[at]})
        later.update(dict.fromkeys(uses[at], at))
    return found[::-1]


def _in_order(contents: Any) -> tuple[int, ...]:
    found: list[int] = []
    while contents is not None:
        content, contents = contents
        found.append(content)
    return tuple(reversed(found))
