"""Slots in lists and in the simulation, and steps that follow each other: times that are counted here by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megazero.config.tiers import MOST_SLOTS, SLOTS, Tier
from megazero.program.instruction import PARAMETER_LOADS, Kind, Lane
from megazero.program.passes.slots import place_slots, slot_bytes, slots_within
from megazero.program.scope import LATE, ON_TIME, SETTLING, Border
from megazero.program.shape import without_state
from megazero.program.simulate import SimulationReport, simulate
from megazero.program.step import StepOptions, settling_list
from megazero.program.times import ChunkTimes
from tests.program import kinds
from tests.program.steps import Model, Step, drawn, step_of

EIGHT = Model(pp=1, micro_batches=1, zero=0, dp=1, units=(6,), parts=(Tier.DISK,))
"""Embedding, six blocks and a head: eight buckets of 70, six times 90, and 50 bytes, one part each."""
SIZES = (70, *[90] * 6, 50)


def ran(step: Step, per_byte: dict[Lane, float], *, steps: int = 1, forward: float = 100.0) -> SimulationReport:
    times = ChunkTimes((forward,), (2 * forward,), per_byte=per_byte)
    return simulate([step.lists[0, 0]], times, [step.shapes[0, 0]], border=step.border, steps=steps)


def spans(report: SimulationReport, op: Kind) -> dict[int, tuple[float, float]]:
    return {s.instruction.buckets[0]: (s.start, s.end) for s in report.messages[0] if s.instruction.op == op}


def test_a_read_waits_for_the_slot_of_the_sixth_part_before_it() -> None:
    """Reads are free, and writes take 3 for each byte: the seventh part is read when the first one is written."""
    report = ran(step_of(EIGHT), {Lane.TO_DISK: 1.0})
    end, written = 300.0, []
    for size in SIZES:
        end += 3 * size
        written.append(end)
    reads, writes = spans(report, kinds.READ_STATE), spans(report, kinds.WRITE_STATE)
    assert [writes[bucket][1] for bucket in range(8)] == written
    assert [reads[bucket][0] for bucket in range(8)] == [300.0] * SLOTS + written[:2]


@pytest.mark.parametrize(
    ("blocks", "tier", "buffer_bytes", "slots"),
    [
        (6, Tier.DISK, 0, SLOTS),
        (6, Tier.DISK, 7 * 405 - 1, 6),
        (6, Tier.DISK, 7 * 405, 7),
        (6, Tier.DISK, 10**9, 8),  # there are eight parts
        (20, Tier.DISK, 10**9, MOST_SLOTS),
        (20, Tier.HOST, 10**9, SLOTS),  # no disk works beside the backward
    ],
)
def test_there_are_as_many_slots_as_the_buffer_holds(blocks: int, tier: Tier, buffer_bytes: int, slots: int) -> None:
    """The largest part has 90 bytes of gradient, 270 of state and 45 of parameters."""
    (shape,) = step_of(replace(EIGHT, units=(blocks,), parts=(tier,))).shapes.values()
    assert slots_within(shape, buffer_bytes) == slots


def test_state_that_stays_on_the_device_needs_a_slot_on_its_way_to_disks() -> None:
    (shape,) = step_of(EIGHT).shapes.values()
    assert slot_bytes(shape).of_both == 405 and slot_bytes(replace(shape, resident_bytes=271)).of_both == 406


def test_with_more_slots_more_is_read_before_the_norm() -> None:
    """Reads take 0.1 for each byte, one behind the other. With seven slots the eighth part waits for a slot."""
    (shape,), (listed,) = step_of(EIGHT).shapes.values(), step_of(EIGHT).lists.values()
    assert [len(replace(shape, slots=count).read_ahead) for count in (6, 7, 9)] == [6, 7, 8]
    wide = place_slots([i._replace(slot=-1, frees_slot=False) for i in listed], replace(shape, slots=7))
    times = ChunkTimes((100.0,), (200.0,), per_byte={Lane.TO_DISK: 1.0})
    report = simulate([wide], times, [replace(shape, slots=7)], border=step_of(EIGHT).border, steps=1)
    reads, writes = spans(report, kinds.READ_STATE), spans(report, kinds.WRITE_STATE)
    assert [reads[bucket][0] for bucket in range(8)] == [300.0] * 7 + [writes[0][1]]


def test_a_slot_is_free_when_both_the_parameters_and_the_state_have_left_it() -> None:
    """Here the copies to the device take longest, 1 for each byte of parameters. State is written at once."""
    report = ran(step_of(EIGHT), {Lane.TO_DEVICE: 10.0, Lane.TO_DISK: 0.5})
    copies = spans(report, kinds.COPY_PARAMETERS)
    reads = spans(report, kinds.READ_STATE)
    assert reads[6][0] == copies[0][1] == 300 + 10 * (70 // 2)
    assert reads[7][0] == copies[1][1]


def test_a_part_in_host_memory_takes_a_slot_too() -> None:
    step = step_of(replace(EIGHT, parts=(Tier.HOST,)))
    report = ran(step, {Lane.HOST: 1.0})
    gradients, back = spans(report, kinds.COPY_GRADIENT), spans(report, kinds.COPY_PARAMETERS)
    assert [gradients[bucket][0] for bucket in range(8)] == [300.0] * SLOTS + [back[0][1], back[1][1]]


def test_a_slot_goes_on_belonging_to_a_part_of_the_step_before() -> None:
    """What is written at the end of a step holds up the reads of the next one: with writes alone that take time a step
    takes as long as they do.
    """
    report = ran(step_of(EIGHT), {Lane.TO_DISK: 10.0}, steps=3, forward=1.0)
    assert report.step == pytest.approx(30 * sum(SIZES))


@pytest.mark.parametrize("border", [ON_TIME, LATE], ids=["on time", "late"])
def test_a_step_that_follows_another_waits_for_the_updates(border: object) -> None:
    """An update of 90 bytes takes 5 for each. On time the whole of it is before the next forward: nothing computes
    meanwhile. So it is with late updates, where one computation reads all parameters.
    """
    step = step_of(replace(EIGHT, units=(1,), parts=(Tier.HOST,), border=border, merged=True, overlap=False))  # type: ignore[arg-type]
    report = ran(step, {Lane.HOST: 5.0}, steps=3)
    assert report.step == 300 + 5 * (70 + 90 + 50)
    assert len(report.ends) == 3 and len(report.spans[0]) == 6


def test_late_updates_lie_beside_the_first_forwards() -> None:
    """Cut into units, the first forward waits for its own bucket only. Of 210 bytes those behind the first one's are
    updated beside a forward that takes long.
    """
    model = replace(EIGHT, units=(1,), parts=(Tier.HOST,), border=LATE, leaving=1.0)
    report = ran(step_of(model), {Lane.HOST: 0.5}, steps=3)
    assert report.step == pytest.approx(300 + 0.5 * 70 + max(0, 0.5 * 90 - 100 / 3))


def test_several_stages_in_several_steps() -> None:
    """Each stage begins its next step when its own is over: in a run the stages do not wait for each other at the end.
    1F1B over two stages with three micro-batches, a forward taking 1 and a backward 2 on each.
    """
    step = step_of(Model(zero=0, dp=1))
    lists, shapes = [step.lists[stage, 0] for stage in range(2)], [step.shapes[stage, 0] for stage in range(2)]
    times = ChunkTimes((1.0, 1.0), (2.0, 2.0))
    once, thrice = (simulate(lists, times, shapes, steps=steps) for steps in (1, 3))
    assert once.step == once.makespan == 12.0
    assert thrice.ends[0] == once.makespan and thrice.step == thrice.ends[2] - thrice.ends[1]
    assert 9.0 <= thrice.step <= 12.0


def test_a_stage_may_have_nothing_to_do() -> None:
    """As where late updates are made alone, and nothing on a stage is trained."""
    step = step_of(EIGHT)
    shapes, times = [step.shapes[0, 0], without_state([1])], ChunkTimes((1.0, 1.0), (2.0, 2.0), update=1.0)
    report = simulate([settling_list(shapes[0], StepOptions(late=True)), ()], times, shapes, border=SETTLING)
    assert report.spans[1] == () and len(report.ends) == 1


def test_slots_are_those_of_a_ring_that_is_worked_off_in_turn() -> None:
    """Beside a machine that knows no list: it gives each part that comes the next slot when its first instruction
    comes, and takes the slot back behind its last one.
    """
    for seed in range(20):
        step = step_of(replace(drawn(random.Random(seed)), evaluation=False))
        for own in step.lists.values():
            using = [i for i in own if i.slot >= 0]
            turns: dict[bool, list[int]] = {False: [], True: []}
            taken: dict[tuple[bool, int], tuple[int, int]] = {}
            for i in using:
                ring = i.op in PARAMETER_LOADS
                if taken.get((ring, i.slot)) != i.key:
                    assert (ring, i.slot) not in taken, "a slot has one part at a time"
                    taken[ring, i.slot] = i.key
                    turns[ring].append(i.slot)
                if i.frees_slot:
                    del taken[ring, i.slot]
            assert not taken or step.border.ahead, "what is left in a slot is used by the next list"
            for slots in turns.values() if not step.border.ahead else ():
                assert slots == [turn % SLOTS for turn in range(len(slots))]


def test_state_that_is_read_ahead_is_where_the_next_list_expects_it() -> None:
    """Late updates: the slots at the end of a list are those that the next one, and a list of updates alone, begin
    with, whatever the list has used before: here gradients that are summed on disks pass through slots, too.
    """
    border = Border(owed=True, leaves=True, ahead=True)
    step = step_of(replace(EIGHT, border=border, ahead=True, sums=Tier.DISK))
    own, shape = step.lists[0, 0], step.shapes[0, 0]
    ahead = {i.key: i.slot for i in own if i.op == kinds.READ_STATE and i.key in shape.read_ahead}
    assert ahead == {key: slot for slot, key in enumerate(shape.read_ahead)} and len(ahead) == SLOTS
    for listed in (own, settling_list(shape, StepOptions(late=True, ahead=True))):
        first = {i.key: i.slot for i in reversed(listed) if i.op == kinds.UPDATE_HOST and i.key in ahead}
        assert first == ahead
    assert sum(i.frees_slot for i in own) % SLOTS, "else the turns would end where they begin by chance"
