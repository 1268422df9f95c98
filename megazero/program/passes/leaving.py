"""Place the copies of activations to host memory and back (--offload-activations).

What a computation keeps for its backward can leave the device. The copy to host memory stands right behind the forward,
and travels beside the next computation. `Free` stands behind that. The copy back stands one computation ahead of the
backward, so that this copy travels beside a computation too. So activations leave only if at least one more
computation comes between: else their memory would never be free.

Which ones leave follows from the list, whose order is known: those whose backward is furthest away first, as a cache
evicts what is used last (Belady 1966), until the share of the bytes is reached. A micro-batch's last units, whose
backward comes at once, stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from megazero.config.tiers import Tier
from megazero.program.instruction import LEAVE, Free, Instruction, Piece, hops
from megazero.program.passes.kept_graphs import GraphUse, kept_graphs
from megazero.program.passes.leaving_disks import able_to_write, disk_moves, largest_unit, read_buffers
from megazero.program.shape import RankShape

_FREE = Free(Piece.ACTIVATIONS, Tier.DEVICE)
(_RETURN,) = hops(Piece.ACTIVATIONS, Tier.HOST, Tier.DEVICE)
LEAST_DISTANCE = 4
"""Computations from a forward to its backward, that one counted: the copy there, one without the memory, the copy back.
"""


def leaving_graphs(graphs: Sequence[GraphUse], share: float, largest: int | None = None) -> list[GraphUse]:
    """Those that leave: the furthest next use first, and of equal ones the first, as far as the share has room.

    share: of the bytes that have time to leave, above 0 and at most 1. largest: where they go on to disks, of
    `passes.leaving_disks.largest_unit`
    """
    able = [graph for graph in graphs if graph.distance >= LEAST_DISTANCE and graph.nbytes]
    if largest is not None:
        able = able_to_write(graphs, largest)
    room = share * sum(graph.nbytes for graph in able)
    chosen: list[GraphUse] = []
    for graph in sorted(able, key=lambda graph: (-graph.distance, graph.first)):
        if graph.nbytes <= room:
            chosen.append(graph)
            room -= graph.nbytes
    return chosen


def place_leaving(
    instructions: Sequence[Instruction], shape: RankShape, share: float, disk_buffers: int | None = None
) -> tuple[Instruction, ...]:
    """The list with copies there and back, and `Free`, of the activations that leave. share: as in `leaving_graphs`.

    disk_buffers: bytes of host memory through which they go on to disks (`passes.leaving_disks`); None: they stay there

    The result depends on the arguments only, so it is the same on all ranks of a role. It stands last among the passes:
    the other ones know nothing of copies.
    """
    largest = None if disk_buffers is None else largest_unit(shape.kept)
    chosen = leaving_graphs(kept_graphs(instructions, shape), share, largest)
    leaving = sorted(chosen, key=lambda graph: graph.first)
    before: dict[int, list[Instruction]] = defaultdict(list)
    behind: dict[int, list[Instruction]] = defaultdict(list)
    for graph in leaving:
        behind[graph.first + 1].append(replace(graph.forward, op=_FREE))
        before[graph.backward - 1].append(replace(graph.forward, op=_RETURN))
    if disk_buffers is not None and largest is not None:
        for number, i in disk_moves(leaving, read_buffers(largest, disk_buffers)):
            behind[number].append(i)
    for graph in leaving:
        behind[graph.first].append(replace(graph.forward, op=LEAVE))
    placed: list[Instruction] = []
    computations = 0
    for i in instructions:
        if not i.is_compute:
            placed.append(i)
            continue
        placed += [*before[computations], i, *behind[computations]]
        computations += 1
    return tuple(placed)
