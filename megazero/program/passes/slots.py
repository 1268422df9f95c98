"""Give the instructions on parts of buckets their slots of host memory, as a compiler gives values their registers.

A part on its way needs a slot from the first instruction that uses the slot to the last one. There are two rings of
slots (`zero.mover`): of parts that are updated in host memory, or whose new parameters or sums of gradients go to
disks, and of parameters that are read. Slots of a ring are taken in turn, past those that parts still have, so a part
takes the one that has been free for longest.

Slots are numbers in the list. The checker, the simulator and the model state read them there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from megazero.config.tiers import FILE_TIERS, MOST_SLOTS, SLOTS, Tier
from megazero.program.instruction import (
    BESIDE_UPDATE,
    PARAMETER_LOADS,
    STATE_READS,
    SUMMING,
    UPDATE,
    Instruction,
    Kind,
    Piece,
    TierMove,
    hops,
    reads_of,
)
from megazero.program.passes.gradients import summing_way
from megazero.program.passes.updates import way_of
from megazero.program.shape import PartKey, RankShape

SLOT_MEMORY: Mapping[Piece, frozenset[Kind]] = MappingProxyType(
    {
        Piece.GRADIENTS: frozenset(
            TierMove(piece, Tier.DEVICE, Tier.HOST) for piece in (Piece.GRADIENTS, Piece.REDUCED)
        ),
        Piece.PARAMETERS: frozenset(TierMove(Piece.UPDATED, Tier.HOST, tier) for tier in (Tier.DEVICE, *FILE_TIERS)),
        Piece.STATE: STATE_READS,
        Piece.SUMS: reads_of(Piece.SUMS),
    }
)
"""The memory of a slot by what it holds, and the copies that need it. What rests in host memory needs none."""


class Tenant(NamedTuple):
    """Who has a slot. A part may have several: one while its gradient is summed, and one with the optimizer state that
    is read meanwhile.

    loads  its parameters are read, which have slots of their own
    sums   its gradient is added to a sum
    key    the part
    """

    loads: bool
    sums: bool
    key: PartKey


def tenant_of(i: Instruction) -> Tenant:
    """Who has the slot of an instruction on a part."""
    return Tenant(i.op in PARAMETER_LOADS, i.op in SUMMING, i.key)


@dataclass(frozen=True)
class SlotBytes:
    """Bytes of a slot of each ring, by what the slot holds.

    updates  of parts that are updated in host memory, or whose new parameters or sums go to disks
    loads    of parameters that are read
    """

    updates: Mapping[Piece, int]
    loads: Mapping[Piece, int]

    @property
    def of_both(self) -> int:
        """Bytes of a slot of one ring and one of the other."""
        return sum(self.updates.values()) + sum(self.loads.values())


def slots_within(shape: RankShape, buffer_bytes: int) -> int:
    """The slots of each ring. Where some state passes through slots between disks and the device or an update, as many
    as `buffer_bytes` hold, MOST_SLOTS and the number of parts at most, but never fewer than SLOTS.
    """
    sizes = slot_bytes(shape)
    passing = sum(len(bucket.parts) for bucket in shape.buckets)
    if not sizes.updates[Piece.STATE] and not sizes.loads[Piece.PARAMETERS]:
        return SLOTS
    return max(SLOTS, min(MOST_SLOTS, passing, buffer_bytes // sizes.of_both))


def slot_bytes(shape: RankShape) -> SlotBytes:
    """The size of slots: each memory of a slot is as large as the largest part that needs the memory."""
    needs = [
        (part, ops_of_part(part.tier, bucket.rests, bucket.sums))
        for bucket in shape.buckets
        if bucket.trained
        for part in bucket.parts
    ]
    unmade = BESIDE_UPDATE if shape.shares_memory else frozenset[Kind]()
    updates = {
        piece: max((part.bytes_of(piece) for part, ops in needs if not (copies - unmade).isdisjoint(ops)), default=0)
        for piece, copies in SLOT_MEMORY.items()
    }
    updates[Piece.STATE] = max(updates[Piece.STATE], shape.resident_bytes)
    read = (part for bucket in shape.buckets if bucket.rests.in_files for part in bucket.parts)
    return SlotBytes(updates, {Piece.PARAMETERS: max((part.parameter_bytes for part in read), default=0)})


def place_slots(
    instructions: Sequence[Instruction],
    shape: RankShape,
    held: Sequence[PartKey] = (),
    left: Sequence[PartKey] = (),
) -> tuple[Instruction, ...]:
    """The list with the slot of each instruction that uses one.

    held  parts that have the first slots already: the list before has read their optimizer state
    left  parts whose optimizer state this list reads for the list behind it, which expects them in the first slots
    """
    if not any(bucket.parts for bucket in shape.buckets):
        return tuple(instructions)
    taken = {Tenant(False, False, key): slot for slot, key in enumerate(held)}
    turns = {False: len(held), True: 0}
    placed: list[Instruction] = []
    for i in instructions:
        uses = way_through(i, shape)
        if not uses:
            placed.append(i)
            continue
        tenant = tenant_of(i)
        if i.op in STATE_READS and left and i.key == left[0]:
            turns[tenant.loads] = 0  # all slots are free here (`passes.before_norm`)
        if tenant not in taken:
            busy = {slot for other, slot in taken.items() if other.loads is tenant.loads}
            taken[tenant], turns[tenant.loads] = _next_free(busy, turns[tenant.loads], shape.slots)
        is_last = i.op == uses[-1]
        placed.append(i._replace(slot=taken[tenant], frees_slot=is_last))
        if is_last:
            del taken[tenant]
    return tuple(placed)


def _next_free(busy: Collection[int], turn: int, slots: int) -> tuple[int, int]:
    """The next free slot of a ring, and the turn behind it. Where none is free, the one whose turn it is: the checker
    refuses that.
    """
    past = next((n for n in range(slots) if (turn + n) % slots not in busy), 0)
    return (turn + past) % slots, turn + past + 1


def most_taken(instructions: Sequence[Instruction], shape: RankShape) -> int:
    """The most slots for updates and sums that parts have at a time."""
    most, taken = 0, set[Tenant]()
    for i in instructions:
        uses = () if i.op in PARAMETER_LOADS else way_through(i, shape)
        if uses:
            taken.add(tenant_of(i))
            most = max(most, len(taken))
            if i.op == uses[-1]:
                taken.remove(tenant_of(i))
    return most


def way_through(i: Instruction, shape: RankShape) -> tuple[Kind, ...]:
    """What a part does with the slot that this instruction uses, the last one included; none: it uses no slot."""
    if i.part < 0:
        return ()
    bucket = shape.buckets[i.buckets[0]]
    if i.op in PARAMETER_LOADS:
        return hops(Piece.PARAMETERS, bucket.rests, Tier.DEVICE)
    uses = _way_of_part(i.op, bucket.parts[i.part].tier, bucket.rests, bucket.sums)
    return uses if i.op in uses else ()


@cache  # of every instruction of long lists the same few are asked for
def _way_of_part(op: Kind, tier: Tier, rests: Tier, sums: Tier) -> tuple[Kind, ...]:
    """What a part does with a slot of those that are updated in host memory or written, if this is one of it. tier,
    rests, sums: as in `way_of`.
    """
    if op in SUMMING:
        later = summing_way(sums, first=False, last=True)
        return later if sums is Tier.HOST else (*hops(Piece.SUMS, Tier.DEVICE, Tier.HOST), *later)
    update = way_of(tier, rests, sums)
    if tier is not Tier.DEVICE:
        return update
    before, after = update[: update.index(UPDATE)], update[update.index(UPDATE) + 1 :]
    if op in before:
        return before if sums.in_files else ()
    return after if rests.in_files else ()


def ops_of_part(tier: Tier, rests: Tier, sums: Tier) -> frozenset[Kind]:
    """All that a part ever does, but for loads. Arguments as of `way_of`."""
    ops = {*way_of(tier, rests, sums)}
    for first in (True, False):
        ops |= {*summing_way(sums, first=first, last=True)} if sums is not Tier.DEVICE else set()
    return frozenset(ops)
