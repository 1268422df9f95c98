"""Place the gathers and releases of sharded parameters (ZeRO-3) in a list, under a budget of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megazero.program.instruction import Instruction, Op
from megazero.program.passes.cut import units_of
from megazero.program.shape import RankShape


class BudgetError(ValueError):
    """The budget does not hold the parameters of one computation."""


def uses(i: Instruction, shape: RankShape) -> tuple[int, ...]:
    """The buckets with sharded parameters that a computation reads, in ascending order."""
    if not i.is_compute or i.op is Op.BACKWARD_WEIGHT:
        return ()
    units = [shape.units[i.chunk][number] for number in units_of(i, shape)]
    read = {bucket for unit in units for bucket in (unit.forward if i.op is Op.FORWARD else unit.backward)}
    return tuple(sorted(bucket for bucket in read if shape.buckets[bucket].gathered))


def two_units(instructions: Sequence[Instruction], shape: RankShape) -> int:
    """Bytes of the parameters of the two largest computations that follow each other."""
    used = [set(uses(i, shape)) for i in instructions if uses(i, shape)]
    pairs = pairwise(used)
    return max((shape.bytes_of(one | other) for one, other in pairs), default=one_unit(instructions, shape))


def one_unit(instructions: Sequence[Instruction], shape: RankShape) -> int:
    """Bytes of the parameters of the largest computation: the smallest budget."""
    return max((shape.bytes_of(uses(i, shape)) for i in instructions), default=0)


def place_gathers(instructions: Sequence[Instruction], shape: RankShape, budget: int) -> tuple[Instruction, ...]:
    """The list with a GATHER before and a RELEASE after each use of sharded parameters.

    budget: most bytes of whole parameters at any time. A gather is placed one computation ahead of its use where the
    budget allows, so that it travels meanwhile. Parameters that the next computation reads as well are kept.
    Raises BudgetError where the budget does not hold the parameters of one computation.
    """
    at = [position for position, i in enumerate(instructions) if uses(i, shape)]
    used = {position: uses(instructions[position], shape) for position in at}
    following = dict(pairwise(at))
    placed: list[Instruction] = []
    held: set[int] = set()

    def gather(buckets: Sequence[int]) -> None:
        for bucket in buckets:
            if bucket not in held:
                held.add(bucket)
                placed.append(Instruction(Op.GATHER, buckets=(bucket,)))

    for position, i in enumerate(instructions):
        if position not in used:
            placed.append(i)
            continue
        if shape.bytes_of(used[position]) > budget:
            raise BudgetError(f"{i} reads {shape.bytes_of(used[position])} bytes of parameters, the budget is {budget}")
        gather(used[position])
        ahead = used[following[position]] if position in following else ()
        if shape.bytes_of({*held, *ahead}) <= budget:
            gather(ahead)
        placed.append(i)
        for bucket in sorted(held - set(ahead)):
            held.remove(bucket)
            placed.append(Instruction(Op.RELEASE, buckets=(bucket,)))
    return tuple(placed)
