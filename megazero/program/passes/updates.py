"""Place the end of a step: reductions across, sums over tp, the norm, the updates and the gathers that follow them.

A part of a bucket whose optimizer state is not on the device is updated in host memory. Its gradient is copied there,
its state is read where it rests on disks, and what comes out is copied and written back. Each of these runs on a lane
of its own and waits for what it needs, so they stand one behind the other: the lanes work on several parts at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

from megazero.config.tiers import Tier
from megazero.program.instruction import UPDATE, Instruction, Kind, Op, Piece, Update, hops
from megazero.program.shape import PartKey, RankShape


@cache  # of the same few tiers for every part of a list
def way_of(tier: Tier, rests: Tier, sums: Tier = Tier.DEVICE) -> tuple[Kind, ...]:
    """What updates a part of a bucket whose optimizer state rests in `tier`, its parameters in `rests`, and its
    gradient in `sums`. State that is not on the device is updated in host memory, and all else comes to the state.
    """
    updated_in = Tier.DEVICE if tier is Tier.DEVICE else Tier.HOST
    return (
        *hops(Piece.STATE, tier, updated_in),
        *hops(Piece.GRADIENTS, sums, updated_in),
        Update(updated_in),
        *hops(Piece.UPDATED, updated_in, rests),
        *hops(Piece.STATE, updated_in, tier),  # last: only the parameters are waited for
    )


def place_across(instructions: Sequence[Instruction], shape: RankShape) -> tuple[Instruction, ...]:
    """The list with a REDUCE_ACROSS for each bucket of which several ranks hold the same shard.

    A bucket's REDUCE_ACROSS waits for the bucket's last REDUCE, and on a GPU all that is computed later waits with it.
    So it follows the next backward, during which the REDUCE has had time to end. Buckets that several stages hold come
    last, because these stages end their backwards at different times.
    """
    if all(bucket.across == 1 for bucket in shape.buckets):
        return tuple(instructions)
    last = {i.buckets[0]: at for at, i in enumerate(instructions) if i.op is Op.REDUCE}
    placed: list[Instruction] = []
    waiting: list[Instruction] = []
    late: list[Instruction] = []
    for at, i in enumerate(instructions):
        placed.append(i)
        if i.ends_backward:
            placed += waiting
            waiting = []
        if i.op is not Op.REDUCE:
            continue
        bucket = shape.buckets[i.buckets[0]]
        ends = last[i.buckets[0]] == at and bucket.across > 1 and not bucket.sums_leave
        across = [Instruction(Op.REDUCE_ACROSS, buckets=i.buckets)] if ends else []
        (late if bucket.spans_stages else waiting).extend(across)
    return (*placed, *waiting, *late)


def place_norm(instructions: Sequence[Instruction], shape: RankShape) -> tuple[Instruction, ...]:
    """The list with what follows the last backward, up to the norm."""
    partial = [Instruction(Op.REDUCE_PARTIAL)] if shape.sums_partials else []
    return (*instructions, *partial, Instruction(Op.NORM))


def updates_of(buckets: Sequence[int], shape: RankShape, without: Collection[PartKey] = ()) -> tuple[Instruction, ...]:
    """The updates of these buckets: first those in host memory, whose lanes are then at work beside the others.
    without: as of `host_updates`.
    """
    return (*host_updates(buckets, shape, without), *device_updates(buckets, shape))


def host_updates(
    buckets: Sequence[int], shape: RankShape, without: Collection[PartKey] = ()
) -> tuple[Instruction, ...]:
    """The updates of their parts whose optimizer state is not on the device, with what brings these to host memory and
    back. without: parts that are updated elsewhere.
    """
    return tuple(
        i
        for number in buckets
        for part, of_part in enumerate(shape.buckets[number].parts)
        if of_part.tier is not Tier.DEVICE and (number, part) not in without
        for i in way_of_part(shape, number, part)
    )


def way_of_part(shape: RankShape, number: int, part: int) -> list[Instruction]:
    """What updates a part of a bucket, or the whole of one without parts (-1), which is updated on the device."""
    bucket = shape.buckets[number]
    tier = bucket.parts[part].tier if part >= 0 else Tier.DEVICE
    return [Instruction(op, buckets=(number,), part=part) for op in way_of(tier, bucket.rests, bucket.sums)]


def device_updates(buckets: Sequence[int], shape: RankShape) -> tuple[Instruction, ...]:
    """The updates on the device, and the gathers that follow all updates of a bucket.

    A bucket that is gathered after its update is updated alone, so that its message travels while the next one is
    updated. All others are updated by one instruction, but for parts and for those whose parameters do not rest there:
    each of these is stored afterwards. The gather of a bucket with parts waits for host memory, so it stands behind the
    other updates. A gradient that is not on the device is brought one update ahead.
    """
    found: list[Instruction] = []
    ahead: list[Instruction] = []
    late: list[Instruction] = []
    together: list[int] = []
    for number in buckets:
        bucket = shape.buckets[number]
        gather = [Instruction(Op.GATHER, buckets=(number,))] if bucket.gathered_after_update else []
        if bucket.parts:
            parts = [part for part, of_part in enumerate(bucket.parts) if of_part.tier is Tier.DEVICE]
            for part in parts:
                update = way_of_part(shape, number, part)
                begins = [i.op for i in update].index(UPDATE)
                found += [*update[:begins], *ahead]
                found, ahead = (found, update[begins:]) if begins else ([*found, *update], [])
            late += gather
        elif bucket.is_loaded:
            found += way_of_part(shape, number, -1)
        elif gather:
            found += [Instruction(UPDATE, buckets=(number,)), *gather]
        else:
            together.append(number)
    if together:
        found.append(Instruction(UPDATE, buckets=tuple(together)))
    return (*found, *ahead, *late)
