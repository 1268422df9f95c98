"""Place the reductions of gradients in a list.

A bucket is reduced when the backward of the first unit that uses it is over, since a backward takes the units in
reverse order. There is one exception: a bucket whose shards several stages share out (a tied embedding's), or whose sum
leaves the device, is reduced at the end of the step. Its part on the first stage is complete only after the step's last
backward, and the last stage would need a buffer for each micro-batch until then.

In vertical order a unit's gradient is complete when the last micro-batch of a group has passed it (`passes.vertical`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

from megazero.program.instruction import Instruction, Op
from megazero.program.passes.cut import Pass, units_of
from megazero.program.passes.vertical import Groups
from megazero.program.shape import RankShape


def reducing_passes(instructions: Sequence[Instruction], *, every: bool, groups: Groups | None = None) -> set[Pass]:
    """The passes whose backward reduces: every one (of groups: that of the last micro-batch of each), or for each chunk
    the one whose backward ends last.
    """
    last = {i.chunk: (i.micro_batch, i.chunk) for i in instructions if i.ends_backward}
    if not every:
        return set(last.values())
    found = {(i.micro_batch, i.chunk) for i in instructions if i.ends_backward}
    return found if groups is None else {(group[-1], chunk) for group in groups for chunk in last} & found


def place_reductions(
    instructions: Sequence[Instruction], shape: RankShape, *, every: bool, groups: Groups | None = None
) -> tuple[Instruction, ...]:
    """The list with a REDUCE for each bucket, as soon as its gradients are complete.

    every: reduce buckets that lend their gradient (`BucketShape`) in every backward; else, and all others, in the last
    one of each chunk. groups: of micro-batches that pass units together; every group is a backward then. All ranks of a
    group of processes have the same list, so they launch the same reductions in the same order: the last bucket of a
    chunk first.
    """
    last = reducing_passes(instructions, every=False)
    each = reducing_passes(instructions, every=True, groups=groups) if every else last
    complete = _completed_by(shape)

    @cache  # micro-batches have the same computations
    def reductions(chunk: int, units: range, is_last: bool, is_each: bool) -> list[Instruction]:
        buckets = [bucket for unit in reversed(units) for bucket in complete[chunk, unit]]
        reduced = [n for n in buckets if (is_each if shape.buckets[n].lends_gradient else is_last)]
        return [Instruction(Op.REDUCE, buckets=(number,)) for number in reduced]

    placed: list[Instruction] = []
    for i in instructions:
        placed.append(i)
        if i.ends_backward:
            passed = i.micro_batch, i.chunk
            placed += reductions(i.chunk, units_of(i, shape), passed in last, passed in each)
    late = [number for number in reversed(shape.trained) if shape.buckets[number].reduced_at_end]
    return (*placed, *(Instruction(Op.REDUCE, buckets=(number,)) for number in late))


def _completed_by(shape: RankShape) -> dict[tuple[int, int], list[int]]:
    """For each (chunk, unit) the buckets, the last one first, whose gradients are complete after its backward."""
    first: dict[int, tuple[int, int]] = {}
    for chunk, units in enumerate(shape.units):
        for number, unit in enumerate(units):
            for bucket in unit.gradients:
                if shape.buckets[bucket].chunk == chunk and not shape.buckets[bucket].reduced_at_end:
                    first.setdefault(bucket, (chunk, number))
    complete: dict[tuple[int, int], list[int]] = defaultdict(list)
    for bucket in sorted(first, reverse=True):
        complete[first[bucket]].append(bucket)
    return complete
