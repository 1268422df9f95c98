"""Activations that go on to disks, in lists: which ones, where reads and writes stand, how many buffers they take."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megazero.config.tiers import Tier
from megazero.program.instruction import Instruction, Kind, Lane, Op
from megazero.program.memory import MemoryColumn, StepBytes, UnitSizes
from megazero.program.memory_walk import host_buffers, samples
from megazero.program.passes.kept_graphs import kept_graphs
from megazero.program.passes.leaving import (
    LEAST_BUFFERS,
    LEAST_DISTANCE_TO_DISKS,
    WRITING,
    able_to_write,
    buffer_bytes,
    largest_unit,
    most_pieces,
)
from megazero.program.scope import FIRST, LATE, ON_TIME, Scope
from megazero.program.simulate import simulate
from megazero.program.times import uniform_times
from megazero.program.traffic import traffic
from tests.program import kinds
from tests.program.faults import Fault, again, drop, move, unit
from tests.program.made import lettered
from tests.program.steps import Model, checked, drawn, step_of

BUFFER = buffer_bytes(60)
LEAST = LEAST_BUFFERS * BUFFER
ONE = Model(pp=1, micro_batches=1, zero=0, dp=1, units=(6,), leaving=1.0, disk_buffers=LEAST)
"""Embedding, six blocks and a head: units 0 to 7. They keep 10, 20, 30 bytes and so on, so units 0 to 2 are small."""
LETTERS: dict[Kind, str] = {
    Op.FORWARD: "f",
    Op.BACKWARD: "b",
    kinds.LEAVE: "out",
    kinds.FREE: "free",
    kinds.WRITE_ACTIVATIONS: "write",
}
LETTERS |= {kinds.FREE_HOST: "drop", kinds.READ_ACTIVATIONS: "read", kinds.RETURN: "in"}


def test_a_write_stands_behind_the_copy_and_a_read_where_a_buffer_is_free() -> None:
    """Units 3 and 4 have six computations until their backward, and at least half the bytes of unit 6, the largest but
    the head; units 5 and 6 have fewer. A read waits for its own write, and for the read before it.
    """
    assert lettered(step_of(ONE).lists[0, 0], LETTERS) == (
        "f0 f1 f2 f3 out3 f4 free3 write3 out4 f5 free4 write4 f6 drop3 drop4 read4 read3 f7 "
        "b7 b6 in4 b5 in3 b4 b3 b2 b1 b0"
    )


def test_more_buffers_are_read_earlier() -> None:
    """A long list of equal units: with two buffers for what comes back each read waits for the backward that gives one
    back, with four the first four are read at once.
    """
    model = replace(ONE, micro_batches=8, units=(1,), leaving=1.0, schedule="gpipe")
    shares = []
    for buffers in (4, 6):
        listed = step_of(replace(model, disk_buffers=buffers * buffer_bytes(30))).lists[0, 0]
        at = {i: number for number, i in enumerate(listed)}
        reads = [i for i in listed if i.op == kinds.READ_ACTIVATIONS]
        backwards = [i for i in listed if i.op is Op.BACKWARD]
        assert len(reads) > 6
        shares.append(sum(at[i._replace(op=Op.BACKWARD)] - at[i] for i in reads))
        order = [i._replace(op=Op.BACKWARD) for i in reads]
        assert order == [i for i in backwards if i in order], "reads come in the order of the backwards"
    assert shares[1] > shares[0]


def occupied(instructions: Sequence[Instruction]) -> list[tuple[int, int]]:
    """Buffers of (what leaves, what comes back) behind every instruction, counted apart from the walk."""
    found, leaving, back = [], set[object](), set[object]()
    for i in instructions:
        key = i.micro_batch, i.chunk, i.units
        if i.op == kinds.LEAVE:
            leaving.add(key)
        elif i.op == kinds.FREE_HOST:
            leaving.remove(key)
        elif i.op == kinds.READ_ACTIVATIONS:
            back.add(key)
        elif i.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            back.discard(key)
        found.append((len(leaving), len(back)))
    return found


@pytest.mark.slow
def test_drawn_steps_are_legal_and_never_take_more_buffers(seed: int) -> None:
    source = random.Random(seed)
    written = 0
    for _ in range(60):
        model = replace(drawn(source), leaving=source.choice((0.4, 1.0)), evaluation=False, parts=())
        model = replace(model, rests=Tier.DEVICE, sums=Tier.DEVICE)
        buffers = source.choice((4, 4, 5, 9))
        model = replace(model, border=source.choice((ON_TIME, FIRST, LATE)), disk_buffers=buffers * BUFFER)
        step = checked(step_of(model))
        for role, instructions in step.lists.items():
            shape = step.shapes[role]
            graphs = kept_graphs(instructions, shape)
            able = {graph.forward for graph in able_to_write(graphs, largest_unit(shape.kept))}
            assert all(graph.distance >= LEAST_DISTANCE_TO_DISKS for graph in graphs if graph.forward in able)
            ops = {op: [i._replace(op=Op.FORWARD) for i in instructions if i.op == op] for op in LETTERS}
            leaves = ops[kinds.LEAVE]
            assert {*leaves} <= able and (model.leaving < 1 or {*leaves} == able)
            for op in (kinds.FREE, kinds.WRITE_ACTIVATIONS, kinds.FREE_HOST, kinds.READ_ACTIVATIONS, kinds.RETURN):
                assert {*ops[op]} == {*leaves} and len(ops[op]) == len(leaves)
            for leaving, back in occupied(instructions):
                assert leaving <= WRITING and back <= buffers - WRITING
            moved = traffic(instructions, shape)
            lanes = Lane.TO_HOST, Lane.TO_DEVICE, Lane.TO_DISK, Lane.FROM_DISK
            assert len({moved.get(lane, 0) for lane in lanes}) == 1
            written += moved.get(Lane.TO_DISK, 0)
            assert most_pieces(instructions) <= len(leaves)
    assert written


def test_the_walk_counts_buffers() -> None:
    step = step_of(replace(ONE, micro_batches=4))
    shape, listed = step.shapes[0, 0], step.lists[0, 0]
    units = tuple(UnitSizes(kept=unit.kept, forward=99, backward=999) for unit in shape.units[0])
    scope, sizes = Scope(shape, 1), StepBytes(5, (units,), host_buffer=BUFFER)
    for sample, (leaving, back) in zip(samples(listed, scope, sizes), occupied(listed), strict=True):
        held = sample.columns.get(MemoryColumn.HOST, 0)
        # Within an instruction the sample is the moment with most bytes on the device.
        assert held == BUFFER * (leaving + back) or sample.instruction.op in (Op.BACKWARD, kinds.FREE_HOST)
    assert sum(host_buffers(listed, scope, sizes)) <= LEAST
    assert 0 < most_pieces(listed) <= sum(i.op == kinds.LEAVE for i in listed)


def test_a_slow_disk_holds_up_the_step() -> None:
    """The simulator knows that a buffer is free when its write is over."""
    step = step_of(replace(ONE, micro_batches=3))
    times = uniform_times(1)
    slow = replace(times, per_byte={Lane.TO_DISK: 1.0})
    plain, held = (simulate([step.lists[0, 0]], t, [step.shapes[0, 0]]).makespan for t in (times, slow))
    assert held > plain


WRITE, DROP, READ = "write activations", "free activations in host memory", "read activations"
LEAVE, RETURN = "copy activations to host memory", "copy activations to the device"
ON_DISK, ON_HOST = "the disk's copy of the activations", "the host's copy of the activations"
FAULTS = {
    "it is dropped before it is written": Fault(
        ONE, move(unit(DROP, 0, 3), unit(WRITE, 0, 3)), unit(DROP, 0, 3), f"reads {ON_DISK}"
    ),
    "it is read before it is dropped": Fault(
        ONE, move(unit(READ, 0, 4), unit(DROP, 0, 4)), unit(READ, 0, 4), f"makes {ON_HOST}"
    ),
    "it is never written": Fault(ONE, drop(unit(WRITE, 0, 3)), unit(DROP, 0, 3), f"reads {ON_DISK}"),
    "it is written twice": Fault(ONE, again(unit(WRITE, 0, 3)), unit(WRITE, 0, 3), f"makes {ON_DISK}", 1),
    "it is never read": Fault(ONE, drop(unit(READ, 0, 3)), unit(RETURN, 0, 3), f"reads {ON_HOST}"),
    "it is copied back before it is read": Fault(
        ONE, move(unit(RETURN, 0, 3), unit(READ, 0, 3)), unit(RETURN, 0, 3), f"reads {ON_HOST}"
    ),
    "it is written before it is there": Fault(
        ONE, move(unit(WRITE, 0, 3), unit(LEAVE, 0, 3)), unit(WRITE, 0, 3), f"reads {ON_HOST}"
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_refused(fault: Fault) -> None:
    fault.assert_refused()
