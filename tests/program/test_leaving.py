"""Activations that leave the device, in lists: which ones, where the copies stand, what they cost, what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest

from megazero.config.tiers import Tier
from megazero.program.effects import Scope
from megazero.program.instruction import Instruction, Kind, Lane, Op
from megazero.program.memory import MemoryColumn, StepBytes, UnitSizes
from megazero.program.memory_walk import host_buffers, samples
from megazero.program.passes.kept_graphs import kept_graphs
from megazero.program.passes.leaving import LEAST_DISTANCE, leaving_graphs, place_leaving
from megazero.program.scope import FIRST, LATE, ON_TIME
from megazero.program.simulate import simulate
from megazero.program.times import uniform_times
from megazero.program.trace import trace
from megazero.program.traffic import traffic
from megazero.report.trace_files import write
from tests.program import kinds
from tests.program.faults import Fault, again, drop, move, swap, unit
from tests.program.made import lettered
from tests.program.steps import Model, Step, checked, drawn, step_of

ONE = Model(pp=1, micro_batches=1, zero=0, dp=1, units=(3,), leaving=1.0)
"""Embedding, three blocks and a head: units 0 to 4."""
LETTERS: dict[Kind, str] = {
    Op.FORWARD: "f",
    Op.BACKWARD: "b",
    Op.BACKWARD_INPUT: "b",
    Op.BACKWARD_WEIGHT: "w",
    kinds.LEAVE: "out",
}
LETTERS |= {kinds.FREE: "free", kinds.RETURN: "in"}


def words(instructions: Sequence[Instruction]) -> str:
    """Computations and copies of the first micro-batch: f0 is the forward of unit 0, out0 copies what it keeps, in0
    brings it back.
    """
    return lettered([i for i in instructions if i.micro_batch == 0], LETTERS)


def listed(model: Model, stage: int = 0) -> tuple[Instruction, ...]:
    return step_of(model).lists[stage, 0]


def test_a_copy_out_follows_its_forward_and_a_copy_back_is_a_computation_ahead() -> None:
    assert words(listed(ONE)) == ("f0 out0 f1 free0 out1 f2 free1 out2 f3 free2 f4 b4 in2 b3 in1 b2 in0 b1 b0"), (
        "what units 3 and 4 keep is used at once"
    )


def test_the_furthest_next_use_leaves_first() -> None:
    """Of 60 bytes that have time to leave, unit 0 keeps 10, unit 1 20 and unit 2 30."""
    for share, leaving in ((0.1, ""), (1 / 6, "0"), (0.5, "01"), (0.84, "01"), (1.0, "012")):
        found = words(listed(replace(ONE, leaving=share)))
        assert [word for word in found.split() if word.startswith("out")] == [f"out{n}" for n in leaving], share


def test_of_equal_distances_the_first_leave() -> None:
    found = listed(replace(ONE, micro_batches=3, leaving=0.4))  # 72 bytes of 180: three times unit 0, twice unit 1
    assert [(i.micro_batch, i.units) for i in found if i.op == kinds.LEAVE] == [
        *((0, (0, 1)), (0, (1, 2))),
        *((1, (0, 1)), (1, (1, 2))),
        (2, (0, 1)),
    ]


def test_a_split_backward_needs_activations_for_its_first_half() -> None:
    """zb-h1 on the first of two stages. The second half has what it needs on the device."""
    found = words(listed(Model("zb-h1", micro_batches=2, units=(1,), leaving=1.0)))
    assert found == "f0 out0 f1 free0 in0 b1 b0 w1 w0"


def test_a_stage_that_is_waited_for_keeps_its_last_units() -> None:
    """1f1b: the last stage begins its backward at once, the first one has the most time."""
    model = Model(pp=3, micro_batches=4, units=(2,), leaving=1.0)
    counts = [sum(i.op == kinds.LEAVE for i in listed(model, stage)) for stage in range(3)]
    assert counts[0] == 4 * 3 and 0 < counts[2] < 4 * 3


def away(instructions: Sequence[Instruction]) -> None:
    """Each copy out is freed behind one computation and comes back ahead of one, with another one between."""
    order = [i for i in instructions if i.op in LETTERS]
    for at, i in enumerate(order):
        if i.op != kinds.LEAVE:
            continue
        own = {j.op: n for n, j in enumerate(order) if j._replace(op=kinds.LEAVE) == i}
        computed = [sum(j.is_compute for j in order[:n]) for n in (at, own[kinds.FREE], own[kinds.RETURN])]
        end = min(own[op] for op in (Op.BACKWARD, Op.BACKWARD_INPUT) if op in own)
        assert order[at - 1] == i._replace(op=Op.FORWARD) or order[at - 1].op == kinds.FREE
        assert computed[1] - computed[0] == 1 and computed[2] - computed[1] >= 1
        assert sum(j.is_compute for j in order[own[kinds.RETURN] : end]) == 1


@pytest.mark.slow
def test_drawn_steps_are_legal_and_keep_to_their_share(seed: int) -> None:
    source = random.Random(seed)
    left = 0
    for _ in range(60):
        model = replace(
            drawn(source), leaving=source.choice((0.2, 0.7, 1.0)), evaluation=False, parts=(), disk_buffers=None
        )
        model = replace(model, rests=Tier.DEVICE, sums=Tier.DEVICE, border=source.choice((ON_TIME, FIRST, LATE)))
        step = checked(step_of(model))
        for role, instructions in step.lists.items():
            away(instructions)
            shape = step.shapes[role]
            graphs = kept_graphs(instructions, shape)
            able = sum(graph.nbytes for graph in graphs if graph.distance >= LEAST_DISTANCE)
            moved = traffic(instructions, shape)
            out = moved.get(Lane.TO_HOST, 0)
            assert out == moved.get(Lane.TO_DEVICE, 0) <= model.leaving * able
            assert out == able or model.leaving < 1
            left += out
            chosen = leaving_graphs(graphs, model.leaving)
            nearest = min((graph.distance for graph in chosen), default=0)
            for graph in graphs:  # what stays has a nearer use, or more bytes than the share has left
                assert graph in chosen or graph.distance <= nearest or graph.nbytes > model.leaving * able - out
    assert left


def test_a_list_without_backward_or_bytes_is_not_changed() -> None:
    plain = listed(replace(ONE, leaving=0.0))
    shape = step_of(replace(ONE, leaving=0.0)).shapes[0, 0]
    assert place_leaving(plain, shape, 1.0) == plain
    forwards = tuple(takewhile(lambda i: i.op is Op.FORWARD, listed(replace(ONE, leaving=0.0))))
    assert place_leaving(forwards, step_of(ONE).shapes[0, 0], 1.0) == forwards


LEAVE, FREE, RETURN = "copy activations to host memory", "free activations", "copy activations to the device"
ON_HOST = "the host's copy of the activations"
HOST = Model(micro_batches=3, leaving=1.0)
"""The first of two stages: embedding and two blocks."""
FAULTS = {
    "a backward before its return": Fault(
        HOST, move(unit(RETURN, 0, 1), unit("backward", 0, 0)), unit("backward", 0, 1), "free activations"
    ),
    "a return is missing": Fault(
        HOST, drop(unit(RETURN, 0, 1)), unit("backward", 0, 1), f"{FREE} (micro-batch 0, chunk 0, unit 1), has ended"
    ),
    "the same leaves twice": Fault(
        HOST, again(unit(LEAVE, 0, 0)), unit(LEAVE, 0, 0), f"makes {ON_HOST} of units 0 to 0", 1
    ),
    "the same returns twice": Fault(
        HOST, again(unit(RETURN, 0, 1)), unit(RETURN, 0, 1), f"reads {ON_HOST} of units 1 to 1", 1
    ),
    "nothing was copied": Fault(HOST, drop(unit(LEAVE, 0, 0)), unit(FREE, 0, 0), f"reads {ON_HOST}"),
    "it leaves before its forward": Fault(
        HOST, move(unit(LEAVE, 0, 0), unit("forward", 0, 0)), unit(LEAVE, 0, 0), "which no instruction before"
    ),
    "it is freed before it is copied": Fault(
        HOST, move(unit(FREE, 0, 0), unit(LEAVE, 0, 0)), unit(FREE, 0, 0), f"reads {ON_HOST}"
    ),
    "it is freed twice": Fault(
        HOST, again(unit(FREE, 0, 0)), unit(FREE, 0, 0), f"{FREE} (micro-batch 0, chunk 0, unit 0), has ended", 1
    ),
    "it is never freed": Fault(
        HOST, drop(unit(FREE, 0, 0)), unit(RETURN, 0, 0), "makes the activations of units 0 to 0"
    ),
    "it returns before it is freed": Fault(
        HOST, swap(unit(FREE, 0, 0), unit(RETURN, 0, 0)), unit(RETURN, 0, 0), "makes the activations of units 0"
    ),
    "a copy on the host is left": Fault(
        HOST,
        lambda own: drop(unit(FREE, 2, 0))(drop(unit(RETURN, 2, 0))(own)),
        unit(Op.BACKWARD.value, 2, 0),
        "the activations of units 0 to 0 of chunk 0 as one graph (micro-batch 2) are on their way to host memory",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_refused(fault: Fault) -> None:
    fault.assert_refused()


def test_copies_travel_beside_computations() -> None:
    """A unit computes for a time of 1 forward and 2 backward. A copy of 30 bytes takes as long as is said here."""
    step = step_of(ONE)
    plain = step_of(replace(ONE, leaving=0.0))

    def took(of: Step, per_byte: float) -> float:
        times = replace(uniform_times(1, 5.0, 10.0), per_byte=dict.fromkeys((Lane.TO_HOST, Lane.TO_DEVICE), per_byte))
        return simulate([of.lists[0, 0]], times, [of.shapes[0, 0]]).makespan

    assert took(plain, 0.0) == took(step, 0.0) == took(step, 1 / 30) == 15
    # Unit 2's 30 bytes take 2 and unit 1's 20 take 4/3 beside a forward of 1. Back none takes more than a backward's 2.
    assert took(step, 2 / 30) == pytest.approx(15 + 1 / 3 + 1)


def test_memory_is_free_from_free_to_return() -> None:
    """Every unit keeps 50 and its input of 10; the embedding has none."""
    step = step_of(replace(ONE, micro_batches=2))
    units = tuple(UnitSizes(input=10 * (n > 0), kept=50, forward=80, backward=120) for n in range(5))
    scope, sizes = Scope(step.shapes[0, 0], 1), StepBytes(10, (units,))
    found = list(samples(step.lists[0, 0], scope, sizes))
    expected_host = expected = 0
    for sample in found:
        i, size = sample.instruction, 60 - 10 * (sample.instruction.units == (0, 1))
        expected_host += size * (i.op == kinds.LEAVE)
        expected += size * ((i.op in (Op.FORWARD, kinds.RETURN)) - (i.op == kinds.FREE))
        if i.op is Op.BACKWARD:
            expected -= size
            expected_host -= size * (i.units in ((0, 1), (1, 2), (2, 3)))
            continue  # the sample shows it while it runs
        if i.op != kinds.FREE:  # the same
            assert sample.columns.get(MemoryColumn.ACTIVATIONS, 0) == expected, sample
        assert sample.columns.get(MemoryColumn.HOST, 0) == expected_host, sample
        assert sample.total == sum(size for c, size in sample.columns.items() if c is not MemoryColumn.HOST)
    assert expected == expected_host == 0
    assert sorted(host_buffers(step.lists[0, 0], scope, sizes)) == [50, 60, 60]
    most = max(sample.columns.get(MemoryColumn.ACTIVATIONS, 0) for sample in found)
    assert most == 2 * 60, "one that computes, and one that is copied"


def test_a_picture_says_how_much_is_on_the_host(tmp_path: Path) -> None:
    step = step_of(ONE)
    sizes = StepBytes(10, ((UnitSizes(kept=50, forward=80, backward=120),) * 5,))
    units = {(0, n): f"unit {n}" for n in range(5)}
    found = trace("a rank", step.lists[0, 0], Scope(step.shapes[0, 0], 1), sizes, units)
    picture, numbers = write([found], tmp_path / "memory.svg")
    assert "; beside it at most 150 B of host memory" in picture.read_text()
    for line in json.loads(numbers.read_text())["ranks"][0]["instructions"]:
        assert line["bytes"] == sum(line["columns"].values()) - line["columns"].get("host memory", 0)
