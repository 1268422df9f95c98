"""Place what brings gradients to host memory or to disks, where they are summed (--offload-gradients).

Behind its reduction each rank has the gradient of what it updates. What is left to sum, over the ranks that hold the
same shard and over tp, is summed at once, while it is on the device. Then it leaves, part by part. The first reduction
of a step stores it, each later one adds to what is there. The last one counts the squares for the norm too. On disks a
sum that is added to is read before, and written again.

All this stands behind the next computation or the next reduction, so that the message travels meanwhile. The buffer of
the whole gradient is free when the last part has left.
"""

from __future__ import annotations

from collections.abc import Sequence

from megazero.config.tiers import Tier
from megazero.program.instruction import Instruction, Kind, Op, Piece, hops
from megazero.program.shape import RankShape


def place_sums(instructions: Sequence[Instruction], shape: RankShape, *, overlap: bool) -> tuple[Instruction, ...]:
    """The list with what sums the gradients of buckets that leave the device, behind each of their reductions.

    overlap: one computation or reduction later; else at once.
    """
    if not any(bucket.sums_leave for bucket in shape.buckets):
        return tuple(instructions)
    numbers = [i.buckets[0] if i.op is Op.REDUCE else -1 for i in instructions]
    first = {number: at for at, number in reversed([*enumerate(numbers)])}
    last = {number: at for at, number in enumerate(numbers)}
    placed: list[Instruction] = []
    waiting: list[Instruction] = []
    for at, (i, number) in enumerate(zip(instructions, numbers, strict=True)):
        if number >= 0 and i.buckets == (waiting[0].buckets if waiting else None):
            placed, waiting = [*placed, *waiting], []  # nothing lies between two reductions of one bucket
        placed.append(i)
        if i.is_compute or number >= 0:
            placed += waiting
            waiting = []
        if number >= 0:
            waiting = _chain(number, shape, first=at == first[number], last=at == last[number])
        if not overlap:
            placed += waiting
            waiting = []
    return (*placed, *waiting)


def _chain(number: int, shape: RankShape, *, first: bool, last: bool) -> list[Instruction]:
    """What follows one reduction of a bucket. first, last: of the step."""
    bucket = shape.buckets[number]
    if not bucket.sums_leave:
        return []
    found = [Instruction(Op.REDUCE_ACROSS, buckets=(number,))] * (bucket.across > 1)
    found += [Instruction(Op.REDUCE_PARTIAL, buckets=(number,))] * bucket.partial
    ops = summing_way(bucket.sums, first=first, last=last)
    found += [Instruction(op, buckets=(number,), part=part) for part in bucket.numbers_of_parts for op in ops]
    if last and bucket.sums is Tier.HOST:  # all of it at once, as on the device: so the norm has the same bits
        found.append(Instruction(Op.COUNT_GRADIENT, buckets=(number,)))
    return found


def summing_way(sums: Tier, *, first: bool, last: bool) -> tuple[Kind, ...]:
    """What a part of a reduced gradient does, whose sum rests in this tier. first, last: reduction of the step."""
    if first:
        summed: tuple[Kind, ...] = hops(Piece.SUMS, Tier.DEVICE, Tier.HOST)
    else:
        summed = (
            *hops(Piece.SUMS, sums, Tier.HOST),
            *hops(Piece.REDUCED, Tier.DEVICE, Tier.HOST),
            Op.ADD_GRADIENT,
        )
    counted = (Op.COUNT_GRADIENT,) * (last and sums.in_files)  # in host memory a whole bucket is counted at once
    return (*summed, *counted, *hops(Piece.SUMS, Tier.HOST, sums))
