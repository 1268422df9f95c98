"""One search, for all who ask which change of a run fits, or is fastest: candidates, limits, costs and a bound.

Three questions are asked of it. Which changes of a run keep its budgets of memory (`plan.budget_changes`)? How large
may groups of micro-batches be (`plan.budgets`)? What should lie where (`plan.placement`)? A candidate is a run, and
what the run takes is found by walking its step's list, so few should be tried.

What backward computes again under a budget of activations is another search (`plan.knapsack`). There is no list to walk
for a candidate: what the chunks of a stage take adds up, and four chunks of eleven blocks have 37 million combinations.
So that search works on rows of arrays, and says how far from the best its choice is at most.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Generic, NamedTuple, Protocol, TypeVar

Candidate = TypeVar("Candidate")


class Taken(Protocol):
    """The most bytes that a rank of a run takes in every tier."""

    @property
    def device_bytes(self) -> int: ...

    @property
    def host_bytes(self) -> int: ...

    @property
    def disk(self) -> int: ...


class Excess(NamedTuple):
    """Bytes above each of the limits, in the order in which a search for a placement looks at them."""

    device: int
    host: int
    memory: int
    disk: int


@dataclass(frozen=True)
class SearchLimits:
    """Most bytes of a rank; None: no limit.

    device     on its device, in a step
    host       in host memory, of what has left the device
    disk       of its swap files
    workspace  of the device's bytes those that matrix products take for themselves, and no plan has
    memory     of the host's memory, or of the budget for all of it
    is_one     whether the device's memory is the host's
    """

    device: int | None = None
    host: int | None = None
    disk: int | None = None
    workspace: int = 0
    memory: int | None = None
    is_one: bool = False

    @property
    def tensors(self) -> int | None:
        """Most bytes of tensors on the device."""
        return None if self.device is None else max(0, self.device - self.workspace)

    @property
    def together(self) -> int | None:
        """Most bytes on the device and in host memory, where they are one memory."""
        return self.memory if self.is_one else None

    def of_memory(self, taken: Taken) -> int:
        """Bytes of the host's memory that a rank takes."""
        return taken.host_bytes + (taken.device_bytes + self.workspace) * self.is_one

    def excess(self, taken: Taken) -> Excess:
        """Bytes above each of them."""
        return Excess(
            _above(taken.device_bytes, self.tensors),
            _above(taken.host_bytes, self.host),
            _above(self.of_memory(taken), self.memory),
            _above(taken.disk, self.disk),
        )

    def hold(self, taken: Taken) -> bool:
        """Whether a rank keeps to all of them."""
        return not any(self.excess(taken))

    def hold_device(self, taken: Taken) -> bool:
        return not self.excess(taken).device


def _above(nbytes: int, limit: int | None) -> int:
    return 0 if limit is None else max(0, nbytes - limit)


class Pruned(Enum):
    """Why a candidate was left out."""

    BOUND = "it cannot be better"
    LIMITS = "it does not fit"


@dataclass(frozen=True)
class Question(Generic[Candidate]):
    """What is asked.

    fits     whether a candidate keeps to what limits it. Default: all do
    cost     of one that fits, at least 0. The least is best, and of equal ones the first. Default: none, so that the
             order of the candidates says what is better
    bound    what the cost of a candidate never falls below, found in less time than the cost and `fits`
    useless  a cost above which a candidate is of no use to the one who asks
    wanted   number of candidates: the best so many
    falls    whether costs that have risen once do not fall again, so that nobody behind is better
    """

    fits: Callable[[Candidate], bool] = lambda _: True
    cost: Callable[[Candidate], float] = lambda _: 0.0
    bound: Callable[[Candidate], float] = lambda _: -inf
    useless: float = inf
    wanted: int = 1
    falls: bool = False


@dataclass
class Answer(Generic[Candidate]):
    """What was found so far.

    best    the candidates that are wanted, the best first; fewer where fewer fit
    costs   of these
    tried   number of candidates that fit and whose costs were asked for
    pruned  number of the others, by reason
    """

    best: list[Candidate] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    tried: int = 0
    pruned: Counter[Pruned] = field(default_factory=Counter)


def search(
    question: Question[Candidate], candidates: Iterable[Candidate], answer: Answer[Candidate] | None = None
) -> Answer[Candidate]:
    """Walk through candidates, one after the other. They may be made on the way, of what is known by then. answer: of
    the same question to other candidates, which goes on: these only count if they are better.

    The bound: a candidate is left out, and nothing else is asked of it, if `question.bound` says that it costs at least
    as much as the last of the best so far, when there are as many as wanted, or more than what is useful. As no cost
    falls below its bound, what is left out is no better than the answer's best. So these are the best of all candidates
    up to where the walk ends: where no more are, where the best cost nothing, or where costs rise that only fall.
    """
    answer = Answer() if answer is None else answer
    for candidate in candidates:
        worst = answer.costs[-1] if len(answer.best) == question.wanted else inf
        bound = question.bound(candidate)
        if bound >= worst or bound > question.useless:
            answer.pruned[Pruned.BOUND] += 1
            continue
        if not question.fits(candidate):
            answer.pruned[Pruned.LIMITS] += 1
            continue
        answer.tried += 1
        cost = question.cost(candidate)
        if cost >= worst:
            if question.falls:
                break
            continue
        place = bisect_right(answer.costs, cost)  # behind equal ones, which came first
        answer.best.insert(place, candidate)
        answer.costs.insert(place, cost)
        del answer.best[question.wanted :], answer.costs[question.wanted :]
        if len(answer.best) == question.wanted and not answer.costs[-1]:
            break
    return answer


def least(fits: Callable[[int], bool], most: int) -> int:
    """The least number from 1 to `most` that fits, by halving. `most` fits, and so does what is above one that fits."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
