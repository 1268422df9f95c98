"""Place the loads of parameters that do not rest on the device, in front of their gathers.

A bucket that rests in host memory is loaded by one copy. One that rests on disks comes in parts: each is read into host
memory and copied from there. Reads and copies have lanes of their own, and few parts are in host memory at a time, so
each read stands right before its copy.

What no other rank has a share of is loaded to where it is used, and its GATHER only waits for that: the two stand
together. A shard is loaded into memory of its own, from where it is sent to the others. It is loaded one gather ahead,
so that no gather has to wait for a copy that has just begun.
"""

from __future__ import annotations

from collections.abc import Sequence

from megazero.config.tiers import Tier
from megazero.program.instruction import LOAD, READ_PARAMETERS, Instruction, Op, Piece, hops
from megazero.program.shape import RankShape

BRINGS = frozenset({Op.GATHER, LOAD, READ_PARAMETERS})
"""The instructions that bring a bucket's parameters."""


def place_loads(instructions: Sequence[Instruction], shape: RankShape) -> tuple[Instruction, ...]:
    """The list with what loads a bucket before each GATHER of one that does not rest on the device. It has the gathers
    already (`passes.gathers`), and no updates.
    """
    gathers = [at for at, i in enumerate(instructions) if i.op is Op.GATHER and shape.buckets[i.buckets[0]].is_loaded]
    if not gathers:
        return tuple(instructions)
    before: dict[int, list[Instruction]] = {at: [] for at in gathers}
    for earlier, at in zip([gathers[0], *gathers], gathers, strict=False):
        number = instructions[at].buckets[0]
        ahead = shape.buckets[number].is_sharded and instructions[earlier].buckets[0] != number
        before[earlier if ahead else at] += loads_of(number, shape)
    return tuple(placed for at, i in enumerate(instructions) for placed in (*before.get(at, ()), i))


def loads_of(number: int, shape: RankShape) -> list[Instruction]:
    """What loads a bucket that does not rest on the device."""
    bucket = shape.buckets[number]
    moves = hops(Piece.PARAMETERS, bucket.rests, Tier.DEVICE)
    return [Instruction(move, buckets=(number,), part=part) for part in bucket.loads for move in moves]
