"""Updates in host memory in lists: where they stand, what the checker refuses, and what runs beside what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megazero.config.tiers import Tier
from megazero.program.instruction import Instruction, Kind, Lane, Op, ProgramError
from megazero.program.scope import LATE, SETTLING
from megazero.program.simulate import simulate
from megazero.program.times import ChunkTimes
from tests.program import kinds
from tests.program.faults import Fault, again, all_words_of, alter, drop, move
from tests.program.made import lettered
from tests.program.steps import Model, changed, checked, step_of

BOTH = Tier.DEVICE, Tier.DISK
ONE_RANK = Model(pp=1, micro_batches=2, parts=BOTH)
"""Embedding, two blocks and a head, a bucket each: 0 to 3. Of each the first part is on the device."""
ZERO3 = Model(zero=3, parts=(Tier.HOST, Tier.HOST))
COPY, READ, UPDATE, ON_DEVICE = all_words_of(kinds.COPY_GRADIENT, kinds.READ_STATE, kinds.UPDATE_HOST, kinds.UPDATE)
BACK, WRITE, GATHER = all_words_of(kinds.COPY_PARAMETERS, kinds.WRITE_STATE, Op.GATHER)
LETTERS: dict[Kind, str] = {
    kinds.COPY_GRADIENT: "c",
    kinds.READ_STATE: "r",
    kinds.UPDATE_HOST: "h",
    kinds.COPY_PARAMETERS: "b",
}
LETTERS |= {kinds.WRITE_STATE: "w", kinds.UPDATE: "u", Op.GATHER: "g", Op.NORM: "norm", Op.FORWARD: "f"}


def words(instructions: tuple[Instruction, ...]) -> str:
    """Updates, moves, gathers and the first forward of each unit: what is done to which bucket, and its part."""
    return lettered([i for i in instructions if i.micro_batch <= 0], LETTERS)


PLACES = {
    "on time": (
        replace(ONE_RANK, zero=0, merged=True),
        "f0 f1 f2 f3 norm r0.1 c0.1 h0.1 b0.1 w0.1 r1.1 c1.1 h1.1 b1.1 w1.1 r2.1 c2.1 h2.1 b2.1 w2.1 u0.0 u1.0 u2.0",
    ),
    "gathers come last": (
        replace(ONE_RANK, zero=1, overlap=False, parts=(Tier.HOST,), merged=True),
        "f norm c0.0 h0.0 b0.0 c1.0 h1.0 b1.0 c2.0 h2.0 b2.0 g0 g1 g2",
    ),
    "late, before all else": (
        replace(ONE_RANK, zero=1, border=LATE, parts=(Tier.DEVICE, Tier.HOST), merged=True),
        "c0.1 h0.1 b0.1 c1.1 h1.1 b1.1 c2.1 h2.1 b2.1 u0.0 u1.0 g0 g1 f0 f1 u2.0 g2 f2 f3 norm",
    ),
    "ZeRO-3": (
        replace(ONE_RANK, zero=3, border=SETTLING, parts=(Tier.HOST, Tier.DEVICE)),
        "c0.0 h0.0 b0.0 c1.0 h1.0 b1.0 c2.0 h2.0 b2.0 c3.0 h3.0 b3.0 u0.1 u1.1 u2.1 u3.1",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_where_they_stand(name: str) -> None:
    model, expected = PLACES[name]
    assert words(checked(step_of(model)).lists[0, 0]) == expected


FAULTS = {
    "a gradient is copied before the norm": Fault(
        ONE_RANK, move(COPY(1, 1), "norm"), "norm", "the reduced gradient of part 1 of bucket 1"
    ),
    "an update before its gradient is there": Fault(
        ONE_RANK, move(UPDATE(1, 1), COPY(1, 1)), UPDATE(1, 1), "the gradient in host memory"
    ),
    "an update before its state is there": Fault(
        ONE_RANK, move(UPDATE(1, 1), READ(1, 1)), UPDATE(1, 1), "in host memory of part 1"
    ),
    "a state is read twice": Fault(ONE_RANK, again(READ(2, 1)), READ(2, 1), "the optimizer state", 1),
    "a state is not written": Fault(ONE_RANK, drop(WRITE(2, 1)), UPDATE(2, 1), "the optimizer state in host memory"),
    "a state is written before its update": Fault(
        ONE_RANK, move(WRITE(2, 1), UPDATE(2, 1)), WRITE(2, 1), "legal where they are in use in host memory"
    ),
    "parameters are not copied": Fault(
        ONE_RANK, drop(BACK(3, 1)), GATHER(3), "reads the stored parameters of part 1 of bucket 3"
    ),
    "a part is not updated": Fault(
        replace(ONE_RANK, zero=0), drop(ON_DEVICE(3, 0)), "reduce gradients (bucket 3", "the reduced gradient of part 0"
    ),
    "a part is updated twice": Fault(
        ONE_RANK, again(ON_DEVICE(3, 0)), ON_DEVICE(3, 0), "the reduced gradient of part 0", 1
    ),
    "another part's parameters": Fault(
        ZERO3, alter(BACK(1, 1), part=0), BACK(1, 0), "the updated parameters in host memory", 1
    ),
    "a gather before the parameters are there": Fault(
        replace(ONE_RANK, parts=(Tier.HOST,)), move(GATHER(1), BACK(1, 0)), GATHER(1), "of part 0"
    ),
    "a late forward before the parameters are there": Fault(
        replace(ONE_RANK, zero=0, parts=(Tier.HOST,), border=LATE),
        move("forward (micro-batch 0", BACK(0, 0)),
        "forward (micro-batch 0",
        "the whole parameters of part 0 of bucket 0",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_refused_and_its_instruction_named(fault: Fault) -> None:
    fault.assert_refused()


def test_lanes_run_beside_each_other_and_beside_the_next_forward() -> None:
    """Three parts of 90 bytes: each is read (3), updated (5) and written (3) while the next one is on its way."""
    model = Model(pp=1, micro_batches=1, zero=0, dp=1, units=(1,), parts=(Tier.DISK,), border=LATE)
    step = step_of(model)
    per_byte = {Lane.FROM_DISK: 1.0, Lane.HOST: 5.0, Lane.TO_DISK: 1.0}
    times = ChunkTimes((100.0,), (200.0,), per_byte=per_byte)
    report = simulate([step.lists[0, 0]], times, [step.shapes[0, 0]], border=LATE)
    spans = {str(span.instruction): (span.start, span.end) for span in report.messages[0]}
    sizes = (70, 90, 50)
    read = [sum(3 * size for size in sizes[: at + 1]) for at in range(3)]
    updated, ends = 0.0, list[float]()
    for bucket, size in enumerate(sizes):
        assert spans[f"read optimizer states (bucket {bucket}, part 0)"][1] == read[bucket]
        start = max(updated, read[bucket])
        updated = start + 5 * size
        assert spans[f"update in host memory (bucket {bucket}, part 0)"] == (start, updated)
        ends.append(updated)
    assert [span.start for span in report.spans[0][:3]] == ends, "each unit waits for its own update"
    assert report.spans[0][2].end == updated + 100 / 3


def test_a_part_that_no_bucket_has() -> None:
    step = step_of(ONE_RANK)
    own = step.lists[0, 0]
    for op in (kinds.UPDATE, kinds.READ_STATE):
        at = next(number for number, i in enumerate(own) if i.op == op)
        with pytest.raises(ProgramError, match="names part 5 of bucket 0, which has no such part"):
            checked(changed(step, 0, (*own[:at], own[at]._replace(part=5), *own[at + 1 :])))
