"""Place the copies of activations to host memory and back (--offload-activations).

What a computation keeps for its backward can leave the device. The copy to host memory stands right behind the forward,
and travels beside the next computation. `Free` stands behind that. The copy back stands one computation ahead of the
backward, so that this copy travels beside a computation too. So activations leave only if at least one more
computation comes between: else their memory would never be free.

With --offload-activations nvme they go on from host memory to disks. Host memory is a few buffers of one size then. Two
of them are for what leaves: while one is filled, the other is written. All others are for what comes back. So a list
says at every instruction which buffers are taken, and the program never has more of them:

- a write stands behind the `Free` of the device: by then the copy in host memory is made, and no other one is;
- the `Free` of host memory waits for the write. It stands before the copy after the next one, which takes the buffer;
- a read stands as early as there is a buffer: behind the backward that gives one back. Reads come in the order of the
  backwards, which is known, so none is made in vain.

Which activations leave follows from the list, whose order is known: those whose backward is furthest away first, as a
cache evicts what is used last (Belady 1966), until the share of the bytes is reached. A micro-batch's last units, whose
backward comes at once, stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megazero.config.tiers import Tier
from megazero.program.instruction import ACTIVATION_READS, LEAVE, Free, Instruction, Piece, TierMove, hops
from megazero.program.passes.kept_graphs import GraphUse, kept_graphs
from megazero.program.shape import RankShape

_FREE = Free(Piece.ACTIVATIONS, Tier.DEVICE)
(_RETURN,) = hops(Piece.ACTIVATIONS, Tier.HOST, Tier.DEVICE)


@dataclass(frozen=True)
class ActivationFiles:
    """The files to which activations go on: their tier, and bytes of host memory through which they pass."""

    tier: Tier
    buffers: int


LEAST_DISTANCE = 4
"""Computations from a forward to its backward, that one counted: the copy there, one without the memory, the copy back.
"""


def leaving_graphs(graphs: Sequence[GraphUse], share: float, largest: int | None = None) -> list[GraphUse]:
    """Those that leave: the furthest next use first, and of equal ones the first, as far as the share has room.

    share: of the bytes that have time to leave, above 0 and at most 1. largest: where they go on to disks, of
    `largest_unit`
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
    instructions: Sequence[Instruction], shape: RankShape, share: float, files: ActivationFiles | None = None
) -> tuple[Instruction, ...]:
    """The list with copies there and back, and `Free`, of the activations that leave. share: as in `leaving_graphs`.

    files: to which they go on from host memory; None: they stay there

    The result depends on the arguments only, so it is the same on all ranks of a role. It stands last among the passes:
    the other ones know nothing of copies.
    """
    largest = None if files is None else largest_unit(shape.kept)
    chosen = leaving_graphs(kept_graphs(instructions, shape), share, largest)
    leaving = sorted(chosen, key=lambda graph: graph.first)
    before: dict[int, list[Instruction]] = defaultdict(list)
    behind: dict[int, list[Instruction]] = defaultdict(list)
    for graph in leaving:
        behind[graph.first + 1].append(graph.forward._replace(op=_FREE))
        before[graph.backward - 1].append(graph.forward._replace(op=_RETURN))
    if files is not None and largest is not None:
        for number, i in file_moves(leaving, read_buffers(largest, files.buffers), files.tier):
            behind[number].append(i)
    for graph in leaving:
        behind[graph.first].append(graph.forward._replace(op=LEAVE))
    placed: list[Instruction] = []
    computations = 0
    for i in instructions:
        if not i.is_compute:
            placed.append(i)
            continue
        placed += [*before[computations], i, *behind[computations]]
        computations += 1
    return tuple(placed)


_FREE_HOST = Free(Piece.ACTIVATIONS, Tier.HOST)
WRITING = 2
"""Buffers of what leaves."""
LEAST_BUFFERS = WRITING + 2
"""With two for what comes back, one is read while a backward works with the other one."""
LEAST_DISTANCE_TO_DISKS = 6
"""Computations from a forward to its backward: beside the copies there and back one for the write and one for the read.
"""
PAGE = 4096
SPARE = 8192
"""Bytes of a buffer for the alignment of the pieces in it."""


def largest_unit(kept: Iterable[Sequence[int]]) -> int:
    """The most bytes that a unit keeps which goes to disks. kept: by each unit of each chunk.

    A chunk's last unit does not count, since its backward comes soon: a head may keep more than all others. So the
    buffers of a rank are those of every list that it executes, whatever the number of micro-batches.
    """
    return max((size for chunk in kept for size in (chunk[:-1] or chunk)), default=0)


def buffer_bytes(largest: int) -> int:
    """The bytes of a buffer. largest: of `largest_unit`."""
    return -(-(largest + SPARE) // PAGE) * PAGE


def able_to_write(graphs: Sequence[GraphUse], largest: int) -> list[GraphUse]:
    """Those that go to disks, if they leave: they have time, and at least half of the largest one's bytes. Smaller ones
    stay on the device, since each would take a whole buffer.
    """
    return [
        graph
        for graph in graphs
        if graph.distance >= LEAST_DISTANCE_TO_DISKS and largest <= 2 * graph.nbytes and 0 < graph.nbytes <= largest
    ]


def read_buffers(largest: int, room: int) -> int:
    """The buffers for what comes back, of so many bytes of all buffers."""
    return room // buffer_bytes(largest) - WRITING


def file_moves(graphs: Sequence[GraphUse], reads: int, tier: Tier) -> Iterator[tuple[int, Instruction]]:
    """(number of the computation behind which it stands, instruction), in order at each of them.

    graphs: those that leave, in order of their forwards. reads: buffers for what comes back, at least 2. tier: of the
    files.
    """
    assert reads >= LEAST_BUFFERS - WRITING or not graphs, "validated: the buffers hold four times what a unit keeps"
    back = sorted(graphs, key=lambda graph: graph.backward)
    read_behind: dict[GraphUse, int] = {}
    latest = 0
    for number, graph in enumerate(back):
        given_back = back[number - reads].backward if number >= reads else 0
        read_behind[graph] = latest = max(graph.first + 2, given_back, latest)
    for graph in graphs:
        yield graph.first + 1, graph.forward._replace(op=TierMove(Piece.ACTIVATIONS, Tier.HOST, tier))
    for number, graph in enumerate(graphs):
        taken = [graphs[number + WRITING].first] if number + WRITING < len(graphs) else []
        yield min([read_behind[graph], *taken]), graph.forward._replace(op=_FREE_HOST)
    for graph in back:
        yield read_behind[graph], graph.forward._replace(op=TierMove(Piece.ACTIVATIONS, tier, Tier.HOST))


def most_pieces(instructions: Iterable[Instruction]) -> int:
    """The most graphs that have a piece of the swap files at a time: from the copy to host memory to the read."""
    now = most = 0
    for i in instructions:
        now += (i.op == LEAVE) - (i.op in ACTIVATION_READS)
        most = max(most, now)
    return most
