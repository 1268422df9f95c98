"""Which layers each model chunk gets: the largest chunk as small as it can be, exactly.

A chunk is a contiguous run of layers; the first one holds the embedding as well and the last one the head. Costs are
parameters or measured times: the caller's choice. Sums are exact (integers, or floats as the rationals they are), so
that every rank finds the same answer and ties are ties.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise


def partition(costs: Sequence[float], first_extra: float, last_extra: float, parts: int) -> tuple[int, ...]:
    """Number of layers of each chunk, in model order.

    costs        one non-negative number per layer
    first_extra  what the embedding adds to the first chunk, last_extra what the head adds to the last

    The largest chunk is minimal. Among such partitions the one with the smallest sum of squared costs is taken (no
    chunk idles beside a full one), then of squared numbers of layers, then the one whose load lies nearest the middle,
    then the one with less in front: early stages keep more activations alive. Every chunk holds at least a layer, the
    embedding or the head, which is the only condition: with one chunk any number of layers will do, otherwise at least
    `parts - 2`. Raises ValueError if there are fewer.
    """
    layers = len(costs)
    if parts < 1:
        raise ValueError(f"{parts} model chunks: at least 1 is needed")
    if layers < parts - 2:
        raise ValueError(
            f"{layers} layers cannot fill {parts} model chunks: each holds at least a layer, the embedding or the "
            f"head, so {parts - 2} layers are needed, or at most {layers + 2} chunks"
        )
    *exact, first, last = _integers([*costs, first_extra, last_extra])
    if any(cost < 0 for cost in (*exact, first, last)):
        raise ValueError("the cost of a layer, the embedding or the head is negative")
    problem = _Problem(list(accumulate(exact, initial=0)), [first] + [0] * (parts - 1), parts)
    problem.extras[-1] += last
    return problem.solve()


def _integers(costs: Sequence[float]) -> list[int]:
    """The costs times their common denominator."""
    exact = [Fraction(cost) for cost in costs]
    scale = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * scale) for cost in exact]


class _Problem:
    """Costs as integers: `sums[i]` of the first i layers, `extras[c]` of chunk c beside its layers."""

    def __init__(self, sums: list[int], extras: list[int], parts: int) -> None:
        self.sums, self.extras, self.parts = sums, extras, parts
        self.layers = len(sums) - 1
        self.least = [0 if chunk in (0, parts - 1) else 1 for chunk in range(parts)]
        """Fewest layers of each chunk."""
        self.after = [sum(self.least[chunk + 1 :]) for chunk in range(parts)]
        """Layers that the chunks behind each one need at least."""

    def solve(self) -> tuple[int, ...]:
        return self._most_even(self._smallest_bound())

    def _furthest(self, chunk: int, start: int, bound: int) -> int:
        """Largest end of a chunk that starts at layer `start`, costs at most `bound` and leaves enough; < start if
        none.
        """
        end = bisect_right(self.sums, self.sums[start] + bound - self.extras[chunk]) - 1
        return min(end, self.layers - self.after[chunk])

    def _fits(self, bound: int) -> bool:
        """Whether some partition has no chunk above `bound`: to fill each chunk in turn is as good as any."""
        start = 0
        for chunk in range(self.parts):
            end = self._furthest(chunk, start, bound)
            if end < start + self.least[chunk]:
                return False
            start = end
        return start == self.layers

    def _smallest_bound(self) -> int:
        low, high = -1, self.sums[-1] + sum(self.extras)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(middle) else (middle, high)
        return high

    def _most_even(self, bound: int) -> tuple[int, ...]:
        """The best partition within `bound`, by dynamic programming over (chunk, layers before its end)."""
        Key = tuple[int, int, int]
        reached: dict[int, Key] = {0: (0, 0, 0)}
        choices: list[dict[int, int]] = []
        for chunk in range(self.parts):
            away = abs(2 * chunk - (self.parts - 1))
            best: dict[int, Key] = {}
            choice: dict[int, int] = {}
            for start, (squares, lengths, spread) in sorted(reached.items(), reverse=True):
                for end in range(start + self.least[chunk], self._furthest(chunk, start, bound) + 1):
                    load = self.sums[end] - self.sums[start] + self.extras[chunk]
                    key = (squares + load * load, lengths + (end - start) ** 2, spread + away * load)
                    # "<=" keeps the earliest start, hence the partition with less in front.
                    if end not in best or key <= best[end]:
                        best[end], choice[end] = key, start
            reached = best
            choices.append(choice)
        ends = [self.layers]
        for choice in reversed(choices):
            ends.append(choice[ends[-1]])
        ends.reverse()
        return tuple(stop - start for start, stop in pairwise(ends))
