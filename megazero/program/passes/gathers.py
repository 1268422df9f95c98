"""Place the gathers and releases of sharded parameters (ZeRO-3) in a list, under a budget of bytes, and the loads of
those that do not rest on the device, in front of their gathers.

The computations that read sharded parameters are the uses. Two decisions follow each other.

What stays. Between two uses of a bucket its parameters are kept, or released and gathered again. With `micro-batch`
they are kept only if no other use comes between. With `step` they are kept where this saves the most bytes under the
budget: the order of uses is known, so that is offline caching (`passes.caching`).

When a gather starts. Gathers share the lane SHARDS with reductions, and a lane works in the order of the list. A gather
stands behind the release of an earlier use, so that it travels beside the computations from there to its own use: one
computation ahead in a row of equal units, and further where a table is among them, whose gather takes longer. It starts
later where the budget has no room for it before, at the latest at its use. Gathers stand in the order of their uses,
since a later one in front would delay an earlier one. And they stand before the reductions at the same place of the
list: a computation is about to wait for them, while for a reduction nobody waits before the end of the step.

In vertical order (`passes.vertical`) the uses of a unit are a row of computations. The next unit's gather has the whole
row to travel: it starts beside the first computation of it.

Parameters change at the end of a step. Each bucket is released after its last use in the list, before its update.

A bucket that rests in host memory is loaded by one copy. One that rests on disks comes in parts: each is read into host
memory and copied from there. Reads and copies have lanes of their own, and few parts are in host memory at a time, so
each read stands right before its copy. What no other rank has a share of is loaded to where it is used, and its GATHER
only waits for that: the two stand together. A shard is loaded into memory of its own, from where it is sent to the
others. It is loaded one gather ahead, so that no gather has to wait for a copy that has just begun.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import median_high

from megazero.config.tiers import Tier
from megazero.program.effects import ParametersRead
from megazero.program.instruction import PARAMETER_LOADS, RELEASE, Instruction, Op, Piece, hops
from megazero.program.passes.caching import CachePlan, CacheSearch, as_bits, fewest_bytes
from megazero.program.shape import RankShape

REGATHER = ("micro-batch", "step")
"""When parameters are gathered again: for each use, or only where the budget does not hold them from use to use."""
OVERLAP_WORTH = 20
"""A computation that waits for a gather costs as much as a twentieth of the gather's bytes. So `step` gathers at most
1.05 times the least bytes possible under the budget, and more than the least only where this lets gathers overlap.
"""

Use = tuple[int, ...]
"""The buckets with sharded parameters that a computation reads."""
Gap = tuple[int, int]
"""A bucket, and the number of a use that reads it: the time since the use before that reads it."""


class BudgetError(ValueError):
    """The budget does not hold the parameters of one computation."""


def all_uses(instructions: Sequence[Instruction], shape: RankShape) -> list[Use]:
    """For each instruction of a list the buckets with sharded parameters that it reads (`program.effects`)."""
    sharded = {number for number, bucket in enumerate(shape.buckets) if bucket.gathered}
    return [*map(ParametersRead(shape, sharded), instructions)]


def uses_of(instructions: Sequence[Instruction], shape: RankShape) -> list[Use]:
    """The uses of a list, in order: computations that read no sharded parameters are none."""
    return [use for use in all_uses(instructions, shape) if use]


def two_units(instructions: Sequence[Instruction], shape: RankShape) -> int:
    """Bytes of the parameters of the two largest computations that follow each other."""
    order = uses_of(instructions, shape)
    pairs = {(*one, *other) for one, other in pairwise(order)}
    return max((shape.bytes_of({*pair}) for pair in pairs), default=_largest(order, shape))


def one_unit(instructions: Sequence[Instruction], shape: RankShape) -> int:
    """Bytes of the parameters of the largest computation: the smallest budget."""
    return _largest(uses_of(instructions, shape), shape)


def _largest(order: Sequence[Use], shape: RankShape) -> int:
    return max((shape.bytes_of(use) for use in {*order}), default=0)


def least_bytes(instructions: Sequence[Instruction], shape: RankShape, budget: int, *, search: bool = True) -> int:
    """Bytes that any placement under this budget gathers at least.

    They can be reached, except where buckets have so many sizes that `CacheSearch` gives up: then they are the bound of
    `fewest_bytes`. search: False for that bound in any case. Raises BudgetError as `place_gathers` does.
    """
    uses, sizes = _fitting_uses(instructions, shape, budget), _sizes(shape)
    order = tuple(use for use in uses if use)
    if not order:
        return 0
    found = _searched(order, sizes, budget) if search else None
    return found.loaded if found is not None and found.least else fewest_bytes(order, sizes, budget)


def place_gathers(
    instructions: Sequence[Instruction],
    shape: RankShape,
    budget: int,
    regather: str = "micro-batch",
    *,
    by_row: bool = False,
) -> tuple[Instruction, ...]:
    """The list with a GATHER before and a RELEASE after the uses of sharded parameters, as described above.

    budget: most bytes of whole parameters at any time. regather: one of `REGATHER`. by_row: vertical order.
    The result depends on the arguments only, so it is the same on all ranks of a role.
    Raises BudgetError where the budget does not hold the parameters of one computation.
    """
    uses, sizes = _fitting_uses(instructions, shape, budget), _sizes(shape)
    order = [use for use in uses if use]
    if not order:
        return tuple(instructions)
    begins = _row_begins(instructions, uses) if by_row else range(len(order))
    choices = _kept_choices(order, sizes, budget) if regather == "step" else [set[Gap]()]
    placements = [_placement(order, sizes, budget, kept, begins) for kept in choices]
    best = min(placements, key=lambda placement: OVERLAP_WORTH * placement.gathered + placement.late)
    placed, number = best.gathers[0].copy(), 0
    for i, use in zip(instructions, uses, strict=True):
        placed.append(i)
        if use:
            placed += best.releases[number]
            number += 1
            placed += best.gathers[number]
    return tuple(placed)


def _row_begins(instructions: Sequence[Instruction], uses: Sequence[Use]) -> list[int]:
    """For each use the number of the first one in its row: of uses of one unit that follow each other."""
    using = [(i.chunk, i.units) for i, use in zip(instructions, uses, strict=True) if use]
    begins: list[int] = []
    for number, unit in enumerate(using):
        begins.append(begins[-1] if number and using[number - 1] == unit else number)
    return begins


def _sizes(shape: RankShape) -> tuple[int, ...]:
    return tuple(bucket.parameter_bytes for bucket in shape.buckets)


def _fitting_uses(instructions: Sequence[Instruction], shape: RankShape, budget: int) -> list[Use]:
    """`all_uses`. Raises BudgetError where the largest one does not fit."""
    uses = all_uses(instructions, shape)
    largest = max(dict.fromkeys(uses), key=shape.bytes_of, default=())
    if shape.bytes_of(largest) > budget:
        i = instructions[uses.index(largest)]
        raise BudgetError(f"{i} reads {shape.bytes_of(largest)} bytes of parameters, the budget is {budget}")
    return uses


@lru_cache(maxsize=4)
def _searched(order: tuple[Use, ...], sizes: tuple[int, ...], budget: int) -> CachePlan:
    """The cache that loads the fewest bytes. A search takes seconds; the pass asks for one, and then `least_bytes`."""
    return CacheSearch(order, sizes, budget).run()


def _kept_choices(order: Sequence[Use], sizes: tuple[int, ...], budget: int) -> list[set[Gap]]:
    """Two answers to what stays: that with the fewest bytes, and that with the fewest among those which leave room for
    the next use's parameters beside each use, where the budget has this room at all.
    """
    windows = [tuple({*use, *coming}) for use, coming in pairwise([*order, ()])]
    fitting = [
        window if sum(sizes[bucket] for bucket in window) <= budget else use
        for window, use in zip(windows, order, strict=True)
    ]
    return [_kept(order, _searched(tuple(wanted), sizes, budget).held) for wanted in (order, fitting)]


def _kept(order: Sequence[Use], held: Sequence[int]) -> set[Gap]:
    """The gaps in which a bucket is held at all uses, of those with a use between. held: as in `CachePlan`."""
    kept: set[Gap] = set()
    used = lost = 0
    last: dict[int, int] = {}
    for number, (use, content) in enumerate(zip(order, held, strict=True)):
        lost |= used & ~content
        kept |= {(b, number) for b in use if last.get(b, number) < number - 1 and not lost >> b & 1}
        used, lost = used | as_bits(use), lost & ~as_bits(use)
        last.update(dict.fromkeys(use, number))
    return kept


@dataclass(frozen=True)
class _Placement:
    """Where gathers and releases stand.

    gathers   by use: those behind the releases of the use before it, the first ones at the begin of the list
    releases  by use: those behind it
    gathered  bytes that are gathered
    late      bytes of gathers that begin at their use
    """

    gathers: Mapping[int, list[Instruction]]
    releases: Mapping[int, list[Instruction]]
    gathered: int
    late: int


def _placement(
    order: Sequence[Use], sizes: Sequence[int], budget: int, kept: Collection[Gap], begins: Sequence[int]
) -> _Placement:
    """The placement that keeps buckets in these gaps, and in others where a gather would follow its release at once.

    begins: for each use the first one of its row, beside which a gather starts that is wanted in the row.
    """
    gathers: dict[int, list[Instruction]] = defaultdict(list)
    releases: dict[int, list[Instruction]] = defaultdict(list)
    room, last, latest = _room(order, sizes, budget, kept), dict[int, int](), 0
    wanted = _wanted_starts(order, sizes, kept, begins)
    gather = [Instruction(Op.GATHER, buckets=(bucket,)) for bucket in range(len(sizes))]
    release = [Instruction(RELEASE, buckets=(bucket,)) for bucket in range(len(sizes))]
    gathered = late = 0
    for number, use in enumerate(order):
        for bucket in use:
            if (bucket, number) in kept:
                continue
            start, free = number, last.get(bucket, -1) + 1
            while start > max(free, latest, wanted[bucket, number]) and room[start - 1] >= sizes[bucket]:
                start -= 1
                room[start] -= sizes[bucket]
            if bucket in last:
                if start == free:
                    continue
                releases[free - 1].append(release[bucket])
            gathers[start].append(gather[bucket])
            gathered, late, latest = gathered + sizes[bucket], late + sizes[bucket] * (start == number), start
        last.update(dict.fromkeys(use, number))
    for bucket in sorted(last):
        releases[last[bucket]].append(release[bucket])
    return _Placement(gathers, releases, gathered, late)


def _wanted_starts(
    order: Sequence[Use], sizes: Sequence[int], kept: Collection[Gap], begins: Sequence[int]
) -> dict[Gap, int]:
    """For each gather the use beside which it starts if there is room: late, but in time.

    The lane works off the gathers in order, so a gather is in time if it ends before its use and before those behind it
    have to start. Of its duration a list knows nothing. A gather of median size is taken to last half a computation:
    where it lasts longer than a whole one, the gathers determine the time of the step, and starting earlier is no help.
    """
    computation = 2 * median_high(sum(sizes[bucket] for bucket in use) for use in order)
    start = len(order) * computation
    wanted: dict[Gap, int] = {}
    for number in range(len(order) - 1, -1, -1):
        for bucket in reversed(order[number]):
            if (bucket, number) not in kept and (number == 0 or bucket not in order[number - 1]):
                start = min(start, number * computation) - sizes[bucket]
            wanted[bucket, number] = begins[min(number, max(0, start // computation))]
    return wanted


def _room(order: Sequence[Use], sizes: Sequence[int], budget: int, kept: Collection[Gap]) -> list[int]:
    """For each use the bytes of the budget that its own parameters and those kept across it leave."""
    change, last = [0] * (len(order) + 1), dict[int, int]()
    for number, use in enumerate(order):
        for bucket in use:
            since = number
            if (bucket, number) in kept:
                since = last[bucket] + 1
            change[since] += sizes[bucket]
            change[number + 1] -= sizes[bucket]
            last[bucket] = number
    return [budget - full for full in accumulate(change[:-1])]


BRINGS = PARAMETER_LOADS | {Op.GATHER}
"""The instructions that bring a bucket's parameters."""


def place_loads(instructions: Sequence[Instruction], shape: RankShape) -> tuple[Instruction, ...]:
    """The list with what loads a bucket before each GATHER of one that does not rest on the device. It has the gathers
    already, and no updates.
    """
    gathers = [at for at, i in enumerate(instructions) if i.op is Op.GATHER and shape.buckets[i.buckets[0]].is_loaded]
    if not gathers:
        return tuple(instructions)
    before: dict[int, list[Instruction]] = {at: [] for at in gathers}
    for earlier, at in zip([gathers[0], *gathers], gathers, strict=False):
        number = instructions[at].buckets[0]
        ahead = shape.buckets[number].is_sharded and instructions[earlier].buckets[0] != number
        before[earlier if ahead else at] += loads_of(number, shape)
    return tuple(placed for at, i in enumerate(instructions) for placed in (*before.get(at, ()), i))


def loads_of(number: int, shape: RankShape) -> list[Instruction]:
    """What loads a bucket that does not rest on the device."""
    bucket = shape.buckets[number]
    moves = hops(Piece.PARAMETERS, bucket.rests, Tier.DEVICE)
    return [Instruction(move, buckets=(number,), part=part) for part in bucket.loads for move in moves]
