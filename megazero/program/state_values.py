"""Which values of the model state an instruction reads and writes: the functions of `program.effects`' table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megazero.config.tiers import Tier
from megazero.program.instruction import UPDATE_HOST, Instruction, Piece
from megazero.program.scope import Scope
from megazero.program.values import LAST_NORM, NORM, Thing, Value, of_bucket

Which = Callable[[Instruction, Scope], Iterator[Value]]
"""From an instruction and its scope to values."""


def of_buckets(thing: Thing) -> Which:
    """One value for each bucket of an instruction."""
    return lambda i, scope: (of_bucket(thing, bucket) for bucket in i.buckets)


def after_reduce(i: Instruction, scope: Scope, *, sharded: bool) -> Iterator[Value]:
    for number in i.buckets:
        bucket = scope.shape.buckets[number]
        if (bucket.sharded_gradient and not bucket.sums_leave) == sharded:
            inside = bucket.across > 1
            yield from (of_bucket(Thing.INSIDE, number),) if inside else scope.pieces(Thing.REDUCED, number)


def pieces(thing: Thing) -> Which:
    """The values of all parts of the buckets of an instruction."""
    return lambda i, scope: (value for bucket in i.buckets for value in scope.pieces(thing, bucket))


def piece(thing: Thing) -> Which:
    """The value of the part of an instruction, in each of its buckets."""
    return lambda i, scope: (of_bucket(thing, bucket, i.part) for bucket in i.buckets)


def summed_over_tp(thing: Thing) -> Which:
    """The values of all parts of the buckets of a sum over tp: its own, or all trained ones whose sums are on the
    device.
    """

    def which(i: Instruction, scope: Scope) -> Iterator[Value]:
        for bucket in i.buckets or _summed_here(scope):
            yield from scope.pieces(thing, bucket)

    return which


def _summed_here(scope: Scope) -> Iterator[int]:
    return (number for number in scope.shape.trained if not scope.shape.buckets[number].sums_leave)


def of_norm(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The gradients on the device that a norm reads."""
    for number in _summed_here(scope):
        yield from scope.pieces(scope.final(number), number)


def counted(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The squares that a norm uses up, of gradients that are not on the device."""
    for number in scope.shape.trained:
        sums = scope.shape.buckets[number].sums
        if sums is Tier.HOST:
            yield of_bucket(Thing.SQUARES, number)
        elif sums.in_files:
            yield from scope.pieces(Thing.SQUARES, number)


def home(piece: Piece, i: Instruction, scope: Scope) -> Tier:
    """The tier where a piece of the instruction's bucket, or of its part, rests."""
    bucket = scope.shape.buckets[i.buckets[0]]
    if piece is Piece.STATE:
        return bucket.parts[i.part].tier
    return bucket.sums if piece is Piece.GRADIENTS else bucket.rests


def last_reduced(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The gradient of a part behind its last reduction, which leaves the device to be summed."""
    thing = Thing.SUMMED if scope.shape.buckets[i.buckets[0]].partial else Thing.REDUCED
    yield of_bucket(thing, i.buckets[0], i.part)


def summed(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The sums whose squares are counted: of a part, or of all parts of a bucket."""
    yield from piece(Thing.SUM)(i, scope) if i.part >= 0 else pieces(Thing.SUM)(i, scope)


def for_update(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The gradients that an update on the device uses up."""
    for number in i.buckets:
        leaves = scope.shape.buckets[number].sums_leave
        yield of_bucket(Thing.FETCHED if leaves else _final(number, scope), number, i.part)


def norm_of_update(i: Instruction, scope: Scope) -> Iterator[Value]:
    if not scope.is_early(i):
        yield LAST_NORM if scope.border.is_late else NORM


def final(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The gradient of a part, or of buckets, at the end of its way."""
    for number in i.buckets:
        yield of_bucket(_final(number, scope), number, i.part)


def _final(number: int, scope: Scope) -> Thing:
    return Thing.OWED if scope.border.is_late else scope.final(number)


def stale(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The values that an update makes stale, and that a later instruction makes anew: parameters that a copy will bring
    to the device, and whole parameters of which this rank updates its shard alone. With late updates none of
    these values exists when the update runs.
    """
    for number in () if scope.border.is_late else i.buckets:
        if i.op == UPDATE_HOST or scope.shape.buckets[number].is_loaded:
            yield from renewed(i, scope)
        if scope.shape.buckets[number].gathered_after_update and i.part <= 0:
            yield of_bucket(Thing.PARAMETERS, number)


def updated(i: Instruction, scope: Scope) -> Iterator[Value]:
    """What an update on the device makes: weights from which the parameters are stored that do not rest there. A late
    one makes all other parameters too, which something may read then.
    """
    if scope.shape.buckets[i.buckets[0]].is_loaded:
        yield from piece(Thing.NEW_WEIGHTS)(i, scope)
    elif scope.border.is_late:
        yield from renewed(i, scope)


def stored(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The parameters at rest that a use takes a copy of: a part of them, or all parts of a bucket."""
    yield from piece(Thing.SHARD)(i, scope) if i.part >= 0 else pieces(Thing.SHARD)(i, scope)


def on_device(i: Instruction, scope: Scope) -> Iterator[Value]:
    """What a gather reads that rests on the device."""
    for number in i.buckets:
        yield from () if scope.shape.buckets[number].is_loaded else scope.pieces(Thing.SHARD, number)


def loaded(i: Instruction, scope: Scope) -> Iterator[Value]:
    """What a gather uses up that has been loaded."""
    for number in i.buckets:
        bucket = scope.shape.buckets[number]
        for part in bucket.loads if bucket.is_loaded else ():
            yield of_bucket(Thing.LOADED, number, part)


def renewed(i: Instruction, scope: Scope) -> Iterator[Value]:
    """The parameters of a part that has been updated."""
    for number in i.buckets:
        yield of_bucket(Thing.SHARD, number, i.part)
        bucket = scope.shape.buckets[number]
        if not bucket.gathered and not bucket.gathered_after_update:
            yield of_bucket(Thing.PARAMETERS, number, i.part)
