"""The checker: planted faults of every kind are refused with the instruction named, and legal lists are not."""

from __future__ import annotations

import random

import pytest

from megazero.pipeline.schedule import make_schedule
from megazero.program.checker import check
from megazero.program.instruction import Op, ProgramError
from tests.program.faults import FAULTS, ZERO0, Fault, find
from tests.program.steps import check_schedule, checked, drawn, step_of

LEGAL = 2000
"""Layouts that are drawn at the greatest depth of testing; usually a twentieth of them."""


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_refused_and_its_instruction_named(fault: Fault) -> None:
    fault.assert_refused()


def test_tp_indexes_have_the_same_list() -> None:
    step = step_of(ZERO0)
    own = step.lists[1, 0]
    first = find(list(own), "forward", 0)
    backward = own[first]._replace(op=Op.BACKWARD)
    others = {
        "tp 1: number 0 of its list": (*own[1:2], *own[:1], *own[2:]),
        f"tp 1: its list ends at number {len(own) - 1}, where tp 0 has update": own[:-1],
        f"tp 1: number {first} of its list, backward": (*own[:first], backward, *own[first + 1 :]),
    }
    shapes = step.shapes | {(1, 1): step.shapes[1, 0]}
    check(step.lists | {(1, 1): tuple(own)}, shapes, step.micro_batches)
    for says, other in others.items():
        with pytest.raises(ProgramError, match=says):
            check(step.lists | {(1, 1): other}, shapes, step.micro_batches)


def test_a_model_chunk_has_one_stage() -> None:
    schedule = make_schedule("1f1b", 3, 2)
    with pytest.raises(ProgramError, match="no stage holds model chunk 1"):
        check_schedule([schedule[0], schedule[2]], 2)
    with pytest.raises(ProgramError, match="is for model chunk 0, which chunk 0 of stage 0 is"):
        check_schedule([schedule[0], schedule[0], schedule[2]], 2)


def test_every_micro_batch_is_computed() -> None:
    """A step of one micro-batch less is complete in itself."""
    with pytest.raises(ProgramError, match="stage 0: no forward of micro-batch 3, chunk 0"):
        check_schedule(make_schedule("1f1b", 2, 3), 4)


def no_false_alarm(source: random.Random, count: int) -> None:
    for _ in range(count):
        model = drawn(source)
        try:
            checked(step_of(model))
        except ProgramError as error:
            raise AssertionError(f"{model}: {error}") from error


@pytest.mark.slow
def test_legal_lists_are_not_refused(seed: int) -> None:
    no_false_alarm(random.Random(seed), LEGAL // 20)


@pytest.mark.exhaustive
def test_two_thousand_legal_lists_are_not_refused(seed: int) -> None:
    no_false_alarm(random.Random(seed + 1), LEGAL)
