"""ZB-H1 and ZB-V: the bubble of theory and of the published profiles, and the order of the parts of a backward. That
they are complete and end within their memory, tests/pipeline/test_schedule.py shows.
"""

from __future__ import annotations

import csv
import random
from dataclasses import replace

import pytest

from megazero.pipeline.schedule import CHUNKS, make_schedule, stage_schedule
from megazero.program.instruction import Instruction, Op, ProgramError
from megazero.program.passes.kept_graphs import peak_activations
from megazero.program.simulate import SimulationReport, simulate
from megazero.program.times import profiled_times, uniform_times
from tests.pipeline.test_schedule import SPLIT
from tests.program.steps import check_schedule
from tests.reference import REFERENCE, needs_reference


def run(name: str, p: int, m: int, *profile: float) -> SimulationReport:
    """A simulation with a whole stage's (forward, backward of inputs, of weights, message)."""
    v = CHUNKS[name] or 1
    return simulate(make_schedule(name, p, m, v), profiled_times(p, v, *profile))


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 8), (8, 24), (5, 40)])
def test_zb_h1_idles_for_as_long_as_its_authors_say(p: int, m: int):
    """(p - 1)(F + B - W) of the 1F1B's (p - 1)(F + B + W), as long as W is not longer than F and B."""
    for f, b, w in ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (2.0, 2.0, 1.0), (1.0, 2.0, 1.0)):
        idle = {name: run(name, p, m, f, b, w, 0.0).makespan - m * (f + b + w) for name in ("1f1b", "zb-h1")}
        assert idle == {"1f1b": pytest.approx((p - 1) * (f + b + w)), "zb-h1": pytest.approx((p - 1) * (f + b - w))}


def published() -> list[dict[str, str]]:
    assert REFERENCE is not None
    lines = (REFERENCE / "zero_bubble.csv").read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@pytest.mark.slow
@needs_reference
def test_bubbles_at_the_published_profiles():
    """1F1B's is the published one; the others are below it, in the memory of 1F1B's first stage: p whole stages'
    activations.
    """
    for row in published():
        p, m = int(row["stages"]), int(row["micro_batches"])
        profile = [float(row[f"t_{name}_ms"]) for name in ("forward", "backward_input", "backward_weight", "comm")]
        reports = {name: run(name, p, m, *profile) for name in ("1f1b", "zb-h1", "zb-v")}
        assert reports["1f1b"].bubble == pytest.approx(float(row["bubble_1f1b"]), abs=2e-4)
        assert reports["1f1b"].own_bubble == pytest.approx(reports["1f1b"].bubble, abs=1e-12)
        assert reports["1f1b"].bubble > reports["zb-h1"].bubble + 0.08
        assert reports["zb-h1"].bubble > reports["zb-v"].bubble + 0.06
        assert reports["zb-v"].own_bubble <= reports["zb-v"].bubble
        assert max(reports["1f1b"].peak_activations) == max(reports["zb-h1"].peak_activations) == p
        assert max(reports["zb-v"].peak_activations) == 2 * p, "chunks of half a stage"


@pytest.mark.slow
def test_the_same_order_of_bubbles_at_any_likely_profile():
    source = random.Random(5)
    for _ in range(20):
        p = source.choice((4, 8))
        m, profile = (
            p * source.choice((1, 2, 3, 4)),
            (1.0, source.uniform(0.8, 2.2), source.uniform(0.3, 1.2), source.uniform(0, 0.15)),
        )
        bubbles = [run(name, p, m, *profile).bubble for name in ("1f1b", "zb-h1", "zb-v")]
        assert bubbles == sorted(bubbles, reverse=True), (p, m, profile)


@pytest.mark.slow
def test_uneven_chunks_and_long_messages_are_no_deadlock():
    source = random.Random(3)
    for name, p, m, v in source.sample(SPLIT, 30):
        count = p * v
        forward = tuple(source.uniform(0.1, 3) for _ in range(count))
        times = replace(
            uniform_times(count, message=source.uniform(0, 5)),
            forward=forward,
            weight=tuple(source.uniform(0, 2) for _ in forward),
        )
        assert simulate(make_schedule(name, p, m, v), times).makespan > 0


def test_the_middle_of_the_v_hands_over_on_its_stage():
    schedule = make_schedule("zb-v", 3, 4, 2)
    first = [[i.model_chunk for i in stage if i.op is Op.FORWARD and i.micro_batch == 0] for stage in schedule]
    assert first == [[0, 5], [1, 4], [2, 3]]
    for stage, instructions in enumerate(schedule):
        peers = {(i.op, i.chunk, i.peer) for i in instructions if not i.is_compute}
        sends, receives = (Op.SEND_FORWARD, Op.RECV_BACKWARD), (Op.RECV_FORWARD, Op.SEND_BACKWARD)
        ways = [(op, chunk, stage + 1) for chunk, ops in ((0, sends), (1, receives)) for op in ops if stage < 2]
        ways += [(op, chunk, stage - 1) for chunk, ops in ((0, receives), (1, sends)) for op in ops if stage > 0]
        assert peers == {*ways}
    (alone,) = make_schedule("zb-v", 1, 3, 2)
    assert all(i.is_compute for i in alone)
    assert stage_schedule("zb-v", 4, 6, 2, 2) == make_schedule("zb-v", 4, 6, 2)[2]


def test_the_weights_come_in_the_order_of_their_inputs():
    for size in random.Random(4).sample(SPLIT, 20):
        for stage in make_schedule(*size):
            inputs, weights = ([i for i in stage if i.op is op] for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
            assert [(i.micro_batch, i.chunk) for i in inputs] == [(i.micro_batch, i.chunk) for i in weights]
            assert weights[-1].chunk == 0, "a weight that both chunks of a stage use is complete with chunk 0"


def test_what_cannot_be_is_refused_and_what_is_broken_is_found():
    for name, wrong in (("zb-h1", 2), ("zb-v", 1), ("zb-v", 3)):
        with pytest.raises(ValueError, match=f"{name} has {CHUNKS[name]} chunks per stage, not {wrong}"):
            make_schedule(name, 2, 2, wrong)
    first, second = make_schedule("zb-h1", 2, 3)
    lost = tuple(i for i in second if (i.op, i.micro_batch) != (Op.BACKWARD_WEIGHT, 1))
    with pytest.raises(ProgramError, match=r"backward of the input \(micro-batch 1.* makes what the weights'"):
        check_schedule([first, lost], 3)
    early = sorted(second, key=lambda i: i.op is not Op.BACKWARD_WEIGHT)
    with pytest.raises(ProgramError, match=r"reads what the weights' backward needs .* which no instruction before it"):
        simulate([first, tuple(early)], uniform_times(2))
    with pytest.raises(ProgramError, match="is for model chunk 0, which chunk 0 of stage 0 is"):
        check_schedule([first, tuple(i._replace(model_chunk=0) for i in second)], 3)


def test_what_lives_on_between_the_parts_can_weigh_less():
    order = [Instruction(op, n, 0) for n in range(2) for op in (Op.FORWARD, Op.BACKWARD_INPUT)]
    order += [Instruction(Op.BACKWARD_WEIGHT, n, 0) for n in range(2)]
    assert peak_activations(order) == 2 and peak_activations(order, [4.0], [1.0]) == 5.0
