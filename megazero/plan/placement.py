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
can be no better than the two best so far, because one lane alone would take as long, is not simulated. Both searches
are `plan.search`: in the one a candidate is a combination, whose cost is the answer of the other one.

(Gemini of PatrickStar and ColossalAI moves chunks by what a traced first iteration needed: Fang et al. 2021,
arXiv:2108.05818. Here the list of a step is known before.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from megazero.config.placement import ROWS, PlacementRow
from megazero.config.source import ConfigError
from megazero.config.tiers import Tier, TierShare
from megazero.plan.placed_step import Machine, PlacedStep
from megazero.plan.search import Answer, Question, SearchLimits, least, search
from megazero.program.instruction import ProgramError
from megazero.system.collector import without_collections

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


def choose_placement(machine: Machine, limits: SearchLimits) -> PlacementChoice:
    """The placement with the shortest simulated step that keeps to the limits. Communicates nothing; the result
    depends on the arguments alone. Raises ConfigError with the numbers if none keeps to them.
    """
    walk = _Combinations(machine, limits)
    question = Question[Combination](walk.has_room, cost=lambda each: walk.fastest[each].seconds, wanted=2)
    # Lists are hundreds of thousands of small objects. The collector would go through them so often that a search took
    # twice as long, and would find nothing: a search makes no cycles.
    with without_collections():
        search(question, walk.candidates(), walk.answer)
    ranked = walk.ranked()
    if not ranked:
        if not walk.over:
            assert walk.failed is not None, "a run without any placement"
            raise walk.failed
        raise ConfigError([refusal(list(walk.over.values()), limits, _has_disks(machine))])
    return PlacementChoice(ranked[0], ranked[1] if len(ranked) > 1 else None, walk.simulated)


def _has_disks(machine: Machine) -> bool:
    return bool(machine.run.offload.nvme_path) and machine.rates.has_disks


@dataclass
class _Combinations:
    """The combinations of tiers and switches, as far as they were looked at.

    answer     the two fastest
    fastest    the fastest placement of each combination that keeps to the limits
    over       of combinations that do not, the placement with least on the device
    seen       combinations that were looked at
    simulated  number of simulated steps
    failed     the first error of a combination that cannot run
    """

    machine: Machine
    limits: SearchLimits
    answer: Answer[Combination] = field(default_factory=Answer)
    fastest: dict[Combination, PlacedStep] = field(default_factory=dict)
    over: dict[Combination, PlacedStep] = field(default_factory=dict)
    seen: set[Combination] = field(default_factory=set)
    simulated: int = 0
    failed: ConfigError | ProgramError | None = None

    def __post_init__(self) -> None:
        self.tiers = (Tier.DEVICE, Tier.HOST, *([Tier.DISK] if _has_disks(self.machine) else []))
        self.counts = [*[len(self.tiers)] * len(COLUMNS), *(len(values) for _, values in SWITCHES)]

    def candidates(self) -> Iterator[Combination]:
        """Each combination that is looked at, once."""
        for combination in self._proposed():
            if combination not in self.seen:
                self.seen.add(combination)
                yield combination

    def _proposed(self) -> Iterator[Combination]:
        """The first combinations, and then the neighbours of the best ones."""
        switches = list(product(*map(range, self.counts[len(COLUMNS) :])))
        numbers = range(len(self.tiers))
        home, host, furthest = ([number] * len(COLUMNS) for number in (0, 1, numbers[-1]))
        first = [home, *([number, *home[1:]] for number in numbers[1:]), host, furthest]
        yield from ((*columns, *switches[0]) for columns in first)
        if not self.fastest:
            yield from ((*columns, *chosen) for columns, chosen in product(first[-2:], switches))
        floor = self.machine.placed({}).computed * (1 + EQUAL)
        while (best := self._unexplored()) is not None:
            if len(self.answer.costs) > 1 and self.answer.costs[0] <= floor:
                return  # computation alone takes as long
            yield from self._neighbours(best)

    def _neighbours(self, combination: Combination) -> list[Combination]:
        """Those that differ in one tier or switch, the simplest first."""
        every = [
            (*combination[:place], value, *combination[place + 1 :])
            for place, count in enumerate(self.counts)
            for value in range(count)
        ]
        return sorted(set(every) - {combination}, key=_simplicity)

    def _unexplored(self) -> Combination | None:
        """Of the best ones the first that has a neighbour that was not looked at."""
        if self.fastest:
            order = sorted(self.fastest, key=lambda each: (self.fastest[each].seconds, _simplicity(each)))
        else:
            order = sorted(self.over, key=lambda each: (self.limits.excess(self.over[each]), _simplicity(each)))
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
        left = [self.fastest[each] for each in sorted(self.fastest, key=_simplicity)]
        while left and len(ranked) < 2:
            fastest = min(step.seconds for step in left)
            ranked.append(next(step for step in left if step.seconds <= fastest * (1 + EQUAL)))
            left.remove(ranked[-1])
        return ranked

    def has_room(self, combination: Combination) -> bool:
        """Whether a combination keeps to the limits, with shares that may make it one of the two fastest."""
        rows = [(row, self.tiers[number]) for row, number in zip(COLUMNS, combination, strict=False)]
        staying = {row.field: TierShare() for row, tier in rows if tier is Tier.DEVICE}
        switches = zip(SWITCHES, combination[len(COLUMNS) :], strict=True)
        fixed = {**staying, **{name: values[number] for (name, values), number in switches}}
        leaving = [(row, tier) for row, tier in rows if tier is not Tier.DEVICE]
        shares = _Shares(self.machine, self.limits, leaving, fixed)
        answer = Answer[_Shared]()
        try:
            all_of_it = shares.placed([WHOLE] * len(leaving))
            run = all_of_it.run
            if self.machine.problems(run):
                return False
            if not self.limits.hold_device(all_of_it):
                self.over[combination] = all_of_it
                return False
            shares.search(self._useless, answer)
        except (ConfigError, ProgramError) as error:  # budgets of other flags that this order of the step does not keep
            self.failed = self.failed or error
            return False
        finally:
            self.simulated += answer.tried
        if answer.best:
            self.fastest[combination] = answer.best[0].step
        elif math.isinf(self._useless):
            self.over[combination] = all_of_it
        return bool(answer.best)

    @property
    def _useless(self) -> float:
        """The seconds of a step above which a combination is neither the best nor the next best."""
        costs = self.answer.costs
        return costs[1] * (1 + EQUAL) if len(costs) > 1 else math.inf


class _Shared(NamedTuple):
    """A placement with these hundredths of the columns that leave."""

    shares: tuple[int, ...]
    step: PlacedStep


@dataclass(frozen=True)
class _Shares:
    """The placements of a combination, which differ in the shares of the columns that leave.

    fixed  its switches, and the columns that stay
    """

    machine: Machine
    limits: SearchLimits
    leaving: Leaving
    fixed: Mapping[str, Any]

    def search(self, useless: float, answer: Answer[_Shared]) -> None:
        """Answer with the fastest that keeps to the limits. useless: seconds of a step above which it is of no use.

        Of shares on a grid, beside which a first column gives way as far as it must, those behind the first that is
        slower are slower too.
        """
        question = Question[_Shared](
            fits=lambda each: self.limits.hold(each.step),
            cost=lambda each: each.step.seconds,
            bound=lambda each: each.step.least_seconds,
            useless=useless,
        )
        falling = replace(question, falls=len(self.leaving) > 1)
        search(falling, self._with(self._grid()), answer)
        if not answer.best:  # the least that keeps to the device's budget may be too much for the host's memory
            search(question, self._with([(WHOLE,) * len(self.leaving)]), answer)
        if answer.best and self.leaving:
            search(question, self._with(self._finer(answer.best[0].shares)), answer)

    def _with(self, shares: Iterable[tuple[int, ...]]) -> Iterator[_Shared]:
        return (_Shared(each, self.placed(each)) for each in shares)

    def placed(self, shares: Sequence[int]) -> PlacedStep:
        """That with these shares."""
        moved = {
            row.field: TierShare(tier, share / WHOLE) for (row, tier), share in zip(self.leaving, shares, strict=True)
        }
        return self.machine.placed({**moved, **self.fixed})

    def _grid(self) -> Iterator[tuple[int, ...]]:
        """The least share of the first column that fits, beside shares of each of the others."""
        if not self.leaving:
            yield ()
            return
        for others in product(*((WHOLE,) if row.whole else GRID for row, _ in self.leaving[1:])):
            share = self._least(others)
            if share is None:
                return  # less of the others is more on the device
            yield share, *others
            if not others and self.leaving[0][0].field == FIRST:
                yield from ((more,) for more in ALONE if more > share)

    def _finer(self, best: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Shares around those of the best, and all of the first column."""
        steps = FINER[min(len(self.leaving), 2)]
        if len(self.leaving) == 1:
            near = (best[0] + step for step in steps if self.leaving[0][0].field == FIRST)
            yield from ((share,) for share in near if 0 < share <= WHOLE)
            return
        if best[0] < WHOLE:
            yield WHOLE, *best[1:]  # nothing of the column is left to be updated on the device
        for number, step in product((n for n in range(1, len(best)) if not self.leaving[n][0].whole), steps):
            others = [*best[1:]]
            others[number - 1] += step
            if 0 < others[number - 1] <= WHOLE and (share := self._least(others)) is not None:
                yield share, *others

    def _least(self, others: Sequence[int]) -> int | None:
        """The least share of the first column with which the device's budget is kept; None if there is none."""

        def fits(share: int) -> bool:
            return self.limits.hold_device(self.placed((share, *others)))

        if not fits(WHOLE):
            return None
        if self.limits.tensors is None:
            return 1
        if self.leaving[0][0].field != FIRST:
            return least(fits, WHOLE)
        limit = self.limits.tensors
        share = self.placed((WHOLE, *others)).least_share(limit)
        while not fits(share):  # where updates on the device fetch gradients, that takes memory
            nearer = self.placed((share, *others)).least_share(limit)
            share = min(WHOLE, max(share + 1, nearer))
        while self.placed((share, *others)).least_share(limit) < share and fits(share - 1):
            share -= 1
        return share


def refusal(over: Sequence[PlacedStep], limits: SearchLimits, disks: bool) -> str:
    """Why nothing keeps to the budgets, and what would help. over: what was tried. disks: whether with disks."""
    more = "" if disks else ", --nvme-path DIR for state on disks"
    fits = [step for step in over if limits.hold_device(step)]
    if not fits:
        nearest = min(over, key=lambda step: step.device.nbytes)
        of_products = f", {limits.workspace:,} of them for matrix products" * (limits.workspace > 0)
        takes = nearest.device.nbytes + limits.workspace
        return (
            f"--device-memory-budget {limits.device:,}: no placement keeps to it; the least that a rank takes is "
            f"{takes:,} bytes{of_products}, with {nearest.flags or 'all on the device'}, at "
            f"{nearest.device.instruction} on stage {nearest.device.stage}; nearest: that budget, a smaller "
            "--micro-batch-size, or --recompute-granularity full"
        )
    hosted = [step for step in fits if not limits.excess(step).host]
    if not hosted:
        nearest = min(fits, key=lambda step: step.host_bytes)
        return (
            f"--host-memory-budget {limits.host:,}: of the placements that keep to the device's budget the one with "
            f"least in host memory takes {nearest.host_bytes:,} bytes there, with {nearest.flags}; nearest: that "
            f"budget, a smaller --nvme-buffer-bytes{more}"
        )
    nearest = min(hosted, key=limits.of_memory)
    if limits.excess(nearest).memory:
        flags, whole = nearest.flags or "all on the device", f"{limits.of_memory(nearest):,}"
        if limits.is_one and limits.memory == limits.device:
            return (
                f"--device-memory-budget {limits.memory:,}: it is of all memory of a rank on a CPU, and the placement "
                f"that takes least takes {whole} bytes, with {flags}; nearest: that budget, a smaller "
                f"--micro-batch-size{more}"
            )
        return (
            f"--placement auto: this host's memory has {limits.memory:,} bytes for a rank, and the placement that "
            f"takes least of it takes {whole}, with {flags}; nearest: fewer ranks on this host, a smaller "
            f"--micro-batch-size{more}"
        )
    nearest = min((step for step in hosted if not limits.excess(step).memory), key=lambda step: step.disk)
    return (
        f"--nvme-path: the swap files of a rank have {limits.disk or 0:,} bytes of room, and with "
        f"{nearest.flags} they take {nearest.disk:,}; nearest: a folder more, on another disk"
    )
