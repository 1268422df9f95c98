"""Optimizer state that is read before the norm is known: where the reads stand, and what the checker refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megazero.config.tiers import SLOTS, Tier
from megazero.program.instruction import Instruction, Kind, Lane, Op, ProgramError
from megazero.program.scope import FIRST, LATE, ON_TIME, SETTLING, Border
from megazero.program.simulate import simulate
from megazero.program.times import ChunkTimes
from tests.program import kinds
from tests.program.faults import Fault, again, all_words_of, alter, drop, move, swap
from tests.program.steps import Model, changed, checked, step_of

MANY = Model(pp=1, micro_batches=2, zero=0, units=(6,), parts=(Tier.DISK,), ahead=True)
"""Embedding, six blocks and a head, a bucket of one part each: 0 to 7. The first six are read ahead."""
FIRST_AHEAD, LATE_AHEAD, SETTLING_AHEAD = (replace(border, ahead=True) for border in (FIRST, LATE, SETTLING))
Change = Callable[[list[Instruction]], list[Instruction]]
LETTERS: dict[Kind, str] = {kinds.READ_STATE: "r", kinds.UPDATE_HOST: "h", kinds.WRITE_STATE: "w", Op.NORM: "norm"}
LETTERS |= {Op.FORWARD: "f", Op.BACKWARD: "b", kinds.WRITE_SUM: "s"}
READ, UPDATE, WRITE = all_words_of(kinds.READ_STATE, kinds.UPDATE_HOST, kinds.WRITE_STATE)


def words(instructions: tuple[Instruction, ...]) -> str:
    """Reads, updates and writes of optimizer state by bucket, beside the passes and the norm."""
    found: list[str] = []
    for i in instructions:
        if i.op in LETTERS:
            word = LETTERS[i.op] + (f"{i.micro_batch}" if i.is_compute else "".join(map(str, i.buckets)))
            found += [word] if not i.is_compute or word not in found[-1:] else []
    return " ".join(found)


ALL = "h0 w0 h1 w1 h2 w2 h3 w3 h4 w4 h5 w5 r6 h6 w6 r7 h7 w7"
"""All updates, where the first six parts have been read."""
PLACES = {
    "on time": (MANY, f"f0 b0 f1 r0 r1 r2 r3 r4 r5 b1 norm {ALL}"),
    "a first step": (replace(MANY, border=FIRST_AHEAD), "f0 b0 f1 r0 r1 r2 r3 r4 r5 b1 norm"),
    "late": (replace(MANY, border=LATE_AHEAD), f"{ALL} f0 b0 f1 r0 r1 r2 r3 r4 r5 b1 norm"),
    "updates alone": (replace(MANY, border=SETTLING_AHEAD), ALL),
    "behind sums that go to disks": (
        replace(MANY, units=(1,), micro_batches=1, sums=Tier.DISK),
        "f0 b0 s2 b0 s1 s0 r0 r1 r2 norm h0 w0 h1 w1 h2 w2",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_where_they_stand(name: str) -> None:
    model, expected = PLACES[name]
    assert words(checked(step_of(model)).lists[0, 0]) == expected


def test_nothing_that_a_computation_needs_waits_behind_them() -> None:
    """Parameters on disks are read on the same lane: those of the last backward come first."""
    step = checked(step_of(replace(MANY, rests=Tier.DISK, border=LATE_AHEAD)))
    read = [i.op for i in step.lists[0, 0] if i.lane is Lane.FROM_DISK]
    assert read[-SLOTS:] == [kinds.READ_STATE] * SLOTS and kinds.READ_PARAMETERS in read


def test_parts_that_are_read_ahead_come_before_parts_in_host_memory() -> None:
    """Those take slots as well, and would wait for one for ever."""
    step = checked(step_of(replace(MANY, parts=(Tier.HOST, Tier.DISK), border=LATE_AHEAD)))
    updates = [(i.buckets[0], i.part) for i in step.lists[0, 0] if i.op == kinds.UPDATE_HOST]
    assert updates[: SLOTS + 1] == [*((bucket, 1) for bucket in range(SLOTS)), (0, 0)]


FAULTS = {
    "it is read twice": Fault(replace(MANY, border=LATE_AHEAD), again(READ(1)), READ(1), "the optimizer state", 1),
    "state that was read is written before its update": Fault(
        replace(MANY, border=LATE_AHEAD), swap(UPDATE(0), WRITE(0)), WRITE(0), "optimizer state"
    ),
    "a seventh part takes a slot before the first has left it": Fault(
        replace(MANY, border=LATE_AHEAD), move(READ(6), UPDATE(0)), READ(6), "takes slot 0 of 6"
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_refused(fault: Fault) -> None:
    fault.assert_refused()


@pytest.mark.parametrize("change", [drop(READ(1)), alter(READ(1), buckets=(6,))])
def test_what_is_not_read_for_the_next_list_is_named(change: Change) -> None:
    step = step_of(replace(MANY, border=FIRST_AHEAD))
    with pytest.raises(ProgramError, match="nothing makes the optimizer state in host memory of part 0 of bucket 1"):
        checked(changed(step, 0, tuple(change(list(step.lists[0, 0])))))


@pytest.mark.parametrize("border", [LATE_AHEAD, SETTLING_AHEAD, FIRST_AHEAD])
def test_lists_on_both_sides_have_to_agree(border: Border) -> None:
    """A list that leaves what it has read, and one that takes it over, fit no border without it, and the reverse."""
    with pytest.raises(ProgramError):
        checked(step_of(replace(MANY, border=border)), replace(border, ahead=False))
    with pytest.raises(ProgramError):
        checked(step_of(replace(MANY, border=replace(border, ahead=False), ahead=False)), border)


@pytest.mark.parametrize("border", [ON_TIME, LATE])
def test_reads_run_beside_the_last_backward(border: Border) -> None:
    """Reads alone take time: 1 for a byte, 3 bytes for an element. The backward hides those of the first six parts,
    and the forwards of the first seven units a part of the last two.
    """
    own = replace(MANY, micro_batches=1, border=border)
    sizes = (70, *[90] * 6, 50)

    def step(ahead: bool) -> float:
        model = replace(own, ahead=ahead, border=replace(border, ahead=ahead and border.is_late))
        made = step_of(model)
        times = ChunkTimes((300.0,), (3 * sum(sizes),), per_byte={Lane.FROM_DISK: 1.0})
        return simulate([made.lists[0, 0]], times, [made.shapes[0, 0]], border=model.border, steps=3).step

    waits = [3 * sum(sizes[: at + 1]) - 300 / 8 * at for at in range(8)]
    assert step(ahead=False) == pytest.approx(3 * sum(sizes) + 300 + max(waits))
    left = max(3 * 90 - 300 / 8 * 6, 3 * (90 + 50) - 300 / 8 * 7)
    assert step(ahead=True) == pytest.approx(3 * sum(sizes) + 300 + left)
