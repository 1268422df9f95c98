"""Place the updates that the step before has left, each before the list reads what it writes: late updates.

A bucket is updated just before its first use. Parameters that are brought for it (ZeRO-3, --offload-params) are
updated before the first GATHER or LOAD, which is a computation ahead already. Those that each rank keeps whole are read
by the first forward. Where ranks update different shards of them (ZeRO-1, 2), update and gather stand one computation
ahead, so that the message travels beside that.

Some updates stand earlier.

- A stage whose input comes from another stage waits for it. It makes all updates of a chunk in this time: between two
  units they would hold up the micro-batch, and every stage behind this one.
- Parts that are updated in host memory come first in the list, in the order of their uses. Lanes of their own work on
  them beside the first computations, and each computation waits for its own. Where parameters and
  optimizer state rest on disks, one lane reads both. There a bucket's parts come one bucket ahead of its use: if all
  came first, the first computation would wait for the state of all.
- A bucket whose shards several stages share (a tied embedding's) comes first in all lists. Its gather needs all of
  these stages, and the last one comes to its own use only after it has heard from the first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from megazero.config.tiers import Tier
from megazero.program.effects import ParametersRead
from megazero.program.instruction import Instruction, Op
from megazero.program.passes.cut import Pass
from megazero.program.passes.gathers import BRINGS
from megazero.program.passes.updates import device_updates, host_updates
from megazero.program.shape import PartKey, RankShape


def place_late_updates(
    instructions: Sequence[Instruction], shape: RankShape, without: Collection[PartKey] = ()
) -> tuple[Instruction, ...]:
    """The list with an UPDATE, and where it is needed a GATHER, of each trained bucket. It has those of `place_gathers`
    already. without: parts in host memory that are updated before all else.
    """
    uses, touched = _first_uses(instructions, shape)
    order = sorted(shape.trained, key=lambda bucket: (uses[bucket], bucket))
    at = _places(instructions, shape, order, uses, touched)
    in_host = _host_places(instructions, shape, order, uses, touched)
    placed: list[Instruction] = []
    for number, i in enumerate(instructions):
        placed += host_updates(in_host[number], shape, without)
        placed += device_updates(at[number], shape)
        placed.append(i)
    return tuple(placed)


def _places(
    instructions: Sequence[Instruction],
    shape: RankShape,
    order: Sequence[int],
    uses: Mapping[int, int],
    touched: Mapping[int, int],
) -> dict[int, list[int]]:
    """By the number of an instruction: the buckets that are updated on the device in front of it, of `order`."""
    computations = [number for number, i in enumerate(instructions) if i.is_compute]
    received = {_pass(i) for i in instructions if i.op is Op.RECV_FORWARD}
    begins: dict[Pass, int] = {}
    for number in computations:
        begins.setdefault(_pass(instructions[number]), number)
    places: dict[int, list[int]] = defaultdict(list)
    for bucket in order:
        number, where = touched[bucket], _pass(instructions[uses[bucket]])
        if shape.buckets[bucket].gathered_after_update and shape.buckets[bucket].shards_span:
            number = 0
        elif where in received:
            number = min(number, begins[where])
        elif shape.buckets[bucket].gathered_after_update:
            number = computations[max(0, bisect_left(computations, number) - 1)]
        places[number].append(bucket)
    return places


def _host_places(
    instructions: Sequence[Instruction],
    shape: RankShape,
    order: Sequence[int],
    uses: Mapping[int, int],
    touched: Mapping[int, int],
) -> dict[int, list[int]]:
    """By the number of an instruction: the buckets of which parts are updated in host memory in front of it. The
    instruction brings the preceding bucket to the device, or the bucket itself, whichever comes first. A bucket is
    brought before the first use of a bucket that stays on the device and is used earlier.
    """
    received = {_pass(i) for i in instructions if i.op is Op.RECV_FORWARD}
    places: dict[int, list[int]] = defaultdict(list)
    before = 0
    for bucket in order:
        rests = shape.buckets[bucket].rests
        shares_lane = rests.in_files and rests in _tiers(shape, bucket)
        waits = _pass(instructions[uses[bucket]]) in received  # for hidden states: the lanes have time for all
        places[min(before, touched[bucket]) if shares_lane and not waits else 0].append(bucket)
        before = touched[bucket]
    return places


def _tiers(shape: RankShape, bucket: int) -> set[Tier]:
    return {part.tier for part in shape.buckets[bucket].parts}


def _first_uses(instructions: Sequence[Instruction], shape: RankShape) -> tuple[dict[int, int], dict[int, int]]:
    """By bucket: the number of the first computation that reads it, and of the first instruction that does."""
    reads = ParametersRead(shape)
    uses: dict[int, int] = {}
    touched: dict[int, int] = {}
    for number, i in enumerate(instructions):
        read = reads(i) if i.is_compute else ()
        for bucket in read:
            uses.setdefault(bucket, number)
        for bucket in i.buckets if i.op in BRINGS else read:
            touched.setdefault(bucket, number)
    return uses, touched


def _pass(i: Instruction) -> Pass:
    return i.micro_batch, i.chunk
