"""Gathers and releases of sharded parameters: legal under every budget, near the least bytes, ahead of their uses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.pipeline.schedule import CHUNKS, chunk_map, forward_only, stage_schedule
from megazero.program.instruction import Instruction, Op
from megazero.program.passes.caching import CacheSearch, fewest_bytes
from megazero.program.passes.cut import cut, every_pass
from megazero.program.passes.gathers import (
    REGATHER,
    BudgetError,
    least_bytes,
    one_unit,
    place_gathers,
    two_units,
    uses_of,
)
from megazero.program.passes.vertical import VerticalOrder, turn
from megazero.program.shape import BucketShape, RankShape, UnitShape
from megazero.program.step import StepOptions, training_step
from tests.program import kinds
from tests.program.test_caching import least_of_all

MOVES = (Op.GATHER, kinds.RELEASE)
LAYOUTS = [
    (name, pp, virtual)
    for name, chunks in CHUNKS.items()
    for pp in (1, 2, 3, 4)
    for virtual in ([chunks] if chunks else [1, 2, 3])
]


def shape_of(
    name: str, pp: int, virtual: int, stage: int, *, blocks: int, block: int = 100, table: int = 370, tied: bool = False
) -> RankShape:
    """A stage of a model whose chunks have this many blocks each. Units have a bucket of their own; a tied head on the
    stage of the embedding has that one's. Backward reads the parameters of blocks only.
    """
    chunks = chunk_map(name, pp, virtual)
    buckets: list[BucketShape] = []
    embedding: int | None = None

    def bucket(chunk: int, size: int) -> int:
        buckets.append(
            BucketShape(chunk, size, 2 * size, True, gathered=True, sharded_gradient=True, sharded_state=True, shards=2)
        )
        return len(buckets) - 1

    units: list[tuple[UnitShape, ...]] = []
    for chunk, number in enumerate(chunks.of(stage)):
        own: list[UnitShape] = []
        if number == 0:
            embedding = bucket(chunk, table)
            own.append(UnitShape((embedding,), (), (embedding,)))
        for at in [bucket(chunk, block) for _ in range(blocks)]:
            own.append(UnitShape((at,), (at,), (at,)))
        if number == chunks.count - 1:
            at = embedding if tied and embedding is not None else bucket(chunk, table if tied else table + 4)
            own.append(UnitShape((at,), (), (at,)))
        units.append(tuple(own))
    return RankShape(tuple(units), tuple(buckets))


def by_unit(name: str, pp: int, virtual: int, stage: int, m: int, shape: RankShape) -> tuple[Instruction, ...]:
    schedule = stage_schedule(name, pp, m, virtual, stage)
    return cut(schedule, shape, every_pass(schedule))


def uses(i: Instruction, shape: RankShape) -> set[int]:
    """The sharded buckets that an instruction reads, from the shape. The weights' part of a backward reads none."""
    if not i.is_compute or i.op is Op.BACKWARD_WEIGHT:
        return set()
    units = shape.units[i.chunk][slice(*i.units) if i.units else slice(None)]
    read = {bucket for unit in units for bucket in (unit.forward if i.op is Op.FORWARD else unit.backward)}
    return {bucket for bucket in read if shape.buckets[bucket].gathered}


def replay(listed: Sequence[Instruction], shape: RankShape, budget: int) -> int:
    """The bytes that a list gathers. Fails unless every use is covered, the budget kept and nothing left."""
    held: set[int] = set()
    gathered = 0
    for i in listed:
        if i.op is Op.GATHER:
            assert not held & {*i.buckets}, f"{i}: it is there"
            held |= {*i.buckets}
            gathered += shape.bytes_of(i.buckets)
            assert shape.bytes_of(held) <= budget, f"{i}: {shape.bytes_of(held)} bytes"
        elif i.op == kinds.RELEASE:
            assert held >= {*i.buckets}, f"{i}: it is not there"
            held -= {*i.buckets}
        assert held >= uses(i, shape), f"{i} has {held}"
    assert not held
    return gathered


def lead(listed: Sequence[Instruction], shape: RankShape) -> list[int]:
    """For each GATHER: how many uses of parameters stand between it and the first that reads its bucket."""
    found = []
    for at, i in enumerate(listed):
        if i.op is Op.GATHER:
            following = [use for other in listed[at:] if (use := uses(other, shape))]
            found.append(next(n for n, use in enumerate(following) if i.buckets[0] in use))
    return found


@st.composite
def lists(draw: st.DrawFn) -> tuple[tuple[Instruction, ...], RankShape, int]:
    """A list without gathers, the shape of its rank, and a budget."""
    name, pp, virtual = draw(st.sampled_from(LAYOUTS))
    stage, m = draw(st.integers(0, pp - 1)), draw(st.integers(1, 6))
    sizes = st.integers(1, 12)
    shape = shape_of(
        name,
        pp,
        virtual,
        stage,
        blocks=draw(st.integers(1, 4)),
        block=draw(sizes),
        table=draw(sizes),
        tied=draw(st.booleans()),
    )
    listed = by_unit(name, pp, virtual, stage, m, shape)
    if draw(st.booleans()):
        groups = VerticalOrder(draw(st.sampled_from((None, 2)))).groups(m)
        listed = turn(stage_schedule(name, pp, len(groups), virtual, stage), shape, groups)
    elif draw(st.booleans()):
        listed = forward_only(listed) if draw(st.booleans()) else training_step(listed, shape, StepOptions(True))
        listed = tuple(i for i in listed if i.op not in MOVES)
    return listed, shape, one_unit(listed, shape) + draw(st.integers(0, shape.bytes_of(range(len(shape.buckets)))))


@pytest.mark.slow
@settings(max_examples=150)
@given(lists(), st.sampled_from(REGATHER), st.booleans())
def test_every_use_is_covered_within_the_budget(
    drawn: tuple[tuple[Instruction, ...], RankShape, int], regather: str, by_row: bool
) -> None:
    listed, shape, budget = drawn
    placed = place_gathers(listed, shape, budget, regather, by_row=by_row)
    assert tuple(i for i in placed if i.op not in MOVES) == listed, "nothing else moves"
    assert replay(placed, shape, budget) >= least_bytes(listed, shape, budget)
    first = [
        next(at for at, other in enumerate(placed[start:], start) if i.buckets[0] in uses(other, shape))
        for start, i in enumerate(placed)
        if i.op is Op.GATHER
    ]
    assert first == sorted(first), "the lane works in the order of the uses"


@pytest.mark.few(cases=6)
@pytest.mark.parametrize(("name", "pp", "virtual"), LAYOUTS)
def test_a_step_gathers_little_more_than_the_least(name: str, pp: int, virtual: int) -> None:
    """At most 1.05 times the least bytes, for 1 to 16 micro-batches and budgets from one unit to everything."""
    for m in (1, 2, 4, 8, 16) if pp in (1, 4) else (3, 6):
        for stage, table, tied in ((0, 370, False), (pp - 1, 370, True), (pp - 1, 100, False), (0, 1000, True)):
            shape = shape_of(name, pp, virtual, stage, blocks=1 + (m + pp) % 4, table=table, tied=tied)
            listed = by_unit(name, pp, virtual, stage, m, shape)
            one, everything = one_unit(listed, shape), shape.bytes_of(range(len(shape.buckets)))
            for budget in (one, one + 57, two_units(listed, shape), one + 120, (one + everything) // 2, everything):
                placed = place_gathers(listed, shape, budget, "step")
                least = least_bytes(listed, shape, budget)
                assert least <= replay(placed, shape, budget) <= 1.05 * least, (m, stage, table, budget)
            assert least == everything, "each bucket once"


@pytest.mark.parametrize(("name", "pp", "virtual"), LAYOUTS)
def test_the_least_bytes_are_the_least(name: str, pp: int, virtual: int) -> None:
    """Against every content of the cache where buckets differ, and against the linear program where they do not."""
    for stage, tied in ((0, False), (pp - 1, True)):
        small = shape_of(name, pp, virtual, stage, blocks=1 + (virtual == 1), block=3, table=7, tied=tied)
        listed = by_unit(name, pp, virtual, stage, 3, small)
        sizes = [bucket.parameter_bytes for bucket in small.buckets]
        for budget in {one_unit(listed, small) + more for more in (0, 3, 5)}:
            assert least_bytes(listed, small, budget) == least_of_all(uses_of(listed, small), sizes, budget)
        equal = shape_of(name, pp, virtual, stage, blocks=4, block=100, table=100)
        listed = by_unit(name, pp, virtual, stage, 8, equal)
        sizes = [bucket.parameter_bytes - bucket.parameter_bytes % 100 for bucket in equal.buckets]
        assert CacheSearch(uses_of(listed, equal), sizes, 350).run().loaded == fewest_bytes(
            uses_of(listed, equal), sizes, 350
        )


def test_large_lists_are_solved_as_well() -> None:
    """64 micro-batches, two chunks of 15 units: no bound on the search is met."""
    shape = shape_of("interleaved", 4, 2, 0, blocks=15)
    listed = by_unit("interleaved", 4, 2, 0, 64, shape)
    sizes = [bucket.parameter_bytes for bucket in shape.buckets]
    for budget in (370, 470, 900, 2000):
        assert CacheSearch(uses_of(listed, shape), sizes, budget).run().least


def text(listed: Sequence[Instruction]) -> str:
    """F0 forward of unit 0, B backward, +1 gather of bucket 1, -1 release, *1 reduction; the rest in lower case."""
    short = {Op.FORWARD: "F", Op.BACKWARD: "B", Op.GATHER: "+", kinds.RELEASE: "-", Op.REDUCE: "*"}
    return " ".join(
        f"{short.get(i.op, i.op.value.split()[0])}{i.units[0] if i.units else ''}{','.join(map(str, i.buckets))}"
        for i in listed
    )


def blocks_of(sizes: Sequence[int]) -> RankShape:
    """One stage with a block of each of these sizes."""
    buckets = [BucketShape(0, size, 2 * size, True, True, True, True, shards=2) for size in sizes]
    return RankShape((tuple(UnitShape((n,), (n,), (n,)) for n in range(len(sizes))),), tuple(buckets))


def step(shape: RankShape, m: int, budget: int | None, regather: str = "micro-batch") -> str:
    options = StepOptions(reduce_every=True, gathered_bytes=budget, regather=regather)
    return text(training_step(stage_schedule("1f1b", 1, m, 1, 0), shape, options))


def test_one_computation_ahead_and_before_the_reductions() -> None:
    """By default there is room for two units. The next gather starts as soon as the unit before last is free, and does
    not wait for the reduction that starts there as well.
    """
    assert step(blocks_of([10, 10, 10]), 1, None) == (
        "+0 +1 F0 -0 +2 F1 -1 F2 +1 B2 -2 +0 *2 B1 -1 *1 B0 -0 *0 norm update0,1,2"
    )


def test_no_gather_is_ahead_where_there_is_no_room() -> None:
    assert step(blocks_of([10, 10, 10]), 1, 10) == (
        "+0 F0 -0 +1 F1 -1 +2 F2 B2 -2 +1 *2 B1 -1 +0 *1 B0 -0 *0 norm update0,1,2"
    )


def test_a_table_starts_as_much_earlier_as_it_is_larger() -> None:
    """The table is five times as large as a block, and the lane needs two and a half computations for it. Those before
    it start earlier too, since the lane keeps the order. More room than needed changes nothing.
    """
    shape = blocks_of([10] * 7 + [50])
    found = {}
    for budget in (60, 70, 80, 90, 1000):
        turns = [Instruction(Op.FORWARD, 0, 0, units=(unit, unit + 1)) for unit in range(8)]
        found[budget] = lead(place_gathers(turns, shape, budget), shape)
    assert found[60] == [0, 1, 1, 1, 1, 2, 2, 1]
    assert found[70] == [0, 1, 1, 1, 1, 2, 2, 2]
    assert found[80] == found[90] == found[1000] == [0, 1, 1, 1, 1, 2, 2, 3]


def test_a_gather_does_not_overtake_one_that_is_needed_sooner() -> None:
    """Bucket 4 has no room beside use 3. There is some for bucket 5, but it waits."""
    shape = blocks_of([10, 10, 10, 30, 30, 10, 50])
    turns = [Instruction(Op.FORWARD, 0, 0, units=(unit, unit + 1)) for unit in range(7)]
    placed = place_gathers(turns, shape, 50)
    assert [i.buckets[0] for i in placed if i.op is Op.GATHER] == list(range(7))
    assert lead(placed, shape)[4:6] == [0, 1]


def test_a_bucket_is_kept_where_its_gather_would_follow_its_release() -> None:
    """Two units that take turns: room for both means that none has to leave."""
    shape = blocks_of([10, 10])
    turns = [Instruction(Op.FORWARD, m, 0, units=(unit, unit + 1)) for m in range(3) for unit in range(2)]
    assert text(place_gathers(turns, shape, 20)) == "+0 +1 F0 F1 F0 F1 F0 -0 F1 -1"
    assert text(place_gathers(turns[:4], shape, 10)) == "+0 F0 -0 +1 F1 -1 +0 F0 -0 +1 F1 -1"


def test_bytes_come_before_overlap_and_overlap_before_a_few_bytes() -> None:
    """Forwards in turn, and room for two units. With three units, parameters that stay are found by every other use,
    and are kept although computations then wait for gathers. With 30 units a thirtieth finds them, and none is kept.
    """
    for units, found in ((3, 5), (30, 4)):
        shape = blocks_of([10] * units)
        turns = [Instruction(Op.FORWARD, m, 0, units=(unit, unit + 1)) for m in range(4) for unit in range(units)]
        placed = place_gathers(turns, shape, 20, "step")
        assert least_bytes(turns, shape, 20) == 10 * (4 * units - found)
        few = units == 30
        assert replay(placed, shape, 20) == 10 * (4 * units - (0 if few else found))
        waiting = sum(ahead == 0 for ahead in lead(placed, shape))
        assert waiting == 1 if few else waiting > units


def test_kept_parameters_and_overlap_go_together_at_a_turn() -> None:
    """A forward and the backward that follows it need the last units in reverse: those stay, and yet all are ahead."""
    shape = blocks_of([10] * 4)
    listed = training_step(stage_schedule("1f1b", 1, 6, 1, 0), shape, StepOptions(True, True, 20, "step"))
    assert replay(listed, shape, 20) == 10 * (4 + 11 * 2)
    assert sum(ahead == 0 for ahead in lead(listed, shape)) == 1


def test_a_budget_below_one_unit_is_refused_with_the_numbers() -> None:
    shape = blocks_of([10, 30])
    listed = stage_schedule("1f1b", 1, 1, 1, 0)
    with pytest.raises(BudgetError, match=r"forward .* unit 1\) reads 30 bytes of parameters, the budget is 29"):
        training_step(listed, shape, StepOptions(gathered_bytes=29))
    with pytest.raises(BudgetError, match="reads 40 bytes"):
        least_bytes(listed, shape, 29)


def test_the_weights_part_of_a_backward_holds_nothing() -> None:
    """Between the input's part and the weights' part, which reads no parameters, they are released."""
    shape = blocks_of([10])
    listed = [Instruction(op, 0, 0, units=(0, 1)) for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
    ops = [i.op for i in place_gathers(listed, shape, 10)]
    assert ops == [Op.GATHER, Op.FORWARD, Op.BACKWARD_INPUT, kinds.RELEASE, Op.BACKWARD_WEIGHT]


def test_parameters_that_are_not_sharded_are_left_alone() -> None:
    shape = blocks_of([10, 10])
    whole = RankShape(shape.units, tuple(BucketShape(0, 10, 20) for _ in shape.buckets))
    listed = cut(schedule := stage_schedule("1f1b", 1, 2, 1, 0), whole, every_pass(schedule))
    assert place_gathers(listed, whole, 0) == listed
    assert least_bytes(listed, whole, 0) == 0
