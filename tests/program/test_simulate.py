"""Times of the lanes of a whole step, by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megazero.pipeline.schedule import make_schedule
from megazero.plan.traffic import state_traffic
from megazero.program.instruction import Instruction, Lane, Op, ProgramError
from megazero.program.shape import BucketShape, RankShape, UnitShape
from megazero.program.simulate import SimulationReport, simulate
from megazero.program.step import StepOptions, training_step
from megazero.program.times import ChunkTimes, uniform_times
from megazero.program.traffic import traffic
from tests.program import kinds
from tests.program.steps import Model, drawn, step_of

TIMES = replace(uniform_times(1, 2.0, 4.0), per_byte={Lane.SHARDS: 0.01, Lane.ACROSS: 0.01})
"""Of a chunk of two units: a forward of a unit takes 1, a backward 2, a byte on the lanes of state 0.01."""


def two_units(zero: int, *, across: int = 1) -> RankShape:
    """One chunk of two units with a bucket each: 100 bytes of parameters, 200 of gradients, 2 shards."""
    bucket = BucketShape(0, 100, 200, True, zero == 3, zero >= 2, zero >= 1, 2, across)
    return RankShape(((UnitShape((0,), (0,), (0,)), UnitShape((1,), (1,), (1,))),), (bucket, bucket))


def run(zero: int, times: ChunkTimes = TIMES, gathered_bytes: int | None = None) -> SimulationReport:
    shape = two_units(zero)
    listed = training_step(make_schedule("1f1b", 1, 1)[0], shape, StepOptions(zero >= 2, gathered_bytes=gathered_bytes))
    return simulate([listed], times, [shape])


def ends(report: SimulationReport, op: Op) -> list[float]:
    return [round(span.end, 9) for span in report.messages[0] if span.instruction.op == op]


def test_reductions_travel_while_backward_goes_on():
    """The last unit's backward ends at 4, its all-reduce takes 2 x 200 bytes; the other unit's ends at 6, 2 later."""
    report = run(0)
    assert ends(report, Op.REDUCE) == [8.0, 12.0] and report.makespan == 6.0
    assert ends(run(1), Op.REDUCE) == [6.0, 8.0], "a reduce-scatter sends each byte once"


def test_parameters_travel_while_the_next_bucket_is_updated():
    """The norm is known at 8. Updates take 1 each; the gathers follow them, one after the other."""
    report = run(1, replace(TIMES, update=0.01))
    updates = [(span.start, span.end) for span in report.spans[0] if span.instruction.op == kinds.UPDATE]
    assert updates == [(8.0, 9.0), (9.0, 10.0)] and ends(report, Op.GATHER) == [10.0, 11.0]


def test_a_gather_ahead_costs_no_time_and_one_in_time_does():
    """Gathers of 1 each: with a budget of both units only the first one is waited for; with one unit each of them."""
    ahead, in_time = run(3, gathered_bytes=200), run(3, gathered_bytes=100)
    computed = [[span.start for span in report.spans[0] if span.instruction.is_compute] for report in (ahead, in_time)]
    assert computed[0] == [1.0, 2.0, 3.0, 5.0]
    assert computed[1][:2] == [1.0, 3.0] and in_time.makespan > ahead.makespan


def test_a_third_reduction_with_a_buffer_of_its_own_waits_for_the_first():
    slow = replace(TIMES, per_byte={Lane.SHARDS: 1.0})
    unit = UnitShape((0,), (0,), (0,))
    bucket = BucketShape(0, 100, 200, sharded_gradient=True, sharded_state=True, shards=2)
    shape = RankShape(((unit,),), (bucket,))
    listed = training_step(make_schedule("1f1b", 1, 4)[0], shape, StepOptions(reduce_every=True))
    report = simulate([listed], slow, [shape])
    starts = [span.start for span in report.spans[0] if span.instruction.op is Op.BACKWARD]
    assert starts == [2.0, 8.0, 14.0, 208.0], "the first reduction ends at 206; the fourth forward follows"


def test_bytes_are_those_of_the_formulas():
    """P = 100 parameter bytes a bucket, g = 2 P: DESIGN's 2gP, (g + p)P, (m g + p)P, (m g + 2 m p)P, with m = 3."""
    for zero, expected in ((0, 800), (1, 600), (2, 3 * 400 + 200), (3, 3 * 400 + 2 * 3 * 200)):
        shape = two_units(zero)
        options = StepOptions(reduce_every=zero >= 2, gathered_bytes=100)
        listed = training_step(make_schedule("1f1b", 1, 3)[0], shape, options)
        sent = traffic(listed, shape)
        # With a budget of one unit, the last unit stays gathered from its forward to its backward.
        assert sent[Lane.SHARDS] == expected - (3 * 100 + 2 * 100) * (zero == 3), (zero, sent)


@pytest.mark.parametrize("zero", range(3))
@pytest.mark.parametrize("across", [1, 3])
def test_bytes_are_those_of_the_planner(zero: int, across: int):
    """The planner's formulas, for 100 elements of 2 bytes with gradients of 4, 3 micro-batches."""
    shape = two_units(zero, across=across)
    listed = training_step(make_schedule("1f1b", 1, 3)[0], shape, StepOptions(reduce_every=zero >= 2))
    wanted = state_traffic(zero, 2, across, micro_batches=3, reductions=3, gradient_bytes=4.0, parameter_bytes=2.0)
    sent = traffic(listed, shape)
    assert (sent[Lane.SHARDS], sent.get(Lane.ACROSS, 0)) == (wanted.inside * 100, wanted.across * 100)


@pytest.mark.slow
def test_the_order_in_which_ranks_get_to_run_does_not_matter(seed: int):
    source = random.Random(seed)
    for _ in range(25):
        model = drawn(source)
        step = step_of(model)
        lists = [step.lists[stage, 0] for stage in range(model.pp)]
        shapes = [step.shapes[stage, 0] for stage in range(model.pp)]
        times = replace(
            uniform_times(model.pp * model.virtual, source.random(), source.random(), source.random()),
            per_byte=dict.fromkeys((Lane.SHARDS, Lane.ACROSS), source.random() / 100),
            update=source.random() / 100,
        )
        found = simulate(lists, times, shapes, border=step.border, pick=source.choice)
        assert found == simulate(lists, times, shapes, border=step.border), model


def test_ranks_of_a_tied_embedding_wait_for_each_other():
    """Both stages reduce the tied bucket only when the first one, which is the last to end, has come to it."""
    model = Model(zero=1, tied=True)
    step = step_of(model)
    report = simulate([step.lists[stage, 0] for stage in (0, 1)], uniform_times(2), [step.shapes[s, 0] for s in (0, 1)])
    tied = [
        next(span for span in report.messages[stage] if span.instruction == Instruction(Op.REDUCE, buckets=(number,)))
        for stage, number in ((0, 0), (1, 3))
    ]
    assert tied[0].start == tied[1].start == max(span.end for row in report.spans for span in row)


def test_messages_of_a_tied_embedding_in_another_order_are_found():
    """A second tied bucket on each stage: the last stage reduces the two in another order."""
    unit = UnitShape((0, 1), (0, 1), (0, 1))
    bucket = BucketShape(0, 100, 200, sharded_state=True, shards=4, spans_stages=True, shards_span=True)
    shape = RankShape(((unit,),), (bucket, bucket))
    lists = [training_step(stage, shape, StepOptions()) for stage in make_schedule("1f1b", 2, 1)]
    simulate(lists, uniform_times(2), [shape, shape])
    other = list(lists[1])
    first, second = (n for n, i in enumerate(other) if i.op is Op.REDUCE)
    other[first], other[second] = other[second], other[first]
    with pytest.raises(ProgramError, match=r"the ranks of a group have different orders") as error:
        simulate([lists[0], other], uniform_times(2), [shape, shape])
    assert error.value.instruction is not None and error.value.instruction.op is Op.REDUCE


def test_without_overlap_a_rank_waits_for_each_of_its_messages():
    """As in `test_reductions_travel_while_backward_goes_on`, but the first all-reduce ends before the other unit's
    backward begins: that one takes 2 behind 8.
    """
    report = run(0, replace(TIMES, waits=True))
    assert ends(report, Op.REDUCE) == [8.0, 14.0] and report.makespan == 10.0
    assert report.ends == (14.0,), "the step ends with its last message"
    staged = replace(uniform_times(2, 1.0, 2.0, 0.5), per_byte={Lane.SHARDS: 0.01})
    shapes = [two_stages(stage) for stage in range(2)]
    lists = [
        training_step(each, shape, StepOptions(False))
        for each, shape in zip(make_schedule("1f1b", 2, 4), shapes, strict=True)
    ]
    waiting, free = (simulate(lists, replace(staged, waits=waits), shapes).step for waits in (True, False))
    assert waiting > free


def two_stages(stage: int) -> RankShape:
    """A chunk of one unit with a bucket of 200 bytes of gradients, which two ranks hold."""
    bucket = BucketShape(0, 100, 200, True, False, False, False, 2, 1)
    return RankShape(((UnitShape((0,), (0,), (0,)),),), (bucket,))


def test_stages_that_share_processors_compute_in_turn() -> None:
    """Forwards of 2 and backwards of 4 while both stages compute. One alone takes half of that, and the other waits."""
    lists = make_schedule("1f1b", 2, 2)
    apart, shared = (simulate(lists, replace(uniform_times(2, 2.0, 4.0), at_once=most)) for most in (None, 1))
    assert apart.makespan == 18.0
    # four forwards of 1 and four backwards of 2: the processors are never idle
    assert shared.makespan == 12.0
    four = make_schedule("1f1b", 4, 4)
    two_at_once = simulate(four, replace(uniform_times(4, 2.0, 4.0), at_once=2))
    everybody = simulate(four, uniform_times(4, 1.0, 2.0)).makespan
    work = 4 * 4 * 3 / 2
    assert max(everybody, work) <= two_at_once.makespan <= everybody + work / 2
