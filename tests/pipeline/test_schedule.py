"""Every schedule over a grid of sizes: complete, without deadlock, with the bubble and the memory that theory gives."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from megazero.pipeline.schedule import CHUNKS, forward_only, is_breadth_first, make_schedule, stage_schedule
from megazero.program.instruction import Instruction, Op, ProgramError
from megazero.program.passes.kept_graphs import peak_activations
from megazero.program.simulate import simulate
from megazero.program.times import uniform_times
from tests.program.steps import check_schedule

WHOLE = [
    (name, p, m, v)
    for name, chunks in CHUNKS.items()
    for p, m, v in product(range(1, 9), range(1, 21), range(1, 5))
    if chunks is None
]
"""Schedules with backwards in one piece, by stages, micro-batches and chunks of a stage."""
SPLIT = [
    (name, p, m, chunks)
    for name, chunks in CHUNKS.items()
    for p, m in product(range(1, 13), range(1, 40))
    if chunks is not None
]
"""The others, of which tests/pipeline/test_zero_bubble.py has more."""


def sizes(seed: int, whole: int, split: int) -> list[tuple[str, int, int, int]]:
    return [*random.Random(seed).sample(WHOLE, whole), *random.Random(seed).sample(SPLIT, split)]


def check(name: str, p: int, m: int, v: int) -> None:
    schedule, times = make_schedule(name, p, m, v), uniform_times(p * v)
    evaluation = [forward_only(stage) for stage in schedule]
    for lists in (schedule, evaluation):
        check_schedule(lists, m)
    report, forward = simulate(schedule, times), simulate(evaluation, times)
    assert set(forward.peak_activations) == {1}
    if CHUNKS[name] is not None:
        if m >= p:  # nothing is shorter: the last stage has nothing to do for p - 1 forwards
            assert report.makespan == 3 * m * v + p - 1
        if name == "zb-v" and m >= 2 * p - 1:
            assert report.own_bubble == 0.0
        assert all(peak == min(m, p) * v for peak in report.peak_activations)
        return
    if m >= p or v == 1:
        assert report.bubble == pytest.approx((p - 1) / (m * v + p - 1), abs=1e-12)
        assert forward.makespan == m * v + p - 1
    else:  # each micro-batch passes every chunk, one after another: no order is faster
        assert report.makespan == pytest.approx(3.0 * (p * v + m - 1))
        assert forward.makespan == p * v + m - 1
    if name == "gpipe":
        assert report.peak_activations == (m * v,) * p
    elif v == 1:
        assert report.peak_activations == tuple(min(m, p - i) for i in range(p))
    else:
        group = -(-m // max(1, m // p))
        assert report.peak_activations == tuple(min(m * v, 2 * (p - 1 - i) + (v - 1) * group + 1) for i in range(p))


@pytest.mark.slow
def test_sampled_sizes(seed):
    for size in sizes(seed, 40, 30):
        check(*size)


@pytest.mark.exhaustive
def test_every_size():
    for size in [*WHOLE, *SPLIT]:
        check(*size)


@pytest.mark.slow
def test_the_order_in_which_stages_get_to_run_does_not_matter():
    source = random.Random(2)
    for name, p, m, v in sizes(1, 60, 20):
        times = uniform_times(p * v, source.random(), 1 + source.random(), source.random(), source.random())
        schedule = make_schedule(name, p, m, v)
        for lists in (schedule, [forward_only(stage) for stage in schedule]):
            assert simulate(lists, times, pick=source.choice) == simulate(lists, times)


def test_receives_are_posted_one_computation_ahead():
    for name, p, m, v in sizes(1, 60, 0):
        for stage in make_schedule(name, p, m, v):
            computes = [i for i in stage if i.is_compute]
            for receive in (i for i in stage if not i.is_compute and not i.is_send):
                use = Op.BACKWARD if receive.is_backward else Op.FORWARD
                keys = [(i.op, i.micro_batch, i.chunk) for i in computes]
                number = keys.index((use, receive.micro_batch, receive.chunk))
                before = sum(i.is_compute for i in stage[: stage.index(receive)])
                assert before == max(0, number - 1)


def test_two_stages_wrap_both_ways_on_channels_of_their_own():
    first, second = make_schedule("interleaved", 2, 4, 2)
    forwards = {(i.op, i.peer) for i in first if i.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)}
    assert forwards == {(Op.SEND_FORWARD, 1), (Op.RECV_FORWARD, 1)}
    sent = [(i.boundary, i.micro_batch) for i in second if i.op is Op.SEND_FORWARD]
    received = [(i.boundary, i.micro_batch) for i in first if i.op is Op.RECV_FORWARD]
    assert sent == received == [(1, 0), (1, 1), (1, 2), (1, 3)]


def test_which_schedules_are_breadth_first():
    assert is_breadth_first("gpipe", 2)
    assert not any(is_breadth_first(name, v) for name, v in (("gpipe", 1), ("1f1b", 2), ("interleaved", 2)))


def test_one_stage_alone_hands_over_without_messages():
    (only,) = make_schedule("interleaved", 1, 3, 4)
    assert all(i.is_compute for i in only)
    assert stage_schedule("1f1b", 4, 6, 1, 2) == make_schedule("1f1b", 4, 6)[2]
    assert make_schedule("interleaved", 4, 6, 1) == make_schedule("1f1b", 4, 6, 1)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="'1f2b' is none of gpipe, 1f1b, interleaved, zb-h1, zb-v"):
        make_schedule("1f2b", 2, 2)
    for arguments in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="is 0: there is no pipeline schedule with 0"):
            make_schedule("1f1b", *arguments)
    others: tuple[tuple[str, Any], ...] = (
        ("stages", ("2", 2)),
        ("micro_batches", (2, 2.0)),
        ("virtual_stages", (2, 2, True)),
    )
    for name, given in others:
        with pytest.raises(TypeError, match=f"^{name} is .*: a whole number from 1 on is needed"):
            make_schedule("1f1b", *given)


def test_times_that_are_none():
    for given, error in (
        ({"chunks": 0}, ValueError),
        ({"chunks": "2"}, TypeError),
        ({"forward": -1}, ValueError),
        ({"forward": float("nan")}, ValueError),
        ({"backward": float("inf")}, ValueError),
        ({"message": "1"}, TypeError),
        ({"weight": -1.0}, ValueError),
    ):
        with pytest.raises(error, match=f"^{next(iter(given))} is "):
            uniform_times(**{"chunks": 2} | given)


def test_longer_messages_and_uneven_chunks_cost_time():
    schedule = make_schedule("1f1b", 4, 8)
    times = uniform_times(4)
    base = simulate(schedule, times)
    assert simulate(schedule, replace(times, message=0.5)).makespan > base.makespan + 2.9
    # Stage 2 starts after 2 forwards, works 8 x (2 + 2), waits 1 for its first and 1 for its last gradient; 2 backwards
    # follow.
    slow = simulate(schedule, replace(times, forward=(1, 1, 2, 1)))
    assert slow.busy == (24, 24, 32, 24) and slow.makespan == 2 + 32 + 2 + 4
    assert slow.bubble == pytest.approx(1 - 104 / (4 * 40))
    assert peak_activations(schedule[1], weights=[2.5]) == 7.5


def test_a_message_travels_while_the_computation_before_its_use_runs():
    """Stage 1's receive for micro-batch 1 is open while it works on micro-batch 0: the long transfer costs nothing
    extra.
    """
    schedule = [forward_only(stage) for stage in make_schedule("gpipe", 2, 6)]
    assert simulate(schedule, uniform_times(2, forward=1.0, message=1.0)).makespan == 1 + 1 + 6


def swapped(stage: tuple[Instruction, ...], a: int, b: int) -> tuple[Instruction, ...]:
    changed = list(stage)
    changed[a], changed[b] = changed[b], changed[a]
    return tuple(changed)


def test_broken_schedules_are_found():
    good = make_schedule("1f1b", 2, 3)
    times = uniform_times(2)
    with pytest.raises(ProgramError, match=r"send gradients \(micro-batch 1.* which no instruction before it has made"):
        check_schedule([good[0], tuple(i for i in good[1] if (i.op, i.micro_batch) != (Op.BACKWARD, 1))], 3)
    with pytest.raises(ProgramError, match=r"send gradients \(micro-batch 2.* has ended"):
        check_schedule([good[0], good[1] + good[1][-1:]], 3)
    receives = [n for n, i in enumerate(good[1]) if i.op is Op.RECV_FORWARD]
    with pytest.raises(
        ProgramError, match="boundary 0 of micro-batch 0 is sent, boundary 0 of micro-batch 1 is received"
    ):
        simulate([good[0], swapped(good[1], *receives[:2])], times)
    with pytest.raises(ProgramError, match=r"send gradients \(micro-batch 2.*never met: .* have 3, 2 messages"):
        lost = next(n for n, i in enumerate(good[0]) if i.op is Op.RECV_BACKWARD and i.micro_batch == 2)
        simulate([tuple(i for n, i in enumerate(good[0]) if n < lost), good[1]], times)


def test_a_deadlock_names_the_blocked_instruction_of_every_stage():
    """The first stage wants a gradient before it has made what the last one wants before that."""
    first = sorted(make_schedule("1f1b", 2, 2)[0], key=lambda i: i.micro_batch)
    with pytest.raises(ProgramError) as error:
        check_schedule([first, make_schedule("gpipe", 2, 2)[1]], 2)
    text = str(error.value)
    assert "stage 0: backward (micro-batch 0, chunk 0)" in text and "its message from stage 1" in text
    assert "stage 1: forward (micro-batch 1, chunk 0)" in text and "its message from stage 0" in text
