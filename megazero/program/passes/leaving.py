"""Place the copies of activations to host memory and back (--offload-activations).

What a computation keeps for its backward can leave the device: LEAVE stands right behind the forward, and the copy
travels beside the next computation. FREE stands behind that. RETURN stands one computation ahead of the backward, so
that this copy travels beside a computation too. So activations leave only if at least one more computation comes
between: else their memory would never be free.

Which ones leave follows from the list, whose order is known: those whose backward is furthest away first, as a cache
evicts what is used last (Belady 1966), until the share of the bytes is reached. A micro-batch's last units, whose
backward comes at once, stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megazero.program.instruction import Instruction, Op, Units
from megazero.program.shape import RankShape

LEAST_DISTANCE = 4
"""Computations from a forward to its backward, that one counted: the copy there, one without the memory, the copy back.
"""


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


def leaving_graphs(graphs: Sequence[GraphUse], share: float) -> list[GraphUse]:
    """Those that leave: the furthest next use first, and of equal ones the first, as far as the share has room.

    share: of the bytes that have time to leave, above 0 and at most 1.
    """
    able = [graph for graph in graphs if graph.distance >= LEAST_DISTANCE and graph.nbytes]
    room = share * sum(graph.nbytes for graph in able)
    chosen: list[GraphUse] = []
    for graph in sorted(able, key=lambda graph: (-graph.distance, graph.first)):
        if graph.nbytes <= room:
            chosen.append(graph)
            room -= graph.nbytes
    return chosen


def place_leaving(instructions: Sequence[Instruction], shape: RankShape, share: float) -> tuple[Instruction, ...]:
    """The list with LEAVE, FREE and RETURN for the activations that leave. share: as in `leaving_graphs`.

    The result depends on the arguments only, so it is the same on all ranks of a role. It stands last among the passes:
    the other ones know nothing of copies.
    """
    before: dict[int, list[Instruction]] = defaultdict(list)
    behind: dict[int, list[Instruction]] = defaultdict(list)
    for graph in sorted(leaving_graphs(kept_graphs(instructions, shape), share), key=lambda graph: graph.first):
        leave, free, comes_back = (replace(graph.forward, op=op) for op in (Op.LEAVE, Op.FREE, Op.RETURN))
        behind[graph.first].append(leave)
        behind[graph.first + 1].insert(0, free)
        before[graph.backward - 1].append(comes_back)
    placed: list[Instruction] = []
    computations = 0
    for i in instructions:
        if not i.is_compute:
            placed.append(i)
            continue
        placed += [*before[computations], i, *behind[computations]]
        computations += 1
    return tuple(placed)
