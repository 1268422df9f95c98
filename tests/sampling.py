"""Which cases of an exhaustive grid run: all of them in `make test-all`, elsewhere a sample that depends on the seed.

A test with the mark `sampled` has a grid of parameters. A sample of strength 2 contains every pair of values of every
two parameters; a sample of strength 1, by `sampled(strength=1)`, contains every value of each parameter. A fault nearly
always depends on one or two values. Faults of three are left to other seeds and to `make test-all`, which also runs the
tests with the mark `exhaustive`. `sampled(cases=3)` is for expensive cases that are similar: this many of them run.

`make check` runs a sample of strength 1 of every grid, or of a test with the mark `few(cases=2)` so many cases.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import pytest

from fused_ops.native.compile import LEVELS
from fused_ops.native.library import EMULATED, level
from megazero.system.device import cuda_available

STRENGTHS = {"check": (1, 0), "test": (2, 1)}
"""By depth: the strength for a sampled test (at depth `check` for any), and for the slow cases of any test on emulated
CUDA kernels. At depth `all` everything runs.
"""

OF_LEVELS = ("level", "cpu_level")
"""Names of parameters that choose an instruction set of the CPU's kernels."""

Case = dict[str, str]
"""A case: the values of its parameters by name, as text."""


class Share(NamedTuple):
    """How much of a grid runs: a sample of this strength, or this number of cases."""

    strength: int
    cases: int | None = None


def covered(case: Case, strength: int) -> set[tuple[tuple[str, str], ...]]:
    """The combinations of `strength` values of a case; of all its values if it has fewer parameters."""
    return set(combinations(sorted(case.items()), min(strength, len(case))))


def sample(cases: Sequence[Case], strength: int, random_: random.Random) -> list[int]:
    """Indices of cases that together have every combination of `strength` values of all cases, chosen greedily."""
    order = random_.sample(range(len(cases)), len(cases))
    offers = {number: covered(cases[number], strength) for number in order}
    missing = set().union(*offers.values())
    chosen = []
    while missing:
        # The number of new combinations of a case only shrinks. So the best case is the first whose new count is at
        # least the next one's old count.
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


class Part(NamedTuple):
    """The part of a number, from 1, of so many: neighbours of a list, as equal in number as it goes."""

    number: int
    parts: int

    def of(self, items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
        """(those of this part, the others)."""
        start, stop = ((self.number - 1 + end) * len(items) // self.parts for end in (0, 1))
        return [*items[start:stop]], [*items[:start], *items[stop:]]


def part(text: str) -> Part:
    """Read "2/20". Raises ValueError."""
    number, _, parts = text.partition("/")
    made = Part(int(number), int(parts))
    if not 1 <= made.number <= made.parts:
        raise ValueError(f"{text}: there is no such part")
    return made


def thinned(items: list[pytest.Item], depth: str, seed: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """(tests that run, tests that do not) at this depth."""
    grids: dict[tuple[str, Share], list[pytest.Function]] = {}
    for item in items:
        if depth != "all" and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            share = _share(item, depth)
            if share is not None:
                grids.setdefault((item.nodeid.partition("[")[0], share), []).append(item)
    left = levels_left_out(depth, seed, list(LEVELS), level())
    out = {id(item) for item in items if not _belongs(item, depth, left)}
    for (name, share), grid in grids.items():
        cases = [{key: repr(value) for key, value in item.callspec.params.items()} for item in grid]
        kept = set(_drawn(share, cases, random.Random(f"{seed} {name}")))
        out |= {id(item) for number, item in enumerate(grid) if number not in kept}
    return [item for item in items if id(item) not in out], [item for item in items if id(item) in out]


def levels_left_out(depth: str, seed: int, levels: Sequence[str], own: str) -> set[str]:
    """Instruction sets whose kernels do not run: of those below the processor's best, all but one in `make test`, and
    all in `make check`.

    levels: all instruction sets, the best first. Each needs half a minute to compile a library on torch's headers.
    """
    lower = list(levels)[list(levels).index(own) + 1 :]
    if depth == "all" or not lower:
        return set()
    return {*lower} - ({random.Random(f"{seed} level").choice(lower)} if depth == "test" else set())


def _belongs(item: pytest.Item, depth: str, left_out: set[str]) -> bool:
    """Whether the test, apart from its parameters, runs at this depth."""
    if (
        isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and left_out & {item.callspec.params.get(name) for name in OF_LEVELS}
    ):
        return False
    if depth == "check" and item.get_closest_marker("gpu") and not cuda_available():
        return False  # it would be skipped
    if depth == "check" and item.get_closest_marker("slow"):
        return item.get_closest_marker("lint") is not None
    return depth == "all" or item.get_closest_marker("exhaustive") is None


def _drawn(share: Share, cases: Sequence[Case], random_: random.Random) -> Sequence[int]:
    """The indices of the cases that run."""
    if share.cases is not None:
        return random_.sample(range(len(cases)), min(share.cases, len(cases)))
    return sample(cases, share.strength, random_) if share.strength else ()


def _share(item: pytest.Function, depth: str) -> Share | None:
    """The portion of a test's grid that runs; None: all of it."""
    if item.get_closest_marker("gpu"):  # a run on a GPU runs all of them
        return None
    of_sampled, of_emulated = STRENGTHS[depth]
    mark, few = item.get_closest_marker("sampled"), item.get_closest_marker("few")
    cases = mark.kwargs.get("cases") if mark else None
    strength = min(of_sampled, mark.kwargs.get("strength", 2)) if mark else None
    if EMULATED in (item.callspec.params.get("level"), item.callspec.params.get("cuda_level")):
        return Share(of_emulated if strength is None else min(strength, of_emulated))
    if depth == "check":
        return Share(of_sampled, few.kwargs["cases"] if few else cases)
    return None if strength is None else Share(strength, cases)
