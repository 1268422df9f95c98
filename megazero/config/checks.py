"""The input of checks of a run, and helpers that name the nearest valid values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megazero.config.schema import Run


@dataclass(frozen=True)
class CheckContext:
    """The input of a check.

    run         the run
    world_size  number of ranks; None if it is not known
    given       fields that the command line itself sets
    own_data    whether a program passes the training data, so that the run does not name any
    """

    run: Run
    world_size: int | None
    given: frozenset[str]
    own_data: bool = False

    @property
    def dp(self) -> int | None:
        """Number of data-parallel ranks; None if the world size is not known or tp x pp does not divide it."""
        ranks = self.run.parallel.tp * self.run.parallel.pp
        return None if self.world_size is None or self.world_size % ranks else self.world_size // ranks


Found = Iterator[str]


@dataclass(frozen=True)
class Check:
    """A relation between fields.

    find   yields a sentence for each problem
    reads  the fields that it reads
    """

    find: Callable[[CheckContext], Iterable[str]]
    reads: frozenset[str]

    def problems(self, context: CheckContext) -> list[str]:
        return list(self.find(context))


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest(value: int, valid: Iterable[int]) -> str:
    """The valid values next below and above `value`, as words."""
    valid = sorted(set(valid))
    below, above = [v for v in valid if v < value][-1:], [v for v in valid if v > value][:1]
    return " or ".join(str(v) for v in below + above)


def nearest_multiples(value: int, of: int) -> str:
    return nearest(value, [m for m in (value // of * of, (value // of + 1) * of) if m >= of])


def check(find: Callable[[CheckContext], Iterable[str]], *reads: str) -> Check:
    """A check and the names of the fields that it reads."""
    return Check(find, frozenset(reads))
