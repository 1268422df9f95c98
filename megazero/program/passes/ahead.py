"""Read the first optimizer state before the norm is known.

An update needs the norm, which comes behind the last backward. What the update reads from disks does not. So the slots
of host memory (`passes.slots`) are filled beside the last backward, and the first updates begin with the norm. With
late updates these reads stand in one list, and the updates in the next one or in a list of updates alone
(`program.scope.Border.ahead`).

A read takes a slot, until the part's state is written again. So the parts that are read ahead (`RankShape.read_ahead`)
are the first to be updated, and nothing that needs a slot stands between their reads and their updates.
"""

from __future__ import annotations

from collections.abc import Sequence

from megazero.program.instruction import READ_LANES, STATE_READS, Instruction, Op
from megazero.program.passes.slots import way_through
from megazero.program.passes.updates import way_of_part
from megazero.program.shape import RankShape


def updates_read_ahead(shape: RankShape) -> tuple[Instruction, ...]:
    """The updates of the parts whose state has been read: all of their way but the read."""
    ways = (way_of_part(shape, *key) for key in shape.read_ahead)
    return tuple(i for way in ways for i in way if i.op not in STATE_READS)


def place_reads_ahead(instructions: Sequence[Instruction], shape: RankShape) -> tuple[Instruction, ...]:
    """The list of a training step with these reads in front of its norm: as early as the last backward, but behind all
    that takes a slot or reads from disks for the computations.
    """
    norm = next(number for number, i in enumerate(instructions) if i.op is Op.NORM)
    before = [number for number in range(norm) if _comes_first(instructions[number], shape)]
    at = max(_last_backward(instructions), max(before, default=-1) + 1)
    reads = [way_of_part(shape, *key)[0] for key in shape.read_ahead]
    return (*instructions[:at], *reads, *instructions[at:])


def _comes_first(i: Instruction, shape: RankShape) -> bool:
    return i.lane in READ_LANES or bool(way_through(i, shape))


def _last_backward(instructions: Sequence[Instruction]) -> int:
    """The number of the first instruction of the pass that ends the computations."""
    last = next(i for i in reversed(instructions) if i.is_compute)
    return next(
        number
        for number, i in enumerate(instructions)
        if (i.op, i.micro_batch, i.chunk) == (last.op, last.micro_batch, last.chunk)
    )
