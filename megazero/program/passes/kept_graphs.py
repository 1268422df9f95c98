"""What the forwards of a list keep for their backward, when that comes, and how many passes are alive at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megazero.program.instruction import Instruction, Kind, Op, Units
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


def peak_activations(
    instructions: Sequence[Instruction], weights: Sequence[float] | None = None, kept: Sequence[float] | None = None
) -> float:
    """Largest sum of weights over the live (micro-batch, chunk) pairs of one rank, as `SimulationReport` counts them.

    weights  for each of the rank's chunks, such as bytes (default: 1)
    kept     for each chunk, the part of its weight that lives between the parts of a split backward (default: all)
    """
    trains = any(i.ends_backward for i in instructions)
    live = peak = 0.0
    for i in instructions:
        if not i.is_compute or (i.units is not None and i.units[0] > 0):
            continue
        whole = 1.0 if weights is None else weights[i.chunk]
        later = whole if kept is None else kept[i.chunk]
        changes: dict[Kind, float] = {
            Op.FORWARD: whole,
            Op.BACKWARD: -whole,
            Op.BACKWARD_INPUT: later - whole,
            Op.BACKWARD_WEIGHT: -later,
        }
        live += changes[i.op]
        peak = max(peak, live)
        live = live if trains else 0.0
    return peak
