"""Bytes of the messages on model state, by the convention of the ZeRO papers, and of copies to and from the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megazero.program.instruction import BESIDE_UPDATE, LOCAL_LANES, Instruction, Lane, Op, Piece, TierMove
from megazero.program.shape import RankShape


def message_bytes(i: Instruction, shape: RankShape) -> int:
    """Bytes of a gather or reduction: an all-gather's output, a reduce-scatter's input, twice an all-reduce's tensor.

    A ring of N ranks sends (N - 1) / N of it. 0 for messages that carry no bucket, and in a group of one rank.
    """
    total = 0
    for bucket in map(shape.buckets.__getitem__, i.buckets):
        sent = bucket.messages
        if i.op is Op.REDUCE_ACROSS and bucket.across > 1:
            total += sent.across_scatter + sent.across_gather
        elif i.op is Op.GATHER and bucket.shards > 1 and not bucket.rests_whole:
            total += sent.parameters
        elif i.op is Op.REDUCE and bucket.shards > 1:  # a reduce-scatter, where a rank goes on with its shard
            total += sent.scatter + sent.gather * (not bucket.sharded_state and bucket.across == 1)
    return total


def moved_bytes(i: Instruction, shape: RankShape) -> int:
    """Bytes that an instruction on a lane of the rank's own moves; of an update in host memory its gradient's."""
    move = i.op if isinstance(i.op, TierMove) else None
    if move is not None and move.piece is Piece.ACTIVATIONS:
        return shape.kept_by(i.chunk, i.units)
    bucket = shape.buckets[i.buckets[0]]
    if i.op is Op.COUNT_GRADIENT:
        return 0  # no update, and far from as slow as one
    if i.op in BESIDE_UPDATE and shape.shares_memory:
        return 0  # nothing is copied
    if i.part < 0:
        return bucket.stored_bytes
    part = bucket.parts[i.part]
    return part.gradient_bytes if move is None else part.bytes_of(move.piece)


def updated_bytes(shape: RankShape, number: int, part: int) -> float:
    """Bytes of the gradients that an update of a bucket (-1), or of a part of it, uses."""
    bucket = shape.buckets[number]
    if part >= 0:
        return bucket.parts[part].gradient_bytes
    return bucket.gradient_bytes / (bucket.shards if bucket.sharded_state else 1)


def traffic(instructions: Iterable[Instruction], shape: RankShape) -> dict[Lane, int]:
    """Bytes of a rank's messages on model state, and of its moves on lanes of its own, in one step, by lane.

    Under ZeRO-0 the ranks that share the shards gather a gradient that was summed across, because each updates all.
    """
    sent: Counter[Lane] = Counter()
    for i in instructions:
        if i.lane in LOCAL_LANES:
            sent[i.lane] += moved_bytes(i, shape)
        elif i.buckets:
            sent[i.lane] += message_bytes(i, shape)
        if i.op is Op.REDUCE_ACROSS:
            buckets = [shape.buckets[number] for number in i.buckets]
            whole = (b.messages.gather for b in buckets if not b.sharded_state and b.shards > 1)
            sent[Lane.SHARDS] += sum(whole)
    return {lane: count for lane, count in sent.items() if count}
