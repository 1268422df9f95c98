"""Place before the norm what need not wait for it: the first reads of optimizer state, or whole updates.

An update needs the norm of all gradients, which comes behind the last backward. What it reads from disks does not. So
the slots of host memory (`passes.slots`) are filled beside the last backward, and the first updates begin with the
norm: reads ahead. With late updates these reads stand in one list, and the updates in the next one or in a list of
updates alone (`program.scope.Border.ahead`). A read takes a slot, until the part's state is written again. So the parts
that are read ahead (`RankShape.read_ahead`) are the first to be updated, and nothing that needs a slot stands between
their reads and their updates.

The norm has two answers for an update: is the step skipped, and how far is the gradient clipped? Mostly the answers are
no and not at all. With early updates (--early-update) a part is updated as if they were, as soon as its own gradient is
complete, and the lanes of host memory and of disks work beside the rest of the backward. The norm then says whether
that was right. If it was not, every early part goes back to the state before (`disk.swap.SwapSpace.go_back`), and a
list of updates alone makes the updates again from the same gradients. The outcome is the same either way, to the bit.
(Speculation-then-validation of SuperOffload, arXiv:2509.21271, but without a second copy in memory.)

So an early part is one whose tier can go back, and whose gradient is complete before the end of the backward
(`RankShape.early`). The parts are updated in the order in which their gradients are complete. Their states are read
from the step's last forward on, as far as there are slots for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megazero.program.instruction import READ_LANES, STATE_READS, SUMMING, Instruction, Op
from megazero.program.passes.slots import most_taken, way_through
from megazero.program.passes.updates import device_updates, way_of_part
from megazero.program.shape import RankShape

SPARE_SLOTS = 1
"""Slots that a read finds free which no write has just been given: else the lane of reads would wait for that write."""
_COMPLETES = {Op.REDUCE, Op.REDUCE_ACROSS, Op.REDUCE_PARTIAL, *SUMMING}


def updates_read_ahead(shape: RankShape) -> tuple[Instruction, ...]:
    """The updates of the parts whose state has been read: all of their way but the read."""
    ways = (way_of_part(shape, *key) for key in shape.read_ahead)
    return tuple(i for way in ways for i in way if i.op not in STATE_READS)


def place_reads_ahead(instructions: Sequence[Instruction], shape: RankShape) -> tuple[Instruction, ...]:
    """The list of a training step with these reads in front of its norm: as early as the last backward, but behind all
    that takes a slot or reads from disks for the computations.
    """
    if not shape.read_ahead:
        return tuple(instructions)
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


def place_early_updates(
    instructions: Sequence[Instruction], shape: RankShape, *, overlap: bool
) -> tuple[Instruction, ...]:
    """The list of a training step with the updates of the early parts. It has the gathers and loads already.

    overlap: an update stands a computation later than the reduction of its gradient, which travels meanwhile.
    """
    if not shape.early:
        return tuple(instructions)
    completed = _completed(instructions, shape, overlap=overlap)
    parts = sorted(shape.early, key=lambda key: (completed[key[0]], key))
    ways = [way_of_part(shape, *key) for key in parts]
    ahead = min(len(parts), max(1, shape.slots - most_taken(instructions, shape) - SPARE_SLOTS))
    behind: dict[int, list[Instruction]] = defaultdict(list)
    for place, (read, *_) in zip(_places_of_reads(instructions, completed[parts[0][0]], ahead), ways, strict=False):
        behind[place].append(read)
    for number, (bucket, _) in enumerate(parts):
        behind[completed[bucket]] += ways[number][1:]
        behind[completed[bucket]] += [read for read, *_ in ways[number + ahead : number + ahead + 1]]
    return tuple(placed for at, i in enumerate(instructions) for placed in (i, *behind[at]))


def _completed(instructions: Sequence[Instruction], shape: RankShape, *, overlap: bool) -> dict[int, int]:
    """By bucket: the number of the instruction behind which its gradient is complete, and travels no more."""
    last = {bucket: at for at, i in enumerate(instructions) if i.op in _COMPLETES for bucket in i.buckets}
    computations = [at for at, i in enumerate(instructions) if i.is_compute]

    def arrives(bucket: int, at: int) -> int:
        travels = overlap and shape.buckets[bucket].travels and not shape.buckets[bucket].sums_leave
        return next((later for later in computations if travels and later > at), at)

    return {bucket: arrives(bucket, at) for bucket, at in last.items()}


def _places_of_reads(instructions: Sequence[Instruction], stop: int, count: int) -> list[int]:
    """The numbers of the instructions behind which so many parts are read first: computations of the last forward and
    behind it, up to number `stop`, with as many reads behind each as behind any other.
    """
    computations = [at for at, i in enumerate(instructions[:stop]) if i.is_compute]
    last = next(instructions[at] for at in reversed(computations) if instructions[at].op is Op.FORWARD)
    first = next(
        number
        for number, at in enumerate(computations)
        if (instructions[at].micro_batch, instructions[at].chunk) == (last.micro_batch, last.chunk)
    )
    places = computations[first:]
    return [places[number * len(places) // count] for number in range(count)]


def updates_again(shape: RankShape) -> tuple[Instruction, ...]:
    """The updates of all early parts alone, and the gathers that follow them."""
    buckets = sorted({number for number, _ in shape.early})
    gathers = [i for i in device_updates(buckets, shape) if i.op is Op.GATHER]
    return (*(i for key in shape.early for i in way_of_part(shape, *key)), *gathers)
