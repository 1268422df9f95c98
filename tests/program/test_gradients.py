"""Gradients that are summed off the device, in lists: what leaves when, what comes back, and what is refused."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from megazero.config.tiers import Tier
from megazero.program.instruction import Instruction, Kind, Lane, Op
from megazero.program.memory import StepBytes, UnitSizes
from megazero.program.memory_walk import spare_buffers
from megazero.program.scope import LATE, SETTLING, Scope
from megazero.program.traffic import traffic
from tests.program import kinds
from tests.program.faults import Fault, again, all_words_of, drop, move, put, swap
from tests.program.made import lettered
from tests.program.steps import Model, checked, drawn, step_of

ALONE = Model(pp=1, dp=1, zero=0, micro_batches=2, units=(1,), sums=Tier.HOST)
"""Embedding, a block and a head, a bucket each: 0 to 2."""
ON_DISK = replace(ALONE, sums=Tier.DISK)
SHARED = replace(ALONE, dp=2, zero=3)
LETTERS: dict[Kind, str] = {
    Op.BACKWARD: "B",
    Op.REDUCE: "R",
    Op.REDUCE_ACROSS: "A",
    Op.REDUCE_PARTIAL: "T",
    kinds.STORE_GRADIENT: "s",
}
LETTERS |= {
    kinds.COPY_REDUCED: "c",
    Op.ADD_GRADIENT: "+",
    Op.COUNT_GRADIENT: "n",
    kinds.READ_SUM: "r",
    kinds.WRITE_SUM: "w",
}
LETTERS |= {
    kinds.READ_GRADIENT: "g",
    kinds.FETCH_GRADIENT: "f",
    Op.NORM: "norm",
    kinds.READ_STATE: "rs",
    kinds.UPDATE_HOST: "h",
}
LETTERS |= {kinds.UPDATE: "u", kinds.COPY_PARAMETERS: "b", kinds.WRITE_STATE: "ws"}


def words(instructions: tuple[Instruction, ...]) -> str:
    return lettered(instructions, LETTERS)


BACKWARDS = {
    "stored first, added to later, counted last": (
        ALONE,
        "B2 R2 B1 s2.0 R1 B0 s1.0 R0 s0.0 B2 R2 B1 c2.0 +2.0 n2 R1 B0 c1.0 +1.0 n1 R0 c0.0 +0.0 n0",
    ),
    "on disks": (
        ON_DISK,
        "B2 R2 B1 s2.0 w2.0 R1 B0 s1.0 w1.0 R0 s0.0 w0.0 B2 R2 B1 r2.0 c2.0 +2.0 n2.0 w2.0 R1 B0 r1.0 c1.0 +1.0 n1.0 "
        "w1.0 R0 r0.0 c0.0 +0.0 n0.0 w0.0",
    ),
    "one reduction, on disks": (
        replace(ON_DISK, micro_batches=1),
        "B2 R2 B1 s2.0 n2.0 w2.0 R1 B0 s1.0 n1.0 w1.0 R0 s0.0 n0.0 w0.0",
    ),
    "across and over tp before it leaves, not meanwhile": (
        replace(SHARED, dp=4, across=2, partial=True, micro_batches=1, overlap=False),
        "B2 R2 A2 T2 s2.0 n2 B1 R1 A1 T1 s1.0 n1 B0 R0 A0 T0 s0.0 n0",
    ),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_gradient_leaves_behind_each_of_its_reductions(name: str) -> None:
    model, expected = BACKWARDS[name]
    found = words(checked(step_of(model)).lists[0, 0])
    assert found[: found.index(" norm")] == expected


ENDS = {
    "brought back one update ahead": (ALONE, "f0.0 f1.0 u0.0 f2.0 u1.0 u2.0"),
    "read before": (ON_DISK, "g0.0 f0.0 g1.0 f1.0 u0.0 g2.0 f2.0 u1.0 u2.0"),
    "taken from where it is": (replace(ALONE, parts=(Tier.HOST,)), "h0.0 b0.0 h1.0 b1.0 h2.0 b2.0"),
    "read with the state": (
        replace(ON_DISK, parts=(Tier.DISK,)),
        "rs0.0 g0.0 h0.0 b0.0 ws0.0 rs1.0 g1.0 h1.0 b1.0 ws1.0 rs2.0 g2.0 h2.0 b2.0 ws2.0",
    ),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("alone", [False, True], ids=["behind the norm", "updates alone"])
def test_updates_use_the_sum_where_it_rests(name: str, alone: bool) -> None:
    model, expected = ENDS[name]
    found = words(checked(step_of(replace(model, border=SETTLING) if alone else model)).lists[0, 0])
    assert (found if alone else found[found.index("norm") :]) == ("" if alone else "norm ") + expected


def test_late_updates_stand_before_the_first_use() -> None:
    found = words(checked(step_of(replace(ON_DISK, parts=(Tier.DEVICE, Tier.HOST), border=LATE))).lists[0, 0])
    assert found[: found.index(" B2")] == (
        "g0.1 h0.1 b0.1 g1.1 h1.1 b1.1 g2.1 h2.1 b2.1 g0.0 f0.0 u0.0 g1.0 f1.0 u1.0 g2.0 f2.0 u2.0"
    )


def test_a_tied_bucket_is_reduced_once_where_two_stages_meet() -> None:
    step = checked(step_of(replace(SHARED, pp=2, tied=True, micro_batches=3)))
    for stage in range(2):
        (tied,) = [n for n, bucket in enumerate(step.shapes[stage, 0].buckets) if bucket.spans_stages]
        found = words(step.lists[stage, 0]).split()
        own = [word for word in found if word[0] != "B" and word[1:].split(".")[0] == str(tied)]
        ends = [f"{letter}{tied}" for letter in ("R", "A", "s", "n", "f", "u")]
        assert [word.split(".")[0] for word in own] == ends
        assert found.index(f"R{tied}") > max(at for at, word in enumerate(found) if word.startswith("B"))


@pytest.mark.slow
def test_every_reduction_leaves_once(seed: int) -> None:
    """What goes to the host are the reductions' own gradients: first a store, then additions, one count."""
    source, seen = random.Random(seed), Counter[Tier]()
    for _ in range(60):
        drew = drawn(source)
        model = replace(drew, sums=source.choice((Tier.HOST, Tier.DISK)), rests=Tier.DEVICE, leaving=0.0, parts=())
        step = checked(step_of(model))
        for role, instructions in step.lists.items():
            shape, ops = step.shapes[role], Counter((i.op, i.buckets[0]) for i in instructions if i.buckets)
            moved = 0
            for number in shape.trained if ops else ():
                reductions = ops[Op.REDUCE, number]
                moved += reductions * shape.buckets[number].parts[0].gradient_bytes
                assert ops[kinds.STORE_GRADIENT, number] == ops[Op.COUNT_GRADIENT, number] == min(1, reductions)
                assert ops[Op.ADD_GRADIENT, number] == ops[kinds.COPY_REDUCED, number] == max(0, reductions - 1)
                assert ops[kinds.WRITE_SUM, number] == reductions * (model.sums is Tier.DISK)
                seen[model.sums] += reductions
            assert traffic(instructions, shape).get(Lane.TO_HOST, 0) == moved
    assert min(seen[Tier.HOST], seen[Tier.DISK]) > 200


@pytest.mark.parametrize("model", [ALONE, ON_DISK, SHARED, replace(SHARED, overlap=False)], ids=str)
@pytest.mark.parametrize("blocks", [4, 40])
def test_few_whole_gradients_are_on_the_device(model: Model, blocks: int) -> None:
    """However many blocks there are."""
    step = step_of(replace(model, units=(blocks,)))
    shape = step.shapes[0, 0]
    sizes = StepBytes(1, (tuple(UnitSizes() for _ in shape.units[0]),), in_flight=2 if model.overlap else 0)
    buffers = spare_buffers(step.lists[0, 0], Scope(shape, 1), sizes)
    assert 1 < len(buffers) <= 4 and sum(buffers) < 5 * max(bucket.gradient_bytes for bucket in shape.buckets)


STORE, COPY, ADD = all_words_of(kinds.STORE_GRADIENT, kinds.COPY_REDUCED, Op.ADD_GRADIENT)
COUNT, READ, WRITE = all_words_of(Op.COUNT_GRADIENT, kinds.READ_SUM, kinds.WRITE_SUM)
REDUCE, FETCH, GET, UPDATE = all_words_of(Op.REDUCE, kinds.FETCH_GRADIENT, kinds.READ_GRADIENT, kinds.UPDATE)
LATE_HOST = replace(ALONE, border=LATE)
FAULTS = {
    "a gradient does not leave": Fault(
        ALONE, drop(STORE(1)), REDUCE(1), "makes the reduced gradient of part 0 of bucket 1", 1
    ),
    "it is stored twice": Fault(ALONE, again(STORE(1)), STORE(1), "the reduced gradient of part 0 of bucket 1", 1),
    "a later one is stored over the sum": Fault(
        ALONE,
        lambda own: [i._replace(op=kinds.STORE_GRADIENT) if str(i).startswith(COPY(1)) else i for i in own],
        STORE(1),
        "makes the sum of gradients in host memory of part 0 of bucket 1",
        1,
    ),
    "it is not added": Fault(ALONE, drop(ADD(1)), COUNT(1), "counts the gradient of bucket 1"),
    "it is added twice": Fault(ALONE, again(ADD(1)), ADD(1), "the gradient in host memory of part 0 of bucket 1", 1),
    "it is counted too early": Fault(ALONE, move(COUNT(1), COPY(1)), COUNT(1), "before it is complete"),
    "it is counted in the first backward": Fault(
        ALONE, move(COUNT(2), REDUCE(1)), COUNT(2), "backwards of units have still to add"
    ),
    "it is not counted": Fault(ALONE, drop(COUNT(1)), "norm", "the squares of the gradient of bucket 1"),
    "it is counted twice": Fault(ALONE, again(COUNT(1)), COUNT(1), "makes the squares of the gradient of bucket 1", 1),
    "a bucket is reduced again before it has left": Fault(
        ALONE, move(STORE(2), REDUCE(1), at=1), REDUCE(2), "makes the reduced gradient of part 0 of bucket 2", 1
    ),
    "a sum is not read": Fault(
        ON_DISK, drop(READ(1)), ADD(1), "the sum of gradients in host memory of part 0 of bucket 1"
    ),
    "a sum is not written": Fault(
        ON_DISK, drop(WRITE(1)), READ(1), "the sum of gradients on disks of part 0 of bucket 1"
    ),
    "a sum is written before it is added to": Fault(
        ON_DISK, swap(WRITE(1), ADD(1), nth=1), WRITE(1), "are on their way to host memory", 1
    ),
    "an update before its gradient is back": Fault(
        ALONE, drop(FETCH(1)), UPDATE(1), "the gradient back on the device of part 0 of bucket 1"
    ),
    "a gradient comes back unread": Fault(
        ON_DISK, drop(GET(1)), FETCH(1), "the gradient in host memory of part 0 of bucket 1"
    ),
    "a gradient comes back that nobody uses": Fault(
        ALONE,
        put(Instruction(kinds.FETCH_GRADIENT, buckets=(1,), part=0), FETCH(1)),
        FETCH(1),
        "the sum of gradients in host memory of part 0 of bucket 1",
        1,
    ),
    "a late gradient is stored over one that is owed": Fault(
        LATE_HOST,
        lambda own: [i for i in own if i.op not in (kinds.FETCH_GRADIENT, kinds.UPDATE) or i.buckets != (0,)],
        "forward",
        "whose update from the last step is still owed",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_refused_and_its_instruction_named(fault: Fault) -> None:
    fault.assert_refused()
