"""Cut computations of a chunk into computations of its units.

A chunk's computation is one autograd graph where nothing asks for more. A list that gathers, reduces or frees something
between two units needs each unit as an instruction of its own. Forward and backward of a micro-batch are cut together,
because the cut goes through the autograd graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megazero.program.instruction import Instruction, Op
from megazero.program.shape import RankShape

Pass = tuple[int, int]
"""A micro-batch and a chunk (the rank's own number): their forward and backward."""


def cut(instructions: Sequence[Instruction], shape: RankShape, passes: Collection[Pass]) -> tuple[Instruction, ...]:
    """The list with the computations of these passes by unit: a forward in order of units, a backward in reverse."""
    found: list[Instruction] = []
    for i in instructions:
        if not i.is_compute or (i.micro_batch, i.chunk) not in passes:
            found.append(i)
            continue
        units = range(len(shape.units[i.chunk]))
        order = units if i.op is Op.FORWARD else reversed(units)
        found += [i._replace(units=(unit, unit + 1)) for unit in order]
    return tuple(found)


def every_pass(instructions: Sequence[Instruction]) -> set[Pass]:
    """All passes of a list."""
    return {(i.micro_batch, i.chunk) for i in instructions if i.is_compute}


def first_passes(instructions: Sequence[Instruction]) -> set[Pass]:
    """For each chunk the pass that computes it first."""
    first: dict[int, Pass] = {}
    for i in instructions:
        if i.is_compute:
            first.setdefault(i.chunk, (i.micro_batch, i.chunk))
    return set(first.values())


def units_of(i: Instruction, shape: RankShape) -> range:
    """The numbers of the units that a computation computes."""
    return range(*(i.units or (0, len(shape.units[i.chunk]))))
