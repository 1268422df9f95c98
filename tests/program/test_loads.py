"""Parameters that do not rest on the device, in lists: where they are loaded and stored, and what is refused."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from megazero.config.tiers import Tier
from megazero.pipeline.schedule import make_schedule
from megazero.program.example import ExampleModel
from megazero.program.instruction import Instruction, Kind, Lane, Op
from megazero.program.passes.gathers import place_loads
from megazero.program.scope import LATE, SETTLING
from megazero.program.simulate import simulate
from megazero.program.step import StepOptions, training_step
from megazero.program.times import uniform_times
from megazero.program.traffic import traffic
from tests.program import kinds
from tests.program.faults import Fault, again, all_words_of, alter, drop, move, put, swap, words_of
from tests.program.made import lettered
from tests.program.steps import Model, checked, drawn, step_of

ALONE = Model(pp=1, dp=1, zero=0, micro_batches=1, units=(1,), rests=Tier.HOST)
"""Embedding, a block and a head, a bucket each: 0 to 2. What rests in host memory is whole there."""
ON_DISK = replace(ALONE, rests=Tier.DISK, parts=(Tier.DEVICE, Tier.DISK))
SHARED = replace(ALONE, dp=2, zero=3)
LETTERS: dict[Kind, str] = {
    kinds.READ_PARAMETERS: "r",
    kinds.LOAD: "l",
    Op.GATHER: "g",
    kinds.RELEASE: "x",
    Op.FORWARD: "F",
    Op.BACKWARD: "B",
}
LETTERS |= {
    Op.NORM: "norm",
    kinds.COPY_GRADIENT: "c",
    kinds.READ_STATE: "rs",
    kinds.UPDATE_HOST: "h",
    kinds.UPDATE: "u",
}
LETTERS |= {kinds.COPY_PARAMETERS: "b", kinds.STORE: "s", kinds.WRITE_PARAMETERS: "w", kinds.WRITE_STATE: "ws"}


def words(instructions: tuple[Instruction, ...]) -> str:
    return lettered(instructions, LETTERS)


FORWARDS = {
    # The block's bucket is loaded again ahead of its backward.
    "in host memory, whole": (ALONE, "l0 g0 l1 g1 F0 x0 l2 g2 F1 x1 F2"),
    "shards are loaded one gather ahead": (SHARED, "l0 l1 g0 l2 g1 F0 x0 l1 g2 F1 x1 F2"),
    "shards of which no second fits": (replace(SHARED, budget="one"), "l0 l1 g0 F0 x0 l2 g1 F1 x1 l1 g2 F2"),
    "on disks, whole": (ON_DISK, "r0.0 l0.0 r0.1 l0.1 g0 r1.0 l1.0 r1.1 l1.1 g1 F0 x0 r2.0 l2.0 r2.1 l2.1 g2 F1 x1 F2"),
    "on disks, shards": (
        replace(SHARED, rests=Tier.DISK),
        "r0.0 l0.0 r1.0 l1.0 g0 r2.0 l2.0 g1 F0 x0 r1.0 l1.0 g2 F1 x1 F2",
    ),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_loads_stand_before_the_gather_of_their_bucket(name: str) -> None:
    model, expected = FORWARDS[name]
    found = words(checked(step_of(model)).lists[0, 0])
    assert found[: found.index("F2") + 2] == expected


ENDS = {
    "on the device, stored in host memory": (ALONE, "u0 s0 u1 s1 u2 s2"),
    "on the device, written": (replace(ALONE, rests=Tier.DISK), "u0.0 s0.0 w0.0 u1.0 s1.0 w1.0 u2.0 s2.0 w2.0"),
    "in host memory, where they rest": (replace(ALONE, parts=(Tier.HOST,)), "c0.0 h0.0 c1.0 h1.0 c2.0 h2.0"),
    "in host memory, written": (
        replace(ALONE, rests=Tier.DISK, parts=(Tier.HOST,)),
        "c0.0 h0.0 w0.0 c1.0 h1.0 w1.0 c2.0 h2.0 w2.0",
    ),
    "a part each, both on disks": (
        ON_DISK,
        "rs0.1 c0.1 h0.1 w0.1 ws0.1 rs1.1 c1.1 h1.1 w1.1 ws1.1 rs2.1 c2.1 h2.1 w2.1 ws2.1 "
        "u0.0 s0.0 w0.0 u1.0 s1.0 w1.0 u2.0 s2.0 w2.0",
    ),
    "state on disks, parameters in host memory": (
        replace(ALONE, parts=(Tier.DISK,)),
        "rs0.0 c0.0 h0.0 ws0.0 rs1.0 c1.0 h1.0 ws1.0 rs2.0 c2.0 h2.0 ws2.0",
    ),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("alone", [False, True], ids=["behind the norm", "updates alone"])
def test_updates_bring_parameters_to_where_they_rest(name: str, alone: bool) -> None:
    model, expected = ENDS[name]
    found = words(checked(step_of(replace(model, border=SETTLING) if alone else model)).lists[0, 0])
    assert found if alone else found[found.index("norm") :] == f"norm {expected}"
    assert found.endswith(expected)


def test_late_updates_stand_before_the_loads() -> None:
    """Those in host memory first, and those on the device each before its own."""
    found = words(checked(step_of(replace(ON_DISK, parts=(Tier.DEVICE, Tier.HOST), border=LATE))).lists[0, 0])
    assert found[: found.index("F0")] == (
        "c0.1 h0.1 w0.1 c1.1 h1.1 w1.1 c2.1 h2.1 w2.1 "
        "u0.0 s0.0 w0.0 r0.0 l0.0 r0.1 l0.1 g0 u1.0 s1.0 w1.0 r1.0 l1.0 r1.1 l1.1 g1 "
    )


@pytest.mark.slow
def test_every_gather_has_its_own_loads(seed: int) -> None:
    """Each part once, one gather ahead at most, each read right before its load; so bytes are those of gathers."""
    source, seen = random.Random(seed), Counter[Tier]()
    for _ in range(60):
        rests = source.choice((Tier.HOST, Tier.DISK))
        model = replace(drawn(source), rests=rests, staying=0, sums=Tier.DEVICE, leaving=0.0)
        step = checked(step_of(model))
        for role, instructions in step.lists.items():
            shape, waiting, moved = step.shapes[role], dict[int, list[int]](), 0
            for before, i in zip((None, *instructions), instructions, strict=False):
                if i.op == kinds.LOAD:
                    bucket = shape.buckets[i.buckets[0]]
                    waiting.setdefault(i.buckets[0], []).append(i.part)
                    assert len(waiting) <= (2 if bucket.is_sharded else 1)
                    assert bucket.rests is Tier.HOST or before == i._replace(op=kinds.READ_PARAMETERS, frees_slot=False)
                elif i.op is Op.GATHER:
                    bucket = shape.buckets[i.buckets[0]]
                    assert tuple(waiting.pop(i.buckets[0])) == bucket.loads
                    whole = bucket.rests is Tier.HOST
                    moved += bucket.stored_bytes if whole else sum(part.parameter_bytes for part in bucket.parts)
                    seen[bucket.rests] += 1
            assert not waiting
            assert traffic(instructions, shape).get(Lane.TO_DEVICE, 0) == moved
    assert min(seen[Tier.HOST], seen[Tier.DISK]) > 100


def test_a_bucket_that_alone_is_loaded_is_not_loaded_ahead_of_itself() -> None:
    """The others rest on the device. There is one place to load it to."""
    shape = step_of(SHARED).shapes[0, 0]
    others = [replace(bucket, rests=Tier.DEVICE) for bucket in shape.buckets[1:]]
    shape = replace(shape, buckets=(shape.buckets[0], *others))
    gathers = [Instruction(op, buckets=(n,)) for n in (0, 1, 0) for op in (Op.GATHER, kinds.RELEASE)]
    assert words(place_loads(gathers, shape)) == "l0 g0 x0 g1 x1 l0 g0 x0"


LOAD, READ, STORE, WRITE = all_words_of(kinds.LOAD, kinds.READ_PARAMETERS, kinds.STORE, kinds.WRITE_PARAMETERS)
UPDATE, GATHER = words_of(kinds.UPDATE), words_of(Op.GATHER)
LATE_DISK = replace(ON_DISK, border=LATE)
FAULTS = {
    "a load is missing": Fault(ALONE, drop(LOAD(1)), GATHER(1), "the loaded parameters of bucket 1"),
    "a part is not loaded": Fault(ON_DISK, drop(LOAD(1, 1)), GATHER(1), "the loaded parameters of part 1 of bucket 1"),
    "a part is loaded twice": Fault(
        ON_DISK, again(LOAD(1, 1)), LOAD(1, 1), "the parameters that were read of part 1", 1
    ),
    "shards are loaded twice": Fault(SHARED, again(LOAD(1)), LOAD(1), "makes the loaded parameters of bucket 1", 1),
    "another part is loaded": Fault(
        ON_DISK, alter(LOAD(1, 1), part=0), LOAD(1, 0), "the parameters that were read of part 0 of bucket 1", 1
    ),
    "a gather before its load": Fault(SHARED, move(GATHER(0), LOAD(0)), GATHER(0), "the loaded parameters of bucket 0"),
    "a load of what is not gathered": Fault(
        ALONE, put(Instruction(kinds.LOAD, buckets=(0,)), "norm"), LOAD(0), "the loaded parameters of bucket 0", -1
    ),
    "a part is loaded that was not read": Fault(
        ON_DISK, drop(READ(2, 0)), LOAD(2, 0), "the parameters that were read of part 0 of bucket 2"
    ),
    "a part is read behind its load": Fault(
        ON_DISK, swap(READ(0, 1), LOAD(0, 1)), LOAD(0, 1), "the parameters that were read of part 1 of bucket 0"
    ),
    "a part is read twice": Fault(
        ON_DISK, again(READ(0, 1)), READ(0, 1), "makes the parameters that were read of part 1", 1
    ),
    "updated weights are not stored": Fault(
        ALONE, drop(STORE(1)), UPDATE(1), "the stored parameters of bucket 1, which nothing makes again"
    ),
    "weights are stored before their update": Fault(
        ALONE, move(STORE(1), UPDATE(1)), STORE(1), "the updated weights on the device of bucket 1"
    ),
    "another bucket's weights are stored": Fault(
        ALONE, alter(STORE(1), buckets=(2,)), STORE(2), "the updated weights on the device of bucket 2"
    ),
    "updated parameters are not written": Fault(
        ON_DISK,
        drop(WRITE(1, 1)),
        "update in host memory (bucket 1",
        "the stored parameters of part 1 of bucket 1, which nothing makes again",
    ),
    "parameters are written before their update": Fault(
        ON_DISK,
        move(WRITE(1, 1), "update in host memory (bucket 1"),
        WRITE(1, 1),
        "the updated parameters in host memory of part 1 of bucket 1",
    ),
    "parameters are written that were not stored": Fault(
        ON_DISK,
        swap(STORE(2, 0), WRITE(2, 0)),
        WRITE(2, 0),
        "the updated parameters in host memory of part 0 of bucket 2",
    ),
    "a late load before the update": Fault(
        replace(ALONE, border=LATE), move(LOAD(1), UPDATE(1)), LOAD(1), "whose update from the last step is still owed"
    ),
    "a late load before updated weights are stored": Fault(
        replace(ALONE, border=LATE), swap(STORE(1), LOAD(1)), LOAD(1), "the stored parameters of bucket 1"
    ),
    "a late read before the write": Fault(
        LATE_DISK, move(READ(1, 0), WRITE(1, 0)), READ(1, 0), "the stored parameters of part 0 of bucket 1"
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_refused_and_its_instruction_named(fault: Fault) -> None:
    fault.assert_refused()


def test_late_updates_on_disks_leave_the_lane_to_the_parameters_that_are_needed_first() -> None:
    """One lane reads optimizer state and parameters: a bucket's state comes one bucket ahead, not that of all."""
    found = words(checked(step_of(replace(ON_DISK, parts=(Tier.DISK,), border=LATE))).lists[0, 0])
    assert found[: found.index("F1")] == (
        "rs0.0 c0.0 h0.0 w0.0 ws0.0 rs1.0 c1.0 h1.0 w1.0 ws1.0 r0.0 l0.0 g0 "
        "rs2.0 c2.0 h2.0 w2.0 ws2.0 r1.0 l1.0 g1 F0 x0 r2.0 l2.0 g2 "
    )


def test_a_late_update_stands_before_loads_that_are_ahead_of_what_stays_on_the_device() -> None:
    """The head is loaded beside the embedding, before the use of a block that rests on the device."""
    found = words(checked(step_of(replace(ON_DISK, staying=2, parts=(Tier.DISK,), border=LATE))).lists[0, 0])
    assert found[: found.index("F2")] == (
        "rs0.0 c0.0 h0.0 b0.0 ws0.0 rs1.0 c1.0 h1.0 b1.0 ws1.0 rs2.0 c2.0 h2.0 w2.0 ws2.0 r2.0 l2.0 g2 F0 F1 "
    )


def test_late_updates_on_disks_hide_behind_the_forward() -> None:
    """Twelve units whose forward takes as long as the way of their state: a step adds little to its computations."""
    of = ExampleModel((10,), 0, 1, numel=6, tier=Tier.DISK, rests=Tier.DISK)
    shape, options = of.shape([0]), StepOptions(late=True)
    listed = training_step(make_schedule("1f1b", 1, 1)[0], shape, options)
    lanes = {Lane.FROM_DISK: 1 / 72, Lane.TO_DISK: 1 / 84, Lane.HOST: 1 / 240}  # 72 and 12 bytes a unit, 24 of gradient
    times = uniform_times(1, 14.0, 28.0)
    report = simulate([listed], replace(times, per_byte=lanes), [shape], border=options.border, steps=3)
    alone = simulate([listed], times, [shape], border=options.border, steps=3)
    assert alone.step == pytest.approx(42)
    assert report.step < 1.1 * alone.step, "12 reads of a unit's state and 24 of its parameters take 16"
