"""Lanes that share the processors with the computation, in the simulation: times that are counted here by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megazero.config.tiers import Tier
from megazero.program.instruction import Lane
from megazero.program.scope import LATE, ON_TIME
from megazero.program.simulate import simulate, step_time
from megazero.program.simulated_rank import Processors
from megazero.program.times import ChunkTimes
from megazero.program.traffic import traffic
from tests.program.steps import Model, step_of

SIZES = (70, 90, 90, 90, 90, 50)
"""Bytes of the buckets of an embedding, four blocks and a head."""


def busy(beside: float, *spans: tuple[float, float]) -> Processors:
    found = Processors(beside)
    for span in spans:
        found.take(*span)
    return found


@pytest.mark.parametrize(
    ("beside", "start", "work", "end"),
    [
        (0.0, 2.0, 4.0, 14.0),  # nothing gets done until 10
        (0.0, 12.0, 4.0, 16.0),  # between the two
        (0.0, 12.0, 9.0, 31.0),  # 8 before the second, 1 behind it
        (0.0, 40.0, 4.0, 44.0),
        (0.5, 0.0, 4.0, 8.0),  # at half the speed
        (0.5, 0.0, 8.0, 13.0),  # 5 until 10, and 3 alone
        (0.25, 8.0, 12.0, 26.0),  # 0.5 until 10, 10 until 20, 1.5 in the next 6
        (1.0, 2.0, 4.0, 6.0),
    ],
)
def test_what_comes_later_takes_longer(beside: float, start: float, work: float, end: float) -> None:
    assert busy(beside, (0.0, 10.0), (20.0, 30.0)).end(start, work) == end


def test_times_that_meet_are_one() -> None:
    found = busy(0.0, (0.0, 4.0), (8.0, 10.0), (3.0, 8.0))
    assert found.end(1.0, 2.0) == 12.0
    found.forget(10.0)
    assert found.end(0.0, 2.0) == 2.0


@pytest.mark.parametrize("border", [ON_TIME, LATE], ids=["on time", "late"])
def test_on_shared_processors_a_step_takes_all_of_its_work(border: object) -> None:
    """Whatever could lie beside: a computation of 300, and for each byte of gradients a copy, an update and half a
    byte of parameters back. So late updates gain nothing. With processors of its own the step is shorter.
    """
    model = Model(pp=1, micro_batches=1, zero=0, dp=1, units=(4,), parts=(Tier.HOST,), leaving=1.0)
    step = step_of(replace(model, border=border))  # type: ignore[arg-type]
    per_byte = {Lane.TO_HOST: 0.25, Lane.HOST: 0.5, Lane.TO_DEVICE: 0.1}
    times = ChunkTimes((100.0,), (200.0,), per_byte=per_byte)
    lists, shapes = [step.lists[0, 0]], [step.shapes[0, 0]]
    apart = simulate(lists, times, shapes, border=step.border, steps=3)
    shared = simulate(lists, replace(times, beside=0.0), shapes, border=step.border, steps=3)
    moved = sum(shared_span.end - shared_span.start for shared_span in apart.messages[0]) / 3
    assert moved > 0.75 * sum(SIZES)
    assert shared.step == pytest.approx(300 + moved) and apart.step < shared.step - 50
    half = simulate(lists, replace(times, beside=0.5), shapes, border=step.border, steps=3)
    assert apart.step < half.step < shared.step


def test_processors_carry_what_a_disk_moves() -> None:
    """Disks that take no time of their own: a step is longer by the processors' work on what they read and write."""
    step = step_of(Model(pp=1, parts=(Tier.DISK,), border=LATE))
    lists, shapes = [step.lists[0, 0]], [step.shapes[0, 0]]
    times = ChunkTimes((100.0,), (200.0,), beside=0.0)
    computed = simulate(lists, times, shapes, border=step.border, steps=3).step
    carried = simulate(lists, replace(times, carrying=0.01), shapes, border=step.border, steps=3)
    moved = traffic(lists[0], shapes[0])
    nbytes = sum(moved[lane] for lane in (Lane.FROM_DISK, Lane.TO_DISK))
    assert nbytes > 0 and carried.step == pytest.approx(computed + 0.01 * nbytes)
    elsewhere = simulate(lists, replace(times, carrying=0.01, beside=1.0), shapes, border=step.border, steps=3)
    assert elsewhere.step < computed + 0.2 * 0.01 * nbytes, "beside the computation, but for the first read"


@pytest.mark.parametrize("model", [Model(), Model(zero=3), Model(pp=1, parts=(Tier.DISK,), border=LATE)])
def test_the_time_alone_is_that_of_the_report(model: Model) -> None:
    step = step_of(model)
    stages = sorted({stage for stage, _ in step.lists})
    lists, shapes = [step.lists[stage, 0] for stage in stages], [step.shapes[stage, 0] for stage in stages]
    count = len(stages)
    times = ChunkTimes((1.0,) * count, (2.0,) * count, per_byte={Lane.SHARDS: 0.01, Lane.TO_DISK: 0.1}, update=0.1)
    report = simulate(lists, times, shapes, border=step.border, steps=3)
    assert step_time(lists, times, shapes, step.border, 3) == report.step > 0
