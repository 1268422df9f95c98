"""Choose what lies where and when it moves (--placement auto), so that the simulated step under budgets is shortest.

A placement has a tier for each column that can leave the device (`config.placement.ROWS`), a share of each that does,
and switches: late updates, and the order of the micro-batches. A combination of tiers and switches has neighbours:
those that differ in one of them. The search looks at a few combinations, then at the neighbours of the best ones: the
best of all, and the best with each tier and with each value of a switch. It goes on until these have no neighbour that
was not looked at, or the best takes no longer than its computation alone. While nothing keeps to the budgets, those
that come nearest are the best. (The best of all alone is not enough: what is slower with one order of micro-batches may
be faster with the other, and the way there leads through slower ones.)

Within a combination the shares are searched. The more of a column leaves, the less is on the device. So the least share
of the first column that fits is found, for shares of the others on a grid, which is then refined around the best. What
can be no better than the two best so far, because one lane alone would take as long, is not simulated.

(Gemini of PatrickStar and ColossalAI moves chunks by what a traced first iteration needed: Fang et al. 2021,
arXiv:2108.05818. Here the list of a step is known before.)
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from megazero.config.placement import ROWS, PlacementRow
from megazero.config.source import ConfigError
from megazero.config.tiers import Tier, TierShare
from megazero.config.validate import problems_of
from megazero.plan.leaving_disks import buffer_problems
from megazero.plan.placed_step import Machine, PlacedStep
from megazero.plan.search_limits import SearchLimits, refusal
from megazero.program.error import ProgramError

COLUMNS = tuple(row for row in ROWS.values() if row.column)
FIRST = "offload_optimizer"
"""The column that gives way first."""
SWITCHES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("late_update", (False, True)),
    ("micro_batch_order", ("horizontal", "vertical")),
)
"""What is there besides columns: field and values, the simplest first."""
WHOLE = 100
"""Shares are hundredths."""
GRID = (WHOLE, 75, 50, 25)
"""Shares of the columns behind the first, before they are refined."""
ALONE = tuple(range(10, WHOLE + 1, 10))
"""Shares of a column that leaves alone: more than the least may be faster, where host and device update side by side.
"""
FINER = {1: (-5, 5), 2: (-12, 12)}
"""Steps from the best share, where one column leaves and where more do."""
EQUAL = 1e-3
"""Of two combinations whose times differ by less, relative to them, the simpler one is taken: no prediction is as good
as that.
"""

Leaving = Sequence[tuple[PlacementRow, Tier]]
"""The columns that leave the device, and where to."""
Combination = tuple[int, ...]
"""By column the number of its tier, then by switch that of its value: 0 is the simplest."""


def _simplicity(combination: Combination) -> tuple[int, Combination]:
    """What sorts combinations, the simplest first: by how much differs from everything at home, and then by what."""
    return sum(map(bool, combination)), combination


@dataclass(frozen=True)
class PlacementChoice:
    """What was chosen.

    best       the fastest
    next_best  the fastest of those with other tiers or switches; None if no other fits
    looked_at  number of placements whose step was simulated
    """

    best: PlacedStep
    next_best: PlacedStep | None
    looked_at: int


def choose_placement(machine: Machine, budgets: SearchLimits) -> PlacementChoice:
    """The placement with the shortest simulated step that keeps to the budgets. Communicates nothing; the result
    depends on the arguments alone. Raises ConfigError with the numbers if none keeps to them.
    """
    search = _Search(machine, budgets)
    with _without_collections():
        search.run()
    ranked = search.ranked()
    if not ranked:
        if not search.over:
            assert search.failed is not None, "a run without any placement"
            raise search.failed
        raise ConfigError([refusal(list(search.over.values()), budgets, _has_disks(machine))])
    return PlacementChoice(ranked[0], ranked[1] if len(ranked) > 1 else None, search.simulated)


@contextmanager
def _without_collections() -> Iterator[None]:
    """No collections of cyclic garbage. Lists are hundreds of thousands of small objects, and the collector would go
    through them so often that a search took twice as long. It would find nothing: a search makes no cycles.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _has_disks(machine: Machine) -> bool:
    return bool(machine.run.offload.nvme_path) and machine.rates.has_disks


@dataclass
class _Search:
    """The search on its way.

    found      the fastest placement of each combination that keeps to the budgets
    over       of combinations that do not, the placement with least on the device
    seen       combinations that were looked at
    simulated  number of simulated steps
    failed     the first error of a combination that cannot run
    """

    machine: Machine
    budgets: SearchLimits
    found: dict[Combination, PlacedStep] = field(default_factory=dict)
    over: dict[Combination, PlacedStep] = field(default_factory=dict)
    seen: set[Combination] = field(default_factory=set)
    simulated: int = 0
    failed: ConfigError | ProgramError | None = None

    def __post_init__(self) -> None:
        able = (Tier.DEVICE, Tier.HOST, *([Tier.DISK] if _has_disks(self.machine) else []))
        self.tiers = [able] * len(COLUMNS)
        self.counts = [*map(len, self.tiers), *(len(values) for _, values in SWITCHES)]

    def run(self) -> None:
        """Look at the first combinations, and then at the neighbours of the best ones."""
        last = [count - 1 for count in self.counts[: len(COLUMNS)]]
        switches = list(product(*(range(count) for count in self.counts[len(COLUMNS) :])))
        home = [0] * len(COLUMNS)
        first = [home, *([tier, *home[1:]] for tier in range(1, self.counts[0])), [1] * len(COLUMNS), last]
        for columns in first:
            self._look_at((*columns, *switches[0]))
        if not self.found:
            for columns, chosen in product(first[-2:], switches):
                self._look_at((*columns, *chosen))
        floor = self._placed((), (), {}).computed * (1 + EQUAL)
        while (best := self._unexplored()) is not None:
            if len(self.found) > 1 and min(step.seconds for step in self.found.values()) <= floor:
                return  # computation alone takes as long
            for near in self._neighbours(best):
                self._look_at(near)

    def _neighbours(self, combination: Combination) -> list[Combination]:
        """Those that differ in one tier or switch, the simplest first."""
        every = [
            (*combination[:at], value, *combination[at + 1 :])
            for at, count in enumerate(self.counts)
            for value in range(count)
        ]
        return sorted(set(every) - {combination}, key=_simplicity)

    def _unexplored(self) -> Combination | None:
        """Of the best ones the first that has a neighbour that was not looked at."""
        if self.found:
            order = sorted(self.found, key=lambda each: (self.found[each].seconds, _simplicity(each)))
        else:
            order = sorted(self.over, key=lambda each: (self.budgets.excess(self.over[each]), _simplicity(each)))
        had: set[tuple[int, int]] = set()
        for combination in order:
            values = {*enumerate(combination)}
            if not values <= had and not self.seen.issuperset(self._neighbours(combination)):
                return combination
            had |= values
        return None

    def ranked(self) -> list[PlacedStep]:
        """The fastest first, but for a simpler one that takes as long."""
        ranked = list[PlacedStep]()
        left = [self.found[each] for each in sorted(self.found, key=_simplicity)]
        while left and len(ranked) < 2:
            fastest = min(step.seconds for step in left)
            ranked.append(next(step for step in left if step.seconds <= fastest * (1 + EQUAL)))
            left.remove(ranked[-1])
        return ranked

    def _look_at(self, combination: Combination) -> None:
        """Look at a combination of tiers and switches, if nobody has."""
        if combination in self.seen:
            return
        self.seen.add(combination)
        tiers = [tiers[number] for tiers, number in zip(self.tiers, combination, strict=False)]
        rows = list(zip(COLUMNS, tiers, strict=True))
        leaving = [(row, tier) for row, tier in rows if tier is not Tier.DEVICE]
        staying = {row.field: TierShare() for row, tier in rows if tier is Tier.DEVICE}
        switches = zip(SWITCHES, combination[len(COLUMNS) :], strict=True)
        fixed = {**staying, **{name: values[number] for (name, values), number in switches}}
        try:
            all_of_it = self._placed(leaving, [WHOLE] * len(leaving), fixed)
            if problems_of(all_of_it.run, self.machine.cluster.axes.world_size):
                return
            if buffer_problems(all_of_it.run, self.machine.cluster.axes, self.machine.cluster.kind):
                return
            if not self.budgets.hold_device(all_of_it):
                self.over[combination] = all_of_it
                return
            best = self._best(leaving, fixed)
        except (ConfigError, ProgramError) as error:  # budgets of other flags that this order of the step does not keep
            self.failed = self.failed or error
            return
        if best is not None:
            self.found[combination] = best
        elif math.isinf(self._limit()):
            self.over[combination] = all_of_it

    def _best(self, leaving: Leaving, fixed: Mapping[str, Any]) -> PlacedStep | None:
        """The fastest of a combination that keeps to the budgets and may be among the two fastest of all."""
        best, at = self._fastest(leaving, fixed, self._grid(leaving, fixed), None, ())
        if best is None:  # the least that keeps to the device's budget may be too much for the host's memory
            best, at = self._fastest(leaving, fixed, iter([(WHOLE,) * len(leaving)]), None, ())
        if best is None or not leaving:
            return best
        return self._fastest(leaving, fixed, self._finer(leaving, fixed, at), best, at)[0]

    def _limit(self) -> float:
        """The seconds of a step above which a combination is neither the best nor the next best of those found."""
        known = sorted(step.seconds for step in self.found.values())
        return known[1] * (1 + EQUAL) if len(known) > 1 else math.inf

    def _fastest(
        self,
        leaving: Leaving,
        fixed: Mapping[str, Any],
        shares: Iterator[tuple[int, ...]],
        best: PlacedStep | None,
        at: tuple[int, ...],
    ) -> tuple[PlacedStep | None, tuple[int, ...]]:
        """The fastest with these shares, or `best`, and its shares. Of shares on a grid, beside which a first column
        gives way as far as it must, those behind the first that is slower are slower too.
        """
        limit, falling = self._limit(), best is None and len(leaving) > 1
        for chosen in shares:
            step = self._placed(leaving, chosen, fixed)
            if step.least_seconds > limit or (best is not None and step.least_seconds >= best.seconds):
                continue
            if not self.budgets.hold(step):
                continue
            seconds = self._seconds(step)
            if best is None or seconds < best.seconds:
                best, at = step, chosen
            elif falling:
                break
        return best, at

    def _seconds(self, step: PlacedStep) -> float:
        self.simulated += 1
        return step.seconds

    def _grid(self, leaving: Leaving, fixed: Mapping[str, Any]) -> Iterator[tuple[int, ...]]:
        """Shares of the columns that leave: the least of the first that fits, beside each of the others."""
        if not leaving:
            yield ()
            return
        for others in product(*((WHOLE,) if row.whole else GRID for row, _ in leaving[1:])):
            least = self._least(leaving, others, fixed)
            if least is None:
                return  # less of the others is more on the device
            yield least, *others
            if not others and leaving[0][0].field == FIRST:
                yield from ((share,) for share in ALONE if share > least)

    def _finer(self, leaving: Leaving, fixed: Mapping[str, Any], at: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Shares around those of the best, and all of the first column."""
        steps = FINER[min(len(leaving), 2)]
        if len(leaving) == 1:
            near = (at[0] + step for step in steps if leaving[0][0].field == FIRST)
            yield from ((share,) for share in near if 0 < share <= WHOLE)
            return
        if at[0] < WHOLE:
            yield WHOLE, *at[1:]  # nothing of the column is left to be updated on the device
        for number, step in product((n for n in range(1, len(at)) if not leaving[n][0].whole), steps):
            others = [*at[1:]]
            others[number - 1] += step
            if 0 < others[number - 1] <= WHOLE and (least := self._least(leaving, others, fixed)) is not None:
                yield least, *others

    def _least(self, leaving: Leaving, others: Sequence[int], fixed: Mapping[str, Any]) -> int | None:
        """The least share of the first column with which the device's budget is kept; None if there is none."""

        def fits(share: int) -> bool:
            return self.budgets.hold_device(self._placed(leaving, (share, *others), fixed))

        if not fits(WHOLE):
            return None
        if self.budgets.tensors is None:
            return 1
        if leaving[0][0].field == FIRST:
            limit = self.budgets.tensors
            share = self._placed(leaving, (WHOLE, *others), fixed).least_share(limit)
            while not fits(share):  # where updates on the device fetch gradients, that takes memory
                nearer = self._placed(leaving, (share, *others), fixed).least_share(limit)
                share = min(WHOLE, max(share + 1, nearer))
            while self._placed(leaving, (share, *others), fixed).least_share(limit) < share and fits(share - 1):
                share -= 1
            return share
        low, high = 0, WHOLE
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high

    def _placed(self, leaving: Leaving, shares: Sequence[int], fixed: Mapping[str, Any]) -> PlacedStep:
        moved = {row.field: TierShare(tier, share / WHOLE) for (row, tier), share in zip(leaving, shares, strict=True)}
        return self.machine.placed({**moved, **fixed})
