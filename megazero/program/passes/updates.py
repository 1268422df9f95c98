"""Place the end of a step: reductions across, sums over tp, the norm, the updates and the gathers that follow them."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.program.instruction import Instruction, Op
from megazero.program.shape import RankShape


def place_across(instructions: Sequence[Instruction], shape: RankShape) -> tuple[Instruction, ...]:
    """The list with a REDUCE_ACROSS for each bucket of which several ranks hold the same shard.

    It follows the bucket's last REDUCE, one REDUCE later: until then the first one has had time to end. Buckets that
    several stages hold come last, because these stages end their backwards at different times.
    """
    last = {i.buckets[0]: at for at, i in enumerate(instructions) if i.op is Op.REDUCE}
    placed: list[Instruction] = []
    waiting: list[Instruction] = []
    late: list[Instruction] = []
    for at, i in enumerate(instructions):
        placed.append(i)
        if i.op is not Op.REDUCE:
            continue
        placed += waiting
        bucket = shape.buckets[i.buckets[0]]
        ends = last[i.buckets[0]] == at and bucket.across > 1
        across = [Instruction(Op.REDUCE_ACROSS, buckets=i.buckets)] if ends else []
        waiting, late = ([], late + across) if bucket.spans_stages else (across, late)
    return (*placed, *waiting, *late)


def place_updates(instructions: Sequence[Instruction], shape: RankShape) -> tuple[Instruction, ...]:
    """The list with what follows the last backward.

    A bucket that is gathered after its update is updated alone, so that its message travels while the next one is
    updated. All others are updated by one instruction.
    """
    alone = [number for number in shape.trained if shape.buckets[number].gathered_after_update]
    together = tuple(number for number in shape.trained if number not in alone)
    end = [Instruction(Op.REDUCE_PARTIAL)] if shape.sums_partials else []
    end.append(Instruction(Op.NORM))
    for number in alone:
        end += [Instruction(op, buckets=(number,)) for op in (Op.UPDATE, Op.GATHER)]
    if together:
        end.append(Instruction(Op.UPDATE, buckets=together))
    return (*instructions, *end)
