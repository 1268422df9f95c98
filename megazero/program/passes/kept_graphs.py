"""What the forwards of a list keep for their backward, and when that comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megazero.program.instruction import Instruction, Op, Units
from megazero.program.shape import RankShape


@dataclass(frozen=True)
class GraphUse:
    """What one forward keeps for its backward.

    forward   its instruction
    first     the number of the forward among the list's computations
    backward  the number of the backward, which needs it whole: of a split one, that of the input
    nbytes    its bytes
    """

    forward: Instruction
    first: int
    backward: int
    nbytes: int

    @property
    def distance(self) -> int:
        """Computations until its next use, that one counted."""
        return self.backward - self.first


def kept_graphs(instructions: Sequence[Instruction], shape: RankShape) -> list[GraphUse]:
    """What the forwards of a list keep, in order."""
    begun: dict[tuple[int, int, Units | None], tuple[int, Instruction]] = {}
    found: list[GraphUse] = []
    for number, i in enumerate(i for i in instructions if i.is_compute):
        key = i.micro_batch, i.chunk, i.units
        if i.op is Op.FORWARD:
            begun[key] = number, i
        elif i.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            first, forward = begun.pop(key)
            found.append(GraphUse(forward, first, number, shape.kept_by(i.chunk, i.units)))
    return sorted(found, key=lambda graph: graph.first)
