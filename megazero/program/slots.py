"""The slots of parts on their way, in a simulation: who has one, and when it is free.

There are two rings of them: of parts that are updated in host memory, or whose new parameters go to disks
(`zero.host_parts`), and of parameters that are read (`zero.resting`).
"""

from __future__ import annotations

from collections.abc import Sequence

from megazero.config.tiers import SLOTS, Tier
from megazero.program.instruction import Instruction, Op
from megazero.program.passes.gradients import SUMMING, summing_way
from megazero.program.passes.updates import way_of
from megazero.program.shape import PartKey, RankShape

_LOAD = Op.READ_PARAMETERS, Op.LOAD
Ring = bool
"""Whether slots are those of parameters that are read."""


def way_through(i: Instruction, shape: RankShape) -> tuple[Op, ...]:
    """What a part does with the slot that this instruction uses, the last one included; none: it uses no slot."""
    if i.part < 0:
        return ()
    bucket = shape.buckets[i.buckets[0]]
    way: tuple[Op, ...] = (
        _LOAD if i.op in _LOAD else part_way(i.op, bucket.parts[i.part].tier, bucket.rests, bucket.sums)
    )
    return way if i.op in way else ()


def part_way(op: Op, tier: Tier, rests: Tier, sums: Tier) -> tuple[Op, ...]:
    """What a part does with a slot of those that are updated in host memory or written, if this is one of it. tier,
    rests, sums: as in `way_of`.
    """
    if op in SUMMING or (op is Op.COPY_GRADIENT and sums is not Tier.DEVICE):
        later = summing_way(sums, first=False, last=True)
        return later if sums is Tier.HOST else (Op.STORE_GRADIENT, *later)
    way = way_of(tier, rests, sums)
    if tier is not Tier.DEVICE:
        return way
    before, after = way[: way.index(Op.UPDATE)], way[way.index(Op.UPDATE) + 1 :]
    if op in before:
        return before if sums is Tier.DISK else ()
    return after if rests is Tier.DISK else ()


def ops_of_part(tier: Tier, rests: Tier, sums: Tier) -> frozenset[Op]:
    """All that a part ever does, but for loads. Arguments as of `part_way`."""
    ops = {*way_of(tier, rests, sums)}
    for first in (True, False):
        ops |= {*summing_way(sums, first=first, last=True)} if sums is not Tier.DEVICE else set()
    return frozenset(ops)


def ring_of(i: Instruction) -> Ring:
    """The ring of the slot that an instruction uses."""
    return i.op in _LOAD


class _Turns:
    """A ring of slots. They are taken in turn, so a part waits for the one that has had its slot before."""

    def __init__(self) -> None:
        self.over = [0.0] * SLOTS
        self.begins = [0.0] * SLOTS
        self.taken: dict[PartKey, int] = {}
        self.turns = 0


class Slots:
    """The slots of a rank. taken: the parts that have one at the start, in turn."""

    def __init__(self, taken: Sequence[PartKey] = ()) -> None:
        self._rings = {ring: _Turns() for ring in (False, True)}
        self._rings[False].taken = {key: slot for slot, key in enumerate(taken)}
        self._rings[False].turns = len(taken)

    def begins(self, i: Instruction, way: tuple[Op, ...]) -> float:
        """The time before which an instruction cannot start, because its part has no slot yet.

        way: the instruction's `way_through`.
        """
        if not way:
            return 0.0
        ring, key = self._rings[ring_of(i)], (i.buckets[0], i.part)
        if key not in ring.taken:
            slot = ring.turns % SLOTS
            ring.begins[slot], ring.over[slot] = ring.over[slot], 0.0
            ring.taken[key] = slot
            ring.turns += 1
        return ring.begins[ring.taken[key]]

    def ran(self, i: Instruction, way: tuple[Op, ...], end: float) -> None:
        """An instruction of a part ends at this time. way: as in `begins`."""
        if not way:
            return
        ring, key = self._rings[ring_of(i)], (i.buckets[0], i.part)
        slot = ring.taken[key]
        ring.over[slot] = max(ring.over[slot], end)
        if i.op is way[-1]:
            del ring.taken[key]
