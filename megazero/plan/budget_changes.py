"""Changes of a run that take less memory, the cheapest first, and the search for one with which it keeps its budgets.

Nothing is estimated: every change is made to the run, and the run that comes out is validated and walked through like
any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from megazero.config.checks_layout import least_buffer
from megazero.config.derive import bucket_size, tiers, writes_activations
from megazero.config.inventory import parameters
from megazero.config.options import run_options
from megazero.config.placement import applied
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.config.tiers import ALIGNMENT, Tier, TierShare
from megazero.config.validate import problems_of
from megazero.mpu.axes import Axes, axes_of
from megazero.plan.rank_state import has_nccl
from megazero.plan.search import Answer, Question, SearchLimits, least, search
from megazero.plan.step_lists import buffer_problems
from megazero.plan.step_memory import TierPeaks, run_memories
from megazero.plan.traffic import unit_problems

NEW_FOLDER = "DIR"
"""Stands for a folder that the user has to name."""
MOST_PARTS = 1024
"""Parts of a model's state that smaller buffers may lead to."""
COLUMNS = ("offload_optimizer", "offload_gradients", "offload_params")
"""Columns of which a share leaves the device, the cheapest in time first. Optimizer state is used once in a step,
gradients in each backward, parameters in each forward too.
"""
MOST_TOGETHER = 6
"""Changes that are tried together."""


@dataclass(frozen=True)
class MemoryChange:
    """New values of some fields of a run, by name."""

    values: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        """The flags of the command line."""
        words = ((run_options()[name].flag, value) for name, value in self.values)
        return " ".join(f"{flag} {' '.join(value) if isinstance(value, tuple) else value}" for flag, value in words)

    def __add__(self, other: MemoryChange) -> MemoryChange:
        """Both; where they say different things of a field, the other one has the word."""
        return MemoryChange(tuple((dict(self.values) | dict(other.values)).items()))

    def of(self, run: Run) -> Run:
        """The changed run."""
        return applied(run, dict(self.values))


NO_CHANGE = MemoryChange(())


@dataclass(frozen=True)
class Tried:
    """A change that was tried, and bytes above the limits. peaks: as of `peaks_within`."""

    change: MemoryChange
    peaks: tuple[TierPeaks, ...]
    excess: int

    @property
    def fits(self) -> bool:
        return not self.excess


def peaks_within(run: Run, axes: Axes, kind: str, limits: SearchLimits, first: int = 0) -> tuple[TierPeaks, ...] | None:
    """The peaks of every stage of a run, or, where the stage `first` does not keep to the limits, of that one. None of
    a run that has no step: its buffers hold no unit, or its budget of activations nothing.
    """
    try:
        if buffer_problems(run, axes, kind):  # before the peaks: such a run has no list to walk through
            return None
        memories = run_memories(run, axes, kind)
        if not limits.hold(memories[first].peaks):
            return (memories[first].peaks,)
        return tuple(stage.peaks for stage in memories)
    except ConfigError:
        return None


class BudgetSearch:
    """Looks for changes with which a run keeps its budgets.

    first: the stage that is looked at first, since it has least room. kind: of device, cpu or cuda.
    """

    def __init__(self, run: Run, world_size: int, kind: str, limits: SearchLimits, first: int) -> None:
        self._run, self._world, self._kind, self._limits, self._first = run, world_size, kind, limits, first
        # what is wrong with the run itself does not speak against a change of it
        self._known = frozenset(problems_of(run, world_size, own_data=True))
        self.attempt = cache(self._attempt)
        """Try a change; None if the run would not be valid with it."""

    def single(self, wanted: int) -> list[Tried]:
        """The changes with which the run fits, the cheapest first, at most so many."""
        question = Question[Tried](lambda tried: tried.fits and not self._takes_more(tried), wanted=wanted)
        return search(question, self._every(NO_CHANGE)).best

    def together(self) -> Tried | None:
        """Several changes with which the run fits, as few as were found; else those with which least is missing.

        None if no change makes anything better.
        """
        question = Question[Tried](cost=lambda tried: tried.excess)
        better, now = None, self.attempt(NO_CHANGE)
        for _ in range(MOST_TOGETHER):
            begun, known = (NO_CHANGE, Answer[Tried]()) if now is None else (now.change, Answer([now], [now.excess]))
            best = search(question, self._every(begun), known).best
            if not best or best[0] is now:
                break
            better = now = best[0]
            if better.fits:
                return self._without_the_needless(better)
        return better

    def is_valid(self, run: Run) -> bool:
        """Whether a changed run can be made."""
        problems = problems_of(run, self._world, own_data=True)
        return self._known.issuperset(problems) and not unit_problems(run, axes_of(run, self._world))

    def peaks(self, run: Run) -> tuple[TierPeaks, ...] | None:
        """As of `peaks_within`."""
        return peaks_within(run, axes_of(run, self._world), self._kind, self._limits, self._first)

    def changes(self, run: Run) -> Iterator[MemoryChange]:
        """What may take less memory, as of `changes`."""
        return changes(run, self._world, self._kind)

    def _every(self, begun: MemoryChange) -> Iterator[Tried]:
        """Each change on top of `begun` that can be made."""
        changed = begun.of(self._run)
        for change in self.changes(changed):
            if (tried := self.attempt(begun + change)) is not None:
                yield tried
        for column in COLUMNS:
            yield from self._shares(begun, changed, column)

    def _shares(self, begun: MemoryChange, changed: Run, column: str) -> Iterator[Tried]:
        """A share of this column in host memory; on disks, which are slower, where that does not fit or is the device's
        memory.
        """
        slow = tiers(changed)[column].in_files or self._kind == "cpu"
        for tier in (Tier.HOST, Tier.DISK)[slow:]:
            if (tried := self._share(begun, changed, column, tier)) is not None:
                yield tried
                if tried.fits:
                    return

    def _attempt(self, change: MemoryChange) -> Tried | None:
        run = change.of(self._run)
        if not self.is_valid(run) or (peaks := self.peaks(run)) is None:
            return None
        return Tried(change, peaks, max(sum(self._limits.excess(stage)) for stage in peaks))

    def _share(self, begun: MemoryChange, changed: Run, column: str, tier: Tier) -> Tried | None:
        """The share of a column in a tier with which the device has room, and no more: a larger one takes time and
        host memory. In hundredths, found by halving, since a larger share hardly ever leaves more on the device.
        """
        folders = (("nvme_path", changed.offload.nvme_path or (NEW_FOLDER,)),) * (tier is Tier.DISK)
        on_device = replace(self._limits, host=None)

        def moved(hundredths: int) -> Tried | None:
            return self.attempt(begun + MemoryChange(((column, TierShare(tier, hundredths / 100)), *folders)))

        def has_room(hundredths: int) -> bool:
            tried = moved(hundredths)
            return tried is not None and all(map(on_device.hold, tried.peaks))

        return moved(least(has_room, 100) if has_room(100) else 100)

    def _takes_more(self, tried: Tried) -> bool:
        """Whether a change makes the one memory of a CPU fuller, while it keeps a budget of one tier."""
        now = self.attempt(NO_CHANGE)
        if self._kind != "cpu" or now is None:
            return False
        before, after = (next(p.total_bytes for p in each.peaks if p.stage == self._first) for each in (now, tried))
        return after > before

    def _without_the_needless(self, tried: Tried) -> Tried:
        """The same without what is not needed for it."""
        for needless in tried.change.values:
            fewer = self.attempt(MemoryChange(tuple(value for value in tried.change.values if value != needless)))
            if fewer is not None and fewer.fits:
                return self._without_the_needless(fewer)
        return tried


def changes(run: Run, world_size: int, kind: str) -> Iterator[MemoryChange]:
    """What may take less memory, the cheapest in time first. Shares of `COLUMNS` are not among them. kind: of device,
    cpu or cuda; what leaves a CPU for host memory stays in the same memory.

    ZeRO-1 costs nothing, ZeRO-2 a reduction for each micro-batch, and so on. What takes nothing away or is refused is
    tried too, and found to be so.
    """
    p, off, axes = run.parallel, run.offload, axes_of(run, world_size)
    sharded = [set_field("zero_stage", stage) for stage in range(p.zero_stage + 1, 4)]
    ordered: Sequence[tuple[bool, list[MemoryChange]]] = (
        (axes.dp > 1, sharded[:-1]),
        (bool(off.offload_optimizer) or writes_activations(run), _smaller_buffers(run)),
        (axes.dp > 1, smaller_buckets(run, axes)),
        (p.recompute_granularity == "none", [set_field("recompute_granularity", "selective")]),
        (not off.offload_activations and kind != "cpu", [set_field("offload_activations", TierShare(Tier.HOST))]),
        (p.recompute_granularity != "full", [set_field("recompute_granularity", "full")]),
        (not writes_activations(run), _activations_to_disks(run)),
        (run.schedule.micro_batch_size > 1, [set_field("micro_batch_size", 1)]),
        (axes.dp > 1, sharded[-1:]),
        (bool(off.offload_activations), [set_field("offload_activations", TierShare())]),
        (bool(off.offload_optimizer), [set_field("offload_optimizer", TierShare())]),
    )
    return (change for possible, of_kind in ordered if possible for change in of_kind)


def set_field(name: str, value: Any) -> MemoryChange:
    return MemoryChange(((name, value),))


def _activations_to_disks(run: Run) -> list[MemoryChange]:
    """Through as much host memory as there may be now, and through less."""
    folders = run.offload.nvme_path or (NEW_FOLDER,)
    moved = set_field("offload_activations", TierShare(Tier.DISK)) + set_field("nvme_path", folders)
    now = run.offload.nvme_buffer_bytes
    return [moved, *(moved + set_field("nvme_buffer_bytes", now // part) for part in (4, 16, 64))]


def smaller_buckets(run: Run, axes: Axes) -> list[MemoryChange]:
    """A quarter of the elements in a bucket, and a sixteenth: whole gradients and their copies are as large."""
    now = bucket_size(run.parallel, axes.dp * axes.cp, nccl=has_nccl(run.parallel, axes))
    return [set_field("bucket_size", now // part) for part in (4, 16) if now >= part]


def _smaller_buffers(run: Run) -> list[MemoryChange]:
    """A quarter of the memory for what is on its way, a sixteenth, and the least with which the model's state has no
    more than `MOST_PARTS` parts: each of them takes instructions, and a disk wants long requests.
    """
    assert run.model.vocab_size is not None, "a run without a vocabulary is not walked through"
    state = least_buffer(run) // ALIGNMENT * parameters(run.model)
    least, now = max(least_buffer(run), -(-state // MOST_PARTS)), run.offload.nvme_buffer_bytes
    sizes = sorted({max(least, now // 4), max(least, now // 16), least}, reverse=True)
    return [set_field("nvme_buffer_bytes", size) for size in sizes if size < now]
