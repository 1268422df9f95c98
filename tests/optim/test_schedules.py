"""Learning rate and batch ramp: BLOOM's own log, formulas written a second time, and the path against
plain counting.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.config.batch_schedule import BatchSchedule
from megazero.config.parse import parse_run
from megazero.config.schema import ScheduleConfig
from megazero.optim.lr_schedule import LearningRate
from megazero.optim.step_plan import StepPlan
from tests.lengths import iterations, samples, share

if TYPE_CHECKING:
    from _typeshed import TraceFunction


def bloom() -> ScheduleConfig:
    return parse_run(["--preset", "bloom-176b"], None).schedule


def test_lines_of_the_bloom_log() -> None:
    progress = StepPlan(bloom())
    for iteration, seen, rate in ((12_695, 9_841_584, "5.969E-05"), (31_214, 47_768_496, "5.279E-05")):
        step = progress.step(iteration)
        assert (step.consumed_samples, f"{step.lr:.3E}") == (seen, rate)


@pytest.mark.slow
def test_bloom_by_counting() -> None:
    """Every iteration until the rate is lowest, with the formulas as they were published."""
    progress, consumed = StepPlan(bloom()), 0
    for iteration, step in enumerate(progress.steps(), 1):
        batch = 2048 if consumed > 9_765_625 else 192 + int(consumed / (9_765_625 / 116)) * 16
        if consumed <= 183_105:
            rate = 6e-5 * consumed / 183_105
        elif consumed > 200_000_000:
            rate = 6e-6
        else:
            rate = 6e-6 + 5.4e-5 * (1 + math.cos(math.pi * (consumed - 183_105) / (200_000_000 - 183_105))) / 2
        assert (step.iteration, step.consumed_before, step.global_batch_size) == (iteration, consumed, batch)
        assert math.isclose(step.lr, rate, rel_tol=1e-12)
        consumed += batch
        if iteration % 997 == 0:
            assert progress.step(iteration) == step
        assert step.consumed_samples == consumed
    assert iteration == progress.total_iterations and consumed <= 220_000_000 < consumed + 2048


def test_the_first_step_of_a_warm_up_has_rate_zero() -> None:
    assert StepPlan(bloom()).step(1).lr == 0.0
    assert StepPlan(ScheduleConfig(train_length=iterations(9), lr_warmup=iterations(3))).step(1).lr == 0.0
    assert StepPlan(ScheduleConfig(train_length=iterations(9), lr=0.5)).step(1).lr == 0.5


RAMPS = [
    *((192, 16, 9_765_625, 2048), (192, 32, 9_765_625, 256), (8, 8, 100, 32), (1, 1, 7, 64), (4, 4, 10**6, 40)),
    *((16, 16, 3, 48), (24, 8, 50, 24)),
]


@pytest.mark.parametrize("ramp", RAMPS)
def test_the_path_of_a_ramp_is_that_of_counting(ramp: tuple[int, int, int, int]) -> None:
    start, increment, samples, full = ramp
    schedule = BatchSchedule(ScheduleConfig(global_batch_size=full, rampup_batch_size=(start, increment, samples)))
    consumed, iteration, sizes = 0, 0, []
    while consumed <= samples + 3 * full and iteration < 3 * 10**5:
        assert schedule.consumed_after(iteration) == consumed
        if iteration % 7 == 0:
            assert schedule.iterations_within(consumed) == iteration
            assert schedule.iterations_within(consumed + schedule.size(consumed) - 1) == iteration
        size = schedule.size(consumed)
        sizes.append(size)
        consumed, iteration = consumed + size, iteration + 1
    assert sizes == sorted(sizes) and sizes[0] == start and sizes[-1] == full
    assert all((size - start) % increment == 0 for size in sizes)
    assert [phase.size for phase in schedule.phases] == sorted(set(sizes))


def test_a_ramp_that_does_not_arrive_is_an_error() -> None:
    for ramp in ((40, 8, 10), (8, 5, 10), (8, 0, 10)):
        with pytest.raises(ValueError, match="no number of increments"):
            BatchSchedule(ScheduleConfig(global_batch_size=32, rampup_batch_size=ramp))


def rates(**settings: object) -> list[float]:
    config = ScheduleConfig(global_batch_size=4, micro_batch_size=1, lr=1.0, min_lr=0.1, **settings)  # type: ignore[arg-type]
    return [step.lr for step in StepPlan(config).steps()]


def test_shapes() -> None:
    assert rates(train_length=iterations(4), lr_decay_style="constant", lr_warmup=iterations(2)) == [0.0, 0.5, 1.0, 1.0]
    assert rates(train_length=iterations(5), lr_decay_style="linear", lr_decay=iterations(3)) == pytest.approx(
        [1.0, 0.7, 0.4, 0.1, 0.1]
    )
    assert rates(
        train_length=iterations(5), lr_decay_style="linear", lr_warmup=iterations(2), lr_decay=iterations(4)
    ) == pytest.approx([0.0, 0.5, 1.0, 0.55, 0.1])
    assert rates(train_length=iterations(5), lr_decay_style="cosine", lr_decay=iterations(4)) == pytest.approx(
        [1.0, 0.1 + 0.45 * (1 + math.cos(math.pi / 4)), 0.55, 0.1 + 0.45 * (1 + math.cos(3 * math.pi / 4)), 0.1]
    )
    assert rates(
        train_length=iterations(7), lr_decay_style="inverse-square-root", lr_warmup=iterations(2)
    ) == pytest.approx([0.0, 0.5, 1.0, math.sqrt(2 / 3), math.sqrt(2 / 4), math.sqrt(2 / 5), math.sqrt(2 / 6)])
    assert rates(
        train_length=iterations(6),
        lr_decay_style="wsd",
        lr_warmup=iterations(1),
        lr_decay=iterations(5),
        lr_wsd_decay=iterations(2),
    ) == pytest.approx([0.0, 1.0, 1.0, 1.0, 0.55, 0.1])
    assert rates(train_length=iterations(20), lr_decay_style="wsd")[17:] == pytest.approx([1.0, 1.0, 0.55])
    assert rates(train_length=iterations(10), lr_warmup=share(0.2), lr_decay_style="constant")[:3] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("style", ["linear", "cosine", "inverse-square-root", "wsd"])
def test_samples_and_iterations_agree_where_the_batch_is_constant(style: str) -> None:
    by_iterations = rates(
        train_length=iterations(30), lr_decay_style=style, lr_warmup=iterations(5), lr_decay=iterations(25)
    )
    by_samples = rates(train_length=samples(120), lr_decay_style=style, lr_warmup=samples(20), lr_decay=samples(100))
    mixed = rates(train_length=iterations(30), lr_decay_style=style, lr_warmup=iterations(5), lr_decay=samples(100))
    assert by_iterations == pytest.approx(by_samples, rel=1e-12)
    assert mixed == by_samples


def test_mixed_units_follow_the_ramp() -> None:
    """Warm-up in iterations under a decay in samples lasts as many samples as those iterations consume."""
    settings: dict[str, Any] = {
        "lr": 1.0,
        "lr_warmup": iterations(3),
        "lr_decay": samples(100),
        "lr_decay_style": "linear",
    }
    config = ScheduleConfig(global_batch_size=8, rampup_batch_size=(2, 2, 12), train_length=iterations(20), **settings)
    steps = list(StepPlan(config).steps())
    consumed = steps[3].consumed_before
    assert [step.lr for step in steps[:4]] == [step.consumed_before / consumed for step in steps[:4]]


def test_train_samples_are_whole_batches() -> None:
    progress = StepPlan(ScheduleConfig(global_batch_size=24, train_length=samples(100)))
    assert len(list(progress.steps())) == progress.total_iterations == 4
    assert not progress.finished(3, 72) and progress.finished(4, 96)


def test_a_resume_continues_the_path_and_may_leave_it() -> None:
    progress = StepPlan(bloom())
    everything = [progress.step(i) for i in range(12_000, 12_010)]
    resumed = progress.steps(11_999, everything[0].consumed_before)
    assert [next(resumed) for _ in range(10)] == everything
    off = progress.after(12_000, 5_000_000)
    assert (off.iteration, off.global_batch_size, off.consumed_samples) == (12_001, 1136, 5_001_136)


def lines_run(act: Callable[[], object]) -> int:
    """How many lines of Python a call runs."""
    count = 0

    def seen(frame: FrameType, event: str, argument: object) -> TraceFunction:
        nonlocal count
        count += event == "line"
        return seen

    sys.settrace(seen)
    try:
        act()
    finally:
        sys.settrace(None)
    return count


def test_any_iteration_is_found_at_once() -> None:
    """Not by going through all before it."""
    plan = StepPlan(bloom())
    assert 0 < lines_run(partial(plan.step, 114_999)) < 10_000
    assert 0 < max(lines_run(partial(plan.step, iteration)) for iteration in range(1, 115_000, 5_000)) < 1_000


def test_a_decay_needs_a_length() -> None:
    with pytest.raises(ValueError, match="--lr-decay-style cosine needs"):
        LearningRate(ScheduleConfig())
    with pytest.raises(ValueError, match="--lr-warmup 10% is a share"):
        LearningRate(ScheduleConfig(lr_decay_style="constant", lr_warmup=share(0.1)))
    assert LearningRate(ScheduleConfig(lr_decay_style="constant")).at(10**6, 10**9) == 1e-3


@given(
    full=st.sampled_from([4, 8, 12]),
    ramp=st.none() | st.integers(1, 60),
    length=st.tuples(st.booleans(), st.integers(1, 300)),
    done=st.tuples(st.integers(0, 320), st.integers(0, 320)),
)
def test_samples_at_the_end_are_those_of_the_last_step(
    full: int, ramp: int | None, length: tuple[bool, int], done: tuple[int, int]
) -> None:
    """From any state, on the run's own path or off it, before its end or beyond."""
    by_samples, number = length
    run_length = samples(number) if by_samples else iterations(number)
    rampup = (4, 4, ramp) if ramp is not None and full > 4 else None
    config = ScheduleConfig(global_batch_size=full, rampup_batch_size=rampup, lr=1e-3, train_length=run_length)
    progress = StepPlan(config)
    consumed = [done[1], *(step.consumed_samples for step in progress.steps(*done))]
    assert progress.consumed_at_end(*done) == consumed[-1]
