"""Which layers each model chunk gets: an exact minimum of the largest chunk's cost.

A chunk is a contiguous run of layers. The first chunk also holds the embedding, the last one the head. Costs are
parameters or times, as the caller chooses. They are computed exactly, as integers or rationals, so that every rank
finds the same answer.
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
    first_extra  cost of the embedding, in the first chunk
    last_extra   cost of the head, in the last chunk
    parts        number of chunks

    The cost of the largest chunk is minimal. Among such partitions it takes the one with the smallest sum of squared
    costs, then the smallest sum of squared numbers of layers, then the cost nearest to the middle, then fewer layers in
    front, since early stages keep more activations alive. Each chunk holds at least a layer, the embedding or the head.
    Raises ValueError with fewer than `parts - 2` layers, fewer than one part, or a negative cost.
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
    """Costs as integers: `sums[i]` of the first i layers, `extras[c]` that chunk c has in addition to its layers."""

    def __init__(self, sums: list[int], extras: list[int], parts: int) -> None:
        self.sums, self.extras, self.parts = sums, extras, parts
        self.layers = len(sums) - 1
        self.least = [0 if chunk in (0, parts - 1) else 1 for chunk in range(parts)]
        """Fewest layers of each chunk."""
        self.after = [sum(self.least[chunk + 1 :]) for chunk in range(parts)]
        """Fewest layers of all chunks behind each one."""

    def solve(self) -> tuple[int, ...]:
        return self._most_even(self._smallest_bound())

    def _furthest(self, chunk: int, start: int, bound: int) -> int:
        """Largest end of a chunk from layer `start` that costs at most `bound` and leaves enough layers behind it.

        Less than `start` if there is none.
        """
        end = bisect_right(self.sums, self.sums[start] + bound - self.extras[chunk]) - 1
        return min(end, self.layers - self.after[chunk])

    def _fits(self, bound: int) -> bool:
        """Whether some partition has no chunk above `bound`. It suffices to fill each chunk in turn."""
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
