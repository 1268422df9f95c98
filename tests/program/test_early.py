"""Updates before the norm is known: where they stand in lists, and what the checker refuses."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from megazero.config.tiers import Tier
from megazero.program.instruction import Instruction, Lane, Op, ProgramError
from megazero.program.scope import AGAIN, EARLY, ON_TIME, SETTLING, Border
from megazero.program.simulate import simulate
from megazero.program.times import ChunkTimes
from tests.program import kinds
from tests.program.faults import REDUCE, Fault, all_words_of, drop, find, move
from tests.program.steps import Model, checked, drawn, step_of
from tests.program.test_ahead import words

MANY = Model(pp=1, micro_batches=1, zero=0, units=(4,), parts=(Tier.DISK,), border=EARLY)
"""Embedding, four blocks and a head, a bucket of one part each: 0 to 5."""
TWO = replace(MANY, micro_batches=2)
READ, UPDATE, WRITE, COPY = all_words_of(kinds.READ_STATE, kinds.UPDATE_HOST, kinds.WRITE_STATE, kinds.COPY_GRADIENT)
COUNT, ACROSS, NEW = all_words_of(Op.COUNT_GRADIENT, Op.REDUCE_ACROSS, kinds.COPY_PARAMETERS)

PLACES = {
    "one micro-batch": (
        MANY,
        "f0 r5 f0 r4 f0 r3 f0 r2 f0 r1 b0 h5 w5 r0 b0 h4 w4 b0 h3 w3 b0 h2 w2 b0 h1 w1 h0 w0 norm",
    ),
    "from the last forward on": (
        TWO,
        "f0 b0 f1 r5 f1 r4 f1 r3 f1 r2 f1 r1 b1 h5 w5 r0 b1 h4 w4 b1 h3 w3 b1 h2 w2 b1 h1 w1 h0 w0 norm",
    ),
    "those that had to be made again": (replace(MANY, border=AGAIN), " ".join(f"r{n} h{n} w{n}" for n in range(6))),
    "sums in host memory": (
        replace(TWO, units=(1,), sums=Tier.HOST),
        "f0 b0 f1 r2 f1 r1 f1 b1 r0 b1 h2 w2 b1 h1 w1 h0 w0 norm",
    ),
    "sums on disks": (
        replace(TWO, units=(1,), sums=Tier.DISK),
        "f0 b0 s2 b0 s1 f1 r2 s0 f1 r1 f1 b1 r0 b1 s2 h2 w2 b1 s1 h1 w1 s0 h0 w0 norm",
    ),
    "a part in host memory waits for the norm": (
        replace(MANY, units=(1,), parts=(Tier.DISK, Tier.HOST)),
        "f0 r2 f0 r1 f0 r0 b0 h2 w2 b0 h1 w1 h0 w0 norm h0 h1 h2",
    ),
    "plain files do not go back": (
        replace(MANY, units=(1,), parts=(Tier.FILES,)),
        "f0 b0 norm h0 h1 h2",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_where_they_stand(name: str) -> None:
    model, expected = PLACES[name]
    found = words(checked(step_of(model)).lists[0, 0])
    assert found == expected


@pytest.mark.parametrize("seed", range(60))
def test_a_step_does_what_one_on_time_does(seed: int) -> None:
    """Every instruction once, early parts before the norm and no others; and what is made again are the early ones."""
    model = replace(drawn(random.Random(seed)), ahead=False, evaluation=False)
    early, on_time, again = (step_of(replace(model, border=border)) for border in (EARLY, ON_TIME, AGAIN))
    checked(early)
    checked(again)
    for role, shape in early.shapes.items():
        listed = early.lists[role]

        def bare(instructions: tuple[Instruction, ...]) -> Counter[tuple[object, ...]]:
            return Counter((i.op, i.micro_batch, i.chunk, i.buckets, i.part) for i in instructions if not i.is_compute)

        updated = {i.key: at for at, i in enumerate(listed) if i.op == kinds.UPDATE_HOST}
        norm = listed.index(Instruction(Op.NORM))
        assert bare(listed) == bare(on_time.lists[role])
        assert {key for key, at in updated.items() if at < norm} == set(shape.early)
        assert [i.key for i in again.lists[role] if i.op == kinds.UPDATE_HOST] == list(shape.early)


def test_some_of_these_steps_have_early_parts() -> None:
    models = [replace(drawn(random.Random(seed)), border=EARLY, evaluation=False) for seed in range(60)]
    counts = [len(shape.early) for model in models for shape in step_of(model).shapes.values()]
    assert sum(map(bool, counts)) > 20 and max(counts) > 6


TOO_SOON = "updates before the gradient is complete: "
FAULTS = {
    "an update before the last backward": Fault(
        TWO, move(UPDATE(3), REDUCE.format(3)), UPDATE(3), "the gradient in host memory of part 0 of bucket 3"
    ),
    "an update and its copy before the reduction": Fault(
        TWO,
        lambda own: move(UPDATE(3), REDUCE.format(3))(move(COPY(3), REDUCE.format(3))(own)),
        COPY(3),
        "the reduced gradient of part 0 of bucket 3",
    ),
    "an update behind a reduction that is not the last": Fault(
        replace(TWO, zero=2, dp=2),
        lambda own: move(UPDATE(3), REDUCE.format(4), at=1)(
            move(COPY(3), REDUCE.format(4), at=1)(move(READ(3), REDUCE.format(4), at=1)(own))
        ),
        UPDATE(3),
        TOO_SOON + "1 backwards",
    ),
    "an update of a gradient that other ranks have a part of": Fault(
        replace(TWO, dp=4, across=2),
        lambda own: move(UPDATE(3), ACROSS(3))(move(COPY(3), ACROSS(3))(own)),
        COPY(3),
        "the reduced gradient of part 0 of bucket 3",
    ),
    "an update of a sum that is not counted": Fault(
        replace(TWO, sums=Tier.HOST), move(COUNT(3), "norm"), UPDATE(3), TOO_SOON + "nothing has counted the squares"
    ),
    "a sum on disks that is not counted": Fault(
        replace(TWO, sums=Tier.DISK), drop(COUNT(3)), UPDATE(3), TOO_SOON + "nothing has counted the squares"
    ),
    "an update is missing": Fault(MANY, drop(UPDATE(3)), NEW(3), "the updated parameters in host memory of part 0"),
    "an update comes twice": Fault(MANY, lambda own: [*own, own[find(own, UPDATE(3))]], UPDATE(3), "has ended", 1),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_refused(fault: Fault) -> None:
    fault.assert_refused()


def test_a_list_that_makes_them_fits_no_other_border() -> None:
    """On time the updates miss the norm; and parts that are not early have their updates already."""
    with pytest.raises(ProgramError, match="reads the norm"):
        checked(step_of(MANY), ON_TIME)
    with pytest.raises(ProgramError, match="nothing uses the last step's gradient"):
        checked(step_of(replace(MANY, parts=(Tier.DISK, Tier.HOST), border=AGAIN)), SETTLING)


def test_the_backward_hides_them() -> None:
    """A byte that is read or written takes 1, and a part has 3 bytes for an element. A backward is as long as all reads
    and writes of its unit's state, and a forward as a third of the reads. Then early updates cost nothing, and those on
    time wait for the parts that had no slot before the norm.
    """
    sizes = (70, *[90] * 10, 50)
    times = ChunkTimes((1.0 * sum(sizes),), (6.0 * sum(sizes),), per_byte={Lane.FROM_DISK: 1.0, Lane.TO_DISK: 1.0})

    def step(border: Border, *, ahead: bool) -> float:
        made = step_of(replace(MANY, units=(10,), border=border, ahead=ahead))
        return simulate([made.lists[0, 0]], times, [made.shapes[0, 0]], border=border, steps=3).step

    computation = 7.0 * sum(sizes)
    assert step(EARLY, ahead=False) == pytest.approx(computation)
    assert step(ON_TIME, ahead=True) > computation + 2 * 3 * 90
