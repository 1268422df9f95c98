"""Choose what lies where and when it moves (--placement auto), so that the simulated step under budgets is shortest.

A placement has a tier for each column that can leave the device (`config.placement.ROWS`), a share of each that does,
and switches: late updates, and the order of the micro-batches. All combinations of tiers and switches are looked at.
Within one the shares are searched. The more of a column leaves, the less is on the device. So the least share of the
first column that fits is found by halving, for shares of the others on a grid, which is then refined around the best.
What can be no better than the two best so far, because one lane alone would take as long, is not simulated.

(Gemini of PatrickStar and ColossalAI moves chunks by what a traced first iteration needed: Fang et al. 2021,
arXiv:2108.05818. Here the list of a step is known before.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from megazero.config.placement import SEARCHED, PlacementRow, as_flags
from megazero.config.source import ConfigError
from megazero.config.tiers import Tier
from megazero.config.validate import problems_of
from megazero.plan.placed_step import Machine, PlacedStep
from megazero.program.error import ProgramError

COLUMNS = tuple(row for row in SEARCHED if row.tiers)
SWITCHES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("late_update", (False, True)),
    ("micro_batch_order", ("horizontal", "vertical")),
)
"""What is there besides columns: field and values, the simplest first."""
WHOLE = 100
"""Shares are hundredths."""
GRID = (25, 50, 75, WHOLE)
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


@dataclass(frozen=True)
class SearchLimits:
    """Most bytes of a rank; None: no limit.

    device  on its device, in a step
    host    in host memory, of what has left the device
    disk    of its swap files
    """

    device: int | None = None
    host: int | None = None
    disk: int | None = None

    def hold(self, step: PlacedStep) -> bool:
        """Whether the step keeps to all of them."""
        return self.hold_device(step) and _within(step.host, self.host) and _within(step.disk, self.disk)

    def hold_device(self, step: PlacedStep) -> bool:
        return _within(step.device.nbytes, self.device)


def _within(nbytes: int, limit: int | None) -> bool:
    return limit is None or nbytes <= limit


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
    able = {Tier.HOST, Tier.DISK} if _has_disks(machine) else {Tier.HOST}
    tiers = [(Tier.DEVICE, *(tier for tier in row.tiers if tier in able)) for row in COLUMNS]
    values = [values for _, values in SWITCHES]
    for placed in product(*tiers):
        for chosen in product(*values):
            search.combination(placed, dict(zip((name for name, _ in SWITCHES), chosen, strict=True)))
    ranked = search.ranked()
    if not ranked:
        raise ConfigError([search.refusal()])
    return PlacementChoice(ranked[0], ranked[1] if len(ranked) > 1 else None, search.simulated)


def _has_disks(machine: Machine) -> bool:
    return bool(machine.run.offload.nvme_path) and machine.rates.has_disks


@dataclass
class _Search:
    """The search on its way.

    found      the fastest placement of each combination that keeps to the budgets, in the order of the combinations
    over       of combinations that do not, the placement with least on the device
    simulated  number of simulated steps
    failed     the first error of a combination that cannot run
    """

    machine: Machine
    budgets: SearchLimits
    found: list[PlacedStep] = field(default_factory=list)
    over: list[PlacedStep] = field(default_factory=list)
    simulated: int = 0
    failed: ConfigError | ProgramError | None = None

    def ranked(self) -> list[PlacedStep]:
        """The fastest first, but for a simpler one that takes as long."""
        ranked = list[PlacedStep]()
        left = [*self.found]
        while left and len(ranked) < 2:
            fastest = min(step.seconds for step in left)
            ranked.append(next(step for step in left if step.seconds <= fastest * (1 + EQUAL)))
            left.remove(ranked[-1])
        return ranked

    def combination(self, tiers: Sequence[Tier], switches: Mapping[str, Any]) -> None:
        """Look at one combination of tiers and switches."""
        rows = list(zip(COLUMNS, tiers, strict=True))
        leaving = [(row, tier) for row, tier in rows if tier is not Tier.DEVICE]
        staying = {row.field: tier.value for row, tier in rows if tier is Tier.DEVICE}
        fixed = {**staying, **switches}
        try:
            all_of_it = self._placed(leaving, [WHOLE] * len(leaving), fixed)
            if problems_of(all_of_it.run, self.machine.cluster.axes.world_size):
                return
            if not self.budgets.hold_device(all_of_it):
                self.over.append(all_of_it)
                return
            best = self._best(leaving, fixed)
        except (ConfigError, ProgramError) as error:  # budgets of other flags that this order of the step does not keep
            self.failed = self.failed or error
            return
        if best is None:
            self.over.append(all_of_it)
        else:
            self.found.append(best)

    def _best(self, leaving: Leaving, fixed: Mapping[str, Any]) -> PlacedStep | None:
        """The fastest of a combination that keeps to the budgets and may be among the two fastest of all."""
        best, at = self._fastest(leaving, fixed, self._grid(leaving, fixed), None, ())
        if best is None or not leaving:
            return best
        nearby = self._finer(leaving, fixed, at)
        return self._fastest(leaving, fixed, nearby, best, at, self._limit())[0]

    def _limit(self) -> float:
        """The seconds of a step above which a combination is neither the best nor the next best of those found."""
        known = sorted(step.seconds for step in self.found)
        return known[1] * (1 + EQUAL) if len(known) > 1 else math.inf

    def _fastest(
        self,
        leaving: Leaving,
        fixed: Mapping[str, Any],
        shares: Iterator[tuple[int, ...]],
        best: PlacedStep | None,
        at: tuple[int, ...],
        limit: float = math.inf,
    ) -> tuple[PlacedStep | None, tuple[int, ...]]:
        """The fastest with these shares, or `best`, and its shares. limit: what takes longer does not matter."""
        for chosen in shares:
            step = self._placed(leaving, chosen, fixed)
            if not self.budgets.hold(step):
                continue
            if best is not None and (step.least_seconds >= best.seconds or step.least_seconds > limit):
                continue
            if best is None or self._seconds(step) < best.seconds:
                best, at = step, chosen
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
                continue
            yield least, *others
            if not others:
                yield from ((share,) for share in ALONE if share > least)

    def _finer(self, leaving: Leaving, fixed: Mapping[str, Any], at: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Shares around those of the best."""
        steps = FINER[min(len(leaving), 2)]
        if len(leaving) == 1:
            yield from ((at[0] + step,) for step in steps if 0 < at[0] + step <= WHOLE)
            return
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
        low, high = 0, WHOLE
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high

    def _placed(self, leaving: Leaving, shares: Sequence[int], fixed: Mapping[str, Any]) -> PlacedStep:
        moved = {
            row.field: tier.value + (f":{share / WHOLE:g}" if share < WHOLE else "")
            for (row, tier), share in zip(leaving, shares, strict=True)
        }
        return self.machine.placed({**moved, **fixed})

    def refusal(self) -> str:
        """Why nothing keeps to the budgets, and what would help."""
        if not self.over:
            assert self.failed is not None, "a run without any placement"
            raise self.failed
        limits, disks = self.budgets, _has_disks(self.machine)
        more = "" if disks else ", --nvme-path DIR for state on disks"
        fits = [step for step in self.over if limits.hold_device(step)]
        if not fits:
            least = min(self.over, key=lambda step: step.device.nbytes)
            return (
                f"--device-memory-budget {limits.device:,}: no placement keeps to it; the least that a rank takes is "
                f"{least.device.nbytes:,} bytes, with {as_flags(dict(least.settings)) or 'all on the device'}, at "
                f"{least.device.instruction} on stage {least.device.stage}; nearest: that budget, a smaller "
                "--micro-batch-size, or --recompute-granularity full"
            )
        hosted = [step for step in fits if _within(step.host, limits.host)]
        if limits.host is not None and not hosted:
            least = min(fits, key=lambda step: step.host)
            return (
                f"--host-memory-budget {limits.host:,}: of the placements that keep to the device's budget the one "
                f"with least in host memory takes {least.host:,} bytes there, with {as_flags(dict(least.settings))}; "
                f"nearest: that budget, a smaller --nvme-buffer-bytes{more}"
            )
        least = min(hosted, key=lambda step: step.disk)
        return (
            f"--nvme-path: the swap files of a rank have {limits.disk or 0:,} bytes of room, and with "
            f"{as_flags(dict(least.settings))} they take {least.disk:,}; nearest: a folder more, on another disk"
        )
