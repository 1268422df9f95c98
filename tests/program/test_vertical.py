"""Vertical order: what a list prints, what it gathers and reduces, which hidden states are alive, and what stages send
each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import pytest

from megazero.pipeline.schedule import CHUNKS, chunk_map, forward_only, make_schedule, stage_schedule
from megazero.program.instruction import Instruction, Op
from megazero.program.memory import MemoryColumn, StepBytes, UnitSizes
from megazero.program.memory_walk import samples
from megazero.program.passes.gathers import least_bytes, one_unit, place_gathers, two_units
from megazero.program.passes.vertical import VerticalOrder, turn
from megazero.program.scope import Scope
from megazero.program.shape import without_state
from megazero.program.simulate import simulate
from megazero.program.step import StepOptions, training_step
from megazero.program.times import uniform_times
from tests.launches import ONE_QUEUE, deadlock, differences
from tests.pipeline.test_one_queue import messages
from tests.program.made import shape, texts
from tests.program.steps import EMBEDDING, HEAD, Model, checked, shape_of, step_of
from tests.program.test_gathers import blocks_of, replay, text
from tests.program.test_gathers import shape_of as sharded

SCHEDULES = [(name, chunks or count) for name, chunks in CHUNKS.items() for count in (1, 2) if chunks in (None, count)]


def vertical(m: int, most: int | None = None, *, sizes: Sequence[int] = (10, 10, 10), budget: int | None = None) -> str:
    """The list of one stage with a block of each of these sizes under ZeRO-3, as `test_gathers.text`."""
    order = VerticalOrder(most)
    groups = order.groups(m)
    options = StepOptions(reduce_every=True, gathered_bytes=budget, vertical=order)
    (schedule,) = make_schedule("1f1b", 1, len(groups))
    return text(training_step(schedule, blocks_of(sizes), options, groups=groups))


def test_every_unit_is_gathered_once_a_pass_and_reduced_once() -> None:
    """A unit's gather has the whole row of the one before. The last unit's forward and backward are in turn."""
    assert vertical(3) == (
        "+0 +1 F0 F0 F0 -0 +2 F1 F1 F1 F2 B2 F2 B2 F2 B2 -2 +0 *2 B1 B1 B1 -1 *1 B0 B0 B0 -0 *0 norm update0,1,2"
    )
    assert vertical(3, budget=10) == (
        "+0 F0 F0 F0 -0 +1 F1 F1 F1 -1 +2 F2 B2 F2 B2 F2 B2 -2 +1 *2 B1 B1 B1 -1 +0 *1 B0 B0 B0 -0 *0 norm update0,1,2"
    )


def test_groups_follow_each_other() -> None:
    """Each is gathered and reduced for itself. Unit 0 stays from one group's backward to the next one's forward."""
    assert vertical(3, 2, budget=10) == (
        "+0 F0 F0 -0 +1 F1 F1 -1 +2 F2 B2 F2 B2 -2 +1 *2 B1 B1 -1 +0 *1 B0 B0 *0 "
        "F0 -0 +1 F1 -1 +2 F2 B2 -2 +1 *2 B1 -1 +0 *1 B0 -0 *0 norm update0,1,2"
    )


def test_a_group_of_one_is_horizontal_order() -> None:
    options = StepOptions(True, gathered_bytes=10)
    (schedule,) = make_schedule("1f1b", 1, 4)
    assert vertical(4, 1, budget=10) == text(training_step(schedule, blocks_of((10, 10, 10)), options))


def test_what_a_stage_of_a_pipeline_does() -> None:
    """Messages arrive in the first row of a pass and leave in the last one. Receives are one computation ahead."""
    schedule = make_schedule("1f1b", 2, 1)[0]
    assert texts(turn(schedule, without_state([2]), VerticalOrder().groups(2))) == [
        "forward (micro-batch 0, chunk 0, unit 0)",
        "forward (micro-batch 1, chunk 0, unit 0)",
        "forward (micro-batch 0, chunk 0, unit 1)",
        "send hidden states (micro-batch 0, chunk 0, to stage 1)",
        "receive gradients (micro-batch 0, chunk 0, from stage 1)",
        "forward (micro-batch 1, chunk 0, unit 1)",
        "send hidden states (micro-batch 1, chunk 0, to stage 1)",
        "receive gradients (micro-batch 1, chunk 0, from stage 1)",
        "backward (micro-batch 0, chunk 0, unit 1)",
        "backward (micro-batch 1, chunk 0, unit 1)",
        "backward (micro-batch 0, chunk 0, unit 0)",
        "backward (micro-batch 1, chunk 0, unit 0)",
    ]


@pytest.mark.parametrize(("m", "most"), [(1, None), (7, None), (7, 3), (7, 7), (8, 3), (4, 1), (2, 5)])
def test_groups(m: int, most: int | None) -> None:
    groups = VerticalOrder(most).groups(m)
    assert [number for group in groups for number in group] == list(range(m))
    sizes = [len(group) for group in groups]
    assert len(groups) == (1 if most is None else -(-m // most)) and max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("name", "virtual"), SCHEDULES)
def test_rows(name: str, virtual: int) -> None:
    """A group's computations of a unit follow each other, in the order of the micro-batches, and nothing is missing."""
    for pp, m, most in ((1, 7, None), (1, 4, 2), (2, 7, 3), (3, 4, None)):
        groups, count = VerticalOrder(most).groups(m), chunk_map(name, pp, virtual).count
        for stage in make_schedule(name, pp, len(groups), virtual):
            units = [3] * virtual
            listed = [i for i in turn(stage, without_state(units), groups) if i.is_compute]
            assert Counter(listed) == Counter(dict.fromkeys(listed, 1))
            whole = [i for i in stage if i.is_compute]
            assert len(listed) == sum(len(groups[i.micro_batch]) for i in whole) * 3
            for (_, _, number), row in groupby(listed, key=lambda i: (i.chunk, i.units, _group(i, groups))):
                own = list(row)
                rows = [[i.micro_batch for i in own if i.op == op] for op in {i.op for i in own}]
                assert all(found == list(groups[number]) for found in rows)
                if own[0].micro_batch == own[1].micro_batch:
                    at_head = {(i.model_chunk, i.units) for i in own}
                    assert at_head == {(count - 1, (2, 3))}, "the head alone does forward and backward in turn"


def _group(i: Instruction, groups: Sequence[range]) -> int:
    return next(number for number, group in enumerate(groups) if i.micro_batch in group)


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("most", [None, 3])
def test_what_is_gathered_and_reduced_does_not_grow_with_the_micro_batches(pp: int, most: int | None) -> None:
    """Every bucket once for each group's forward, and once for its backward, at most; one reduction for each group."""
    for m in (1, 4, 7):
        model = Model("1f1b", pp, 1, m, (4,), zero=3, vertical=VerticalOrder(most))
        step = checked(step_of(model))
        assert model.groups is not None
        passes = len(model.groups)
        for stage in range(pp):
            own = step.lists[stage, 0]
            gathers, reductions = (Counter(i.buckets[0] for i in own if i.op == op) for op in (Op.GATHER, Op.REDUCE))
            buckets = range(len(step.shapes[stage, 0].buckets))
            turning = {buckets[-1]} if stage == pp - 1 else set()
            assert reductions == dict.fromkeys(buckets, passes)
            assert all(gathers[bucket] <= passes if bucket in turning else 2 * passes for bucket in buckets)
            assert all(gathers[bucket] >= passes + 1 for bucket in buckets[1:-2])


@pytest.mark.few(cases=2)
@pytest.mark.parametrize(("name", "virtual"), SCHEDULES)
def test_a_step_gathers_little_more_than_the_least(name: str, virtual: int) -> None:
    """As in horizontal order: at most 1.05 times the least bytes, for budgets from one unit to everything."""
    for pp, m, most in ((1, 8, None), (1, 6, 2), (3, 7, None), (2, 8, 3)):
        groups = VerticalOrder(most).groups(m)
        for stage in (0, pp - 1):
            rank = sharded(name, pp, virtual, stage, blocks=4, tied=stage == 0)
            listed = turn(stage_schedule(name, pp, len(groups), virtual, stage), rank, groups)
            one, everything = one_unit(listed, rank), rank.bytes_of(range(len(rank.buckets)))
            for budget in (one, one + 57, two_units(listed, rank), (one + everything) // 2, everything):
                least = least_bytes(listed, rank, budget)
                placed = place_gathers(listed, rank, budget, "step", by_row=True)
                assert least <= replay(placed, rank, budget) <= 1.05 * least
                each = place_gathers(listed, rank, budget, by_row=True)
                assert replay(each, rank, budget) <= 2 * len(groups) * everything


def test_hidden_states_of_all_micro_batches_live_between_two_units() -> None:
    """Five micro-batches, three units of which each keeps 7, and hidden states of 10."""
    rank, m, hidden = shape([[0], [1], [2]]), 5, 10
    (schedule,) = make_schedule("1f1b", 1, 1)
    order = VerticalOrder()
    listed = training_step(schedule, rank, StepOptions(vertical=order), groups=order.groups(m))
    sizes = StepBytes(hidden, ((UnitSizes(kept=7, forward=17, backward=20),) * 3,))
    found = list(samples(listed, Scope(rank, 1), sizes))

    def most(op: Op, unit: int) -> tuple[list[int], list[int]]:
        own = [
            sample for sample in found if sample.instruction.op == op and sample.instruction.units == (unit, unit + 1)
        ]
        return tuple(  # type: ignore[return-value]
            [sample.columns.get(column, 0) for sample in own]
            for column in (MemoryColumn.HIDDEN, MemoryColumn.ACTIVATIONS)
        )

    assert most(Op.FORWARD, 0) == ([0, 10, 20, 30, 40], [7, 14, 21, 28, 35])
    assert most(Op.FORWARD, 1) == ([50] * 5, [42, 49, 56, 63, 70])
    assert most(Op.FORWARD, 2) == ([50] * 5, [77] * 5), "what the head keeps is there for one micro-batch"
    assert most(Op.BACKWARD, 1) == ([50] * 5, [70, 63, 56, 49, 42])
    assert most(Op.BACKWARD, 0)[1] == [35, 28, 21, 14, 7]


def test_more_groups_leave_less_of_a_pipeline_idle() -> None:
    """One group: four stages one after the other. Twelve groups of one: 1F1B."""
    bubbles = []
    for most in (None, 4, 1):
        groups = VerticalOrder(most).groups(12)
        lists = [turn(own, without_state([3]), groups) for own in make_schedule("1f1b", 4, len(groups))]
        shapes = [without_state([3])] * 4
        bubbles.append(simulate(lists, uniform_times(4), shapes).bubble)
    whole = simulate(make_schedule("1f1b", 4, 12), uniform_times(4)).bubble
    assert bubbles[0] > 0.65 > bubbles[1] > 0.4 > bubbles[2] and bubbles[2] == pytest.approx(whole)


def test_an_evaluation_is_forwards_in_rows() -> None:
    groups = VerticalOrder().groups(2)
    schedule = forward_only(make_schedule("1f1b", 2, 1)[1])
    assert texts(turn(schedule, without_state([2]), groups)) == [
        "receive hidden states (micro-batch 0, chunk 0, from stage 0)",
        "receive hidden states (micro-batch 1, chunk 0, from stage 0)",
        "forward (micro-batch 0, chunk 0, unit 0)",
        "forward (micro-batch 1, chunk 0, unit 0)",
        "forward (micro-batch 0, chunk 0, unit 1)",
        "forward (micro-batch 1, chunk 0, unit 1)",
    ]


def hangs(name: str, chunks: int, most: int | None, rule: str) -> set[tuple[int, int]]:
    """The (stages, micro-batches) at which ranks stop for ever."""
    found = set()
    for pp in (2, 3, 4):
        for m in (1, 2, 4, 7, 12):
            groups, units = VerticalOrder(most).groups(m), without_state([2] * chunks)
            lists = [turn(own, units, groups) for own in make_schedule(name, pp, len(groups), chunks)]
            traces = [messages(stage, own) for stage, own in enumerate(lists)]
            assert not differences(traces)
            if deadlock(traces, rule):
                found.add((pp, m))
    return found


@pytest.mark.few(cases=3)
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_messages_end(name: str, chunks: int) -> None:
    """On streams always; in one hardware queue with one group, and not always with groups of three: a receive can lie
    behind the sends of a whole group.
    """
    for most in (None, 2, 3):
        assert not hangs(name, chunks, most, "streams")
    assert not hangs(name, chunks, None, ONE_QUEUE)
    assert (name, chunks) == ("gpipe", 1) or (2, 12) in hangs(name, chunks, 3, ONE_QUEUE)


def test_a_table_is_gathered_once_for_the_whole_row_of_the_head() -> None:
    """Backward does not read it, and it is as large as the budget: between the micro-batches it stays."""
    model = Model(pp=1, micro_batches=4, zero=3, vertical=VerticalOrder(), budget="one")
    step = checked(step_of(model))
    assert shape_of(model, 0).buckets[-1].parameter_bytes == 2 * HEAD != 2 * EMBEDDING
    gathers = Counter(i.buckets[0] for i in step.lists[0, 0] if i.op is Op.GATHER)
    assert gathers[len(step.shapes[0, 0].buckets) - 1] == 1
