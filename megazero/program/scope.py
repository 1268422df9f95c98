"""What the effects of a rank's instructions depend on, and the values at the two ends of its list: its border.

On time, a list makes the updates of its own gradients at its end, and nothing crosses the border between two steps but
parameters. With late updates it leaves its gradients and its norm. The next list makes these updates where it comes to
the parameters. Or a list of updates alone makes them, because something else is about to read the parameters.

With early updates a list updates some parts before its norm, as if the norm clipped nothing. It leaves their gradients:
where the norm says otherwise, a list of updates alone makes these updates again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from megazero.config.tiers import Tier
from megazero.program.instruction import Instruction, Kind, Units
from megazero.program.shape import PartKey, RankShape
from megazero.program.values import LAST_NORM, NORM, Effects, Thing, Value, of_bucket


@dataclass(frozen=True)
class Border:
    """The two ends of a list.

    owed    the step before has left its gradients and its norm. This list makes their updates
    leaves  this list makes no updates of its own gradients: it leaves them, with its norm
    ahead   it has then read the first optimizer state for them already, and so had the step before
            (`program.passes.before_norm`)
    early   of a training step: it updates the early parts before its norm, and keeps their gradients to its end. Of a
            list of updates alone: it makes the updates of the early parts again, and no others
            (`program.passes.before_norm`)
    """

    owed: bool = False
    leaves: bool = False
    ahead: bool = False
    early: bool = False

    @property
    def is_late(self) -> bool:
        """Whether the updates in the list are those of the step before. A list that neither takes over nor leaves
        anything makes its own.
        """
        return self.owed or self.leaves


ON_TIME = Border()
FIRST = Border(leaves=True)
"""A step before which nothing is owed: a run's first one, and one behind a list of updates."""
LATE = Border(owed=True, leaves=True)
SETTLING = Border(owed=True)
"""A list of updates alone."""
EARLY, AGAIN = Border(early=True), Border(owed=True, early=True)
"""A step that updates some parts before its norm, and the list of the updates that have to be made again."""


@dataclass(frozen=True)
class Scope:
    """What the effects of a rank's instructions depend on besides the instruction.

    shape         the rank's units and buckets
    model_chunks  number of chunks of the whole model
    trains        whether forwards are for a backward
    border        what the list takes over from the step before, and leaves to the next
    """

    shape: RankShape
    model_chunks: int
    trains: bool = True
    border: Border = ON_TIME

    def units_of(self, i: Instruction) -> tuple[int, int]:
        """The units [first, stop) that a computation computes."""
        return i.units or (0, len(self.shape.units[i.chunk]))

    def final(self, number: int) -> Thing:
        """What the gradient of a bucket is when an update can use it."""
        sums = self.shape.buckets[number].sums
        if sums is Tier.DEVICE:
            return Thing.SUMMED if self.shape.sums_partials else Thing.REDUCED
        return Thing.SUM if sums is Tier.HOST else Thing.DISK_SUM

    def settled(self) -> Iterator[Value]:
        """The parameters when no update is owed: what a rank stores of each bucket, and those that it keeps whole."""
        for number, bucket in enumerate(self.shape.buckets):
            yield from self.pieces(Thing.SHARD, number)
            if not bucket.gathered:
                yield from self.whole(number)

    def pieces(self, thing: Thing, number: int) -> Iterator[Value]:
        """The values of a bucket's parts; of the whole bucket where it has none."""
        for part in self.shape.buckets[number].numbers_of_parts:
            yield of_bucket(thing, number, part)

    def whole(self, number: int) -> Iterator[Value]:
        """The values of a bucket's whole parameters. Where a rank updates them itself, part by part, these are the
        parts.
        """
        bucket = self.shape.buckets[number]
        in_parts = not bucket.gathered and not bucket.gathered_after_update
        yield from self.pieces(Thing.PARAMETERS, number) if in_parts else (of_bucket(Thing.PARAMETERS, number),)

    def at_start(self) -> tuple[Value, ...]:
        """The values that are there before the list. Where an update is owed, there is a gradient instead of
        parameters.
        """
        if not self.border.owed:
            return tuple(self.settled())
        owed = [value for number in self.shape.trained for value in self.pieces(Thing.OWED, number)]
        if self.border.early:
            owed = [value for value in owed if value[1:3] in self.early_parts]
        missing = {value[1:3] for value in owed} | {(value[1], -1) for value in owed}
        fresh = [value for value in self.settled() if value[1:3] not in missing]
        return (*fresh, *owed, *self._read_ahead(), LAST_NORM)

    @cached_property
    def computed(self) -> dict[tuple[Kind, int, int, Units | None], Effects]:
        """By kind, both numbers of the chunk and units of computations and transfers their effects with one of the
        micro-batches, as far as somebody asked (`program.effects`).
        """
        return {}

    @cached_property
    def moved(self) -> dict[tuple[Kind, tuple[int, ...], int], Effects]:
        """By kind, buckets and part of what moves model state its effects, as far as somebody asked."""
        return {}

    @cached_property
    def early_parts(self) -> frozenset[PartKey]:
        """The parts that the border's early updates are of."""
        return frozenset(self.shape.early if self.border.early else ())

    def is_early(self, i: Instruction) -> bool:
        """Whether an instruction on a part belongs to an update before the norm."""
        return self.border.early and not self.border.owed and i.part >= 0 and i.key in self.early_parts

    @property
    def held_at_start(self) -> tuple[PartKey, ...]:
        """The parts that hold slots before the list, in turn: the step before has begun to read their state."""
        return self.shape.read_ahead if self.border.owed and self.border.ahead else ()

    def at_end(self) -> tuple[Value, ...]:
        """The values that are there after the list, and no others (norms apart)."""
        left = [value for number in self.shape.trained for value in self.pieces(self.final(number), number)]
        if self.border.early and not self.border.owed:
            return (*self.settled(), *(value for value in left if value[1:3] in self.early_parts))
        if not self.border.leaves:
            return tuple(self.settled())
        return (*self.settled(), *left, *self._read_ahead(), NORM)

    def _read_ahead(self) -> Iterator[Value]:
        """The optimizer state that has been read for updates which are owed."""
        return (of_bucket(Thing.STATE, *key) for key in (self.shape.read_ahead if self.border.ahead else ()))


# A search walks through the lists of equal ranks many times, and asks for the same effects each time.
@lru_cache(maxsize=512)
def shared_scope(shape: RankShape, model_chunks: int, *, trains: bool, border: Border) -> Scope:
    """A scope for all lists of ranks with this shape, with the effects that somebody has asked for."""
    return Scope(shape, model_chunks, trains, border)
