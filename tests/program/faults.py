"""Faults to plant in lists: how to change the list of one stage, and what the checker has to say of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from megazero.program.instruction import Instruction, Kind, Op, ProgramError
from megazero.program.passes.vertical import VerticalOrder
from tests.program import kinds
from tests.program.steps import Model, changed, checked, step_of

List = list[Instruction]


def find(instructions: List, text: str, nth: int = 0) -> int:
    """The number of the nth instruction whose text begins so; a negative nth counts from the end."""
    found = [number for number, i in enumerate(instructions) if str(i).startswith(text)]
    assert -len(found) <= nth < len(found), (text, nth, len(found))
    return found[nth]


def words_of(op: Kind) -> Callable[..., str]:
    """The begin of the texts of an instruction, as a function of its bucket and part."""
    return lambda bucket, part=None: f"{op.value} (bucket {bucket}" + ("" if part is None else f", part {part}")


def all_words_of(*kinds: Kind) -> list[Callable[..., str]]:
    """`words_of` each of these kinds."""
    return [words_of(kind) for kind in kinds]


def drop(text: str, nth: int = 0) -> Callable[[List], List]:
    """Leave an instruction out."""

    def without(own: List) -> List:
        at = find(own, text, nth)
        return [*own[:at], *own[at + 1 :]]

    return without


def again(text: str, nth: int = 0) -> Callable[[List], List]:
    """Have an instruction twice, one behind the other."""

    def twice(own: List) -> List:
        at = find(own, text, nth)
        return [*own[: at + 1], *own[at:]]

    return twice


def move(text: str, before: str, nth: int = 0, at: int = 0) -> Callable[[List], List]:
    """Move an instruction in front of the at-th one of another text."""

    def moved(own: List) -> List:
        source = find(own, text, nth)
        rest = [*own[:source], *own[source + 1 :]]
        target = find(rest, before, at)
        return [*rest[:target], own[source], *rest[target:]]

    return moved


def swap(one: str, other: str, nth: int = 0, at: int = 0) -> Callable[[List], List]:
    """Exchange two instructions."""

    def swapped(own: List) -> List:
        a, b = find(own, one, nth), find(own, other, at)
        changed = list(own)
        changed[a], changed[b] = own[b], own[a]
        return changed

    return swapped


def alter(text: str, nth: int = 0, **fields: object) -> Callable[[List], List]:
    """Change fields of an instruction."""

    def altered(own: List) -> List:
        at = find(own, text, nth)
        return [*own[:at], own[at]._replace(**fields), *own[at + 1 :]]  # type: ignore[arg-type]

    return altered


def put(i: Instruction, before: str, at: int = 0) -> Callable[[List], List]:
    """Insert an instruction."""
    return lambda own: [*own[: find(own, before, at)], i, *own[find(own, before, at) :]]


class Fault(NamedTuple):
    """A change to the list of `stage` in the step of `model`.

    named  the text of the instruction that is refused
    says   part of the message
    nth    which instruction of that text, in the list as changed
    """

    model: Model
    change: Callable[[List], List]
    named: str
    says: str
    nth: int = 0
    stage: int = 0

    def assert_refused(self) -> None:
        """The step is legal, and with the change the checker refuses it and names stage and instruction."""
        step = checked(step_of(self.model))
        planted = self.change(list(step.lists[self.stage, 0]))
        with pytest.raises(ProgramError) as refused:
            checked(changed(step, self.stage, tuple(planted)))
        error = refused.value
        assert self.says in str(error)
        assert error.number == find(planted, self.named, self.nth), str(error)
        assert error.rank == f"stage {self.stage}"
        assert str(error).startswith(f"stage {self.stage}: number {error.number} of its list, {self.named}")


ZERO3 = Model(zero=3, across=2, partial=True, budget="two")
"""Two stages by 1F1B, two blocks each, 3 micro-batches; 4 replicas, of which two hold the same shard. Buckets of stage
0: 0 embedding, 1 and 2 blocks; of stage 1: 0 and 1 blocks, 2 head.
"""
ZERO1 = Model("zb-h1", zero=1, tied=True, partial=True)
"""Split backwards, a tied embedding: bucket 0 of stage 0 is bucket 3 of stage 1."""
ZERO2 = Model("interleaved", virtual=2, micro_batches=4, zero=2)
MERGED = Model(zero=2, merged=True)
ZERO0 = Model(zero=0, pp=3, merged=True)
EVALUATION = Model(zero=3, evaluation=True)
ADAPTERS = Model(zero=3, frozen=True)
VERTICAL = Model(zero=3, vertical=VerticalOrder())
VERTICAL2 = Model("interleaved", virtual=2, micro_batches=4, zero=2, vertical=VerticalOrder(2))

FORWARD, BACKWARD, INPUT, WEIGHTS = "forward", "backward", "backward of the input", "backward of the weights"
GATHER, RELEASE = "gather parameters (bucket {})", "free parameters (bucket {})"
REDUCE = "reduce gradients (bucket {})"
SENDS, RECEIVES = "send hidden states", "receive hidden states"


def unit(what: str, micro_batch: int, number: int | None = None, chunk: int = 0) -> str:
    """The text of a computation of one unit, or of the whole chunk."""
    return f"{what} (micro-batch {micro_batch}, chunk {chunk}" + (")" if number is None else f", unit {number})")


FAULTS = {
    # parameters
    "a gather is missing": Fault(
        ZERO3, drop(GATHER.format(1)), unit(FORWARD, 0, 1), "parameters of bucket 1, which no instruction before"
    ),
    "a later gather is missing": Fault(
        ZERO3, drop(GATHER.format(0), 1), unit(FORWARD, 1, 0), "bucket 0, which number 3, free parameters"
    ),
    "a gather comes after its use": Fault(
        ZERO3, move(GATHER.format(0), unit(FORWARD, 0, 1)), unit(FORWARD, 0, 0), "whole parameters of bucket 0", stage=1
    ),
    "a release comes before its use": Fault(
        ZERO3, move(RELEASE.format(0), unit(FORWARD, 0, 0)), unit(FORWARD, 0, 0), "number 2, free parameters"
    ),
    "a release comes before a backward": Fault(
        ZERO3, move(RELEASE.format(2), unit(BACKWARD, 0, 2), 1), unit(BACKWARD, 0, 2), "bucket 2, which number"
    ),
    "a gather of what is gathered": Fault(
        ZERO3, again(GATHER.format(1)), GATHER.format(1), "which number 1, gather parameters (bucket 1), made", 1
    ),
    "a release of what is released": Fault(ZERO3, again(RELEASE.format(1)), RELEASE.format(1), "has ended", 1),
    "a release is missing in the middle": Fault(
        ZERO3, drop(RELEASE.format(0)), GATHER.format(2), "of gathered parameters, the budget is 360"
    ),
    "the last release is missing": Fault(
        ZERO3, drop(RELEASE.format(0), -1), GATHER.format(0), "which nothing after it releases", -1
    ),
    "a gather of another bucket": Fault(
        ZERO3, alter(GATHER.format(2), buckets=(0,)), GATHER.format(0), "which number 4, gather parameters", 2
    ),
    "a release of another bucket": Fault(
        ZERO3, alter(RELEASE.format(0), buckets=(2,)), RELEASE.format(2), "which no instruction before it has made"
    ),
    "a gather of what no rank has": Fault(
        ZERO3, alter(GATHER.format(1), buckets=(7,)), GATHER.format(7), "names bucket 7 of 3"
    ),
    "too much is gathered ahead": Fault(
        ZERO3, move(GATHER.format(2), unit(FORWARD, 0, 0)), GATHER.format(2), "the budget is 360"
    ),
    "a gather of what every rank keeps": Fault(
        ZERO0, put(Instruction(Op.GATHER, buckets=(0,)), FORWARD), GATHER.format(0), "every rank has from the start"
    ),
    "a release of what every rank keeps": Fault(
        ZERO0, put(Instruction(kinds.RELEASE, buckets=(1,)), "norm"), RELEASE.format(1), "which nothing makes again"
    ),
    "frozen parameters are not gathered": Fault(
        ADAPTERS, drop(GATHER.format(2)), unit(FORWARD, 0, 0), "whole parameters of bucket 2"
    ),
    "an evaluation that keeps parameters": Fault(
        EVALUATION, drop(RELEASE.format(2), -1), GATHER.format(2), "which nothing after it releases", -1, stage=1
    ),
    # gradients
    "a reduction is missing": Fault(
        ZERO1, drop(REDUCE.format(1)), "sum partial gradients over tp", "the reduced gradient of bucket 1"
    ),
    "the last of several reductions is missing": Fault(
        ZERO2, drop(REDUCE.format(3), -1), unit(BACKWARD, 3, 0, 1), "the gradient of bucket 3", 0
    ),
    "a reduction comes twice": Fault(
        ZERO1, again(REDUCE.format(1)), REDUCE.format(1), "which number 27, reduce gradients", 1
    ),
    "a sharded gradient is reduced twice": Fault(
        ZERO2, again(REDUCE.format(4)), REDUCE.format(4), "the gradient of bucket 4", 1, stage=1
    ),
    "a reduction comes before its backward": Fault(
        ZERO1, move(REDUCE.format(0), unit(WEIGHTS, 2, 0)), REDUCE.format(0), "before it is complete: 1 backwards"
    ),
    "a reduction comes a micro-batch early": Fault(
        ZERO0, move(REDUCE.format(1), unit(BACKWARD, 1)), REDUCE.format(1), "before it is complete: 4 backwards"
    ),
    "a sharded gradient is reduced before it is complete": Fault(
        MERGED,
        move(REDUCE.format(0), unit(BACKWARD, 2, 0), -1),
        unit(BACKWARD, 2, 0),
        "before it was complete",
        stage=1,
    ),
    "a sharded gradient is reduced before anything is added": Fault(
        ZERO2, move(REDUCE.format(0), unit(BACKWARD, 3, 0), -1), REDUCE.format(0), "bucket 0, which number", -1
    ),
    "a reduction of frozen parameters": Fault(
        ADAPTERS, put(Instruction(Op.REDUCE, buckets=(3,)), "norm"), REDUCE.format(3), "the gradient of bucket 3"
    ),
    "a reduction across is missing": Fault(
        ZERO3, drop("reduce gradients across (bucket 2)"), "sum partial", "the reduced gradient of bucket 2"
    ),
    "a reduction across comes before the one inside": Fault(
        ZERO3,
        move("reduce gradients across (bucket 2)", REDUCE.format(2)),
        "reduce gradients across (bucket 2)",
        "the gradient reduced among the ranks that share the shards of bucket 2",
    ),
    "a reduction across between two inside": Fault(
        ZERO3,
        move("reduce gradients across (bucket 2)", REDUCE.format(2), 0, -1),
        REDUCE.format(2),
        "which nothing after it reads",
        -1,
    ),
    "a reduction across comes twice": Fault(
        ZERO3, again("reduce gradients across (bucket 1)"), "reduce gradients across (bucket 1)", "has ended", 1
    ),
    "a sum over tp is missing": Fault(
        ZERO1, drop("sum partial"), "norm", "the gradient summed over tp of bucket 0", stage=1
    ),
    "a sum over tp of what is whole": Fault(
        ZERO2, put(Instruction(Op.REDUCE_PARTIAL), "norm"), "norm", "the reduced gradient of bucket 0", stage=1
    ),
    "a sum over tp comes before the last reduction": Fault(
        ZERO1, move("sum partial", REDUCE.format(0)), "sum partial", "the reduced gradient of bucket 0"
    ),
    # norm and updates
    "the norm is missing": Fault(ZERO2, drop("norm"), "update (bucket 0)", "reads the norm"),
    "the norm comes twice": Fault(ZERO2, again("norm"), "norm", "makes the norm, which number 84", 1),
    "the norm comes before a reduction": Fault(
        ZERO2, move("norm", REDUCE.format(2), 0, 0), "norm", "the reduced gradient of bucket 0", stage=1
    ),
    "an update comes before the norm": Fault(
        ZERO2, move("update (bucket 2)", "norm"), "update (bucket 2)", "reads the norm"
    ),
    "an update is missing": Fault(ZERO2, drop("update (bucket 1)"), GATHER.format(1), "every rank has from the start"),
    "an update comes twice": Fault(
        ZERO2, again("update (bucket 1)"), "update (bucket 1)", "the reduced gradient of bucket 1, which number", 1
    ),
    "two instructions update a bucket": Fault(
        ZERO3, put(Instruction(kinds.UPDATE, buckets=(1,)), "update"), "update (buckets 0, 1, 2)", "bucket 1"
    ),
    "an update leaves a bucket out": Fault(
        ZERO3,
        alter("update", buckets=(0, 2)),
        "sum partial gradients over tp",
        "bucket 1, with which nothing after it updates the weights",
    ),
    "an update names a bucket twice": Fault(
        ZERO3, alter("update", buckets=(0, 1, 2, 2)), "update (buckets 0, 1, 2, 2)", "names a bucket twice", stage=1
    ),
    "updated parameters are not gathered": Fault(
        ZERO1, drop(GATHER.format(2)), "update (bucket 2)", "which nothing makes again"
    ),
    "parameters are gathered before their update": Fault(
        ZERO1, swap("update (bucket 1)", GATHER.format(1)), GATHER.format(1), "every rank has from the start"
    ),
    # units and micro-batches
    "a forward of a unit is missing": Fault(
        ZERO3, drop(unit(FORWARD, 1, 1)), unit(FORWARD, 1, 2), "out of turn: the next is unit 1"
    ),
    "a forward of a unit comes twice": Fault(
        ZERO1, again(unit(FORWARD, 0, 1)), unit(FORWARD, 0, 1), "out of turn: the next is unit 2", 1
    ),
    "units are computed in a wrong order": Fault(
        ZERO1, swap(unit(FORWARD, 0, 0), unit(FORWARD, 0, 1)), unit(FORWARD, 0, 1), "the next is unit 0", stage=1
    ),
    "units go backward in a wrong order": Fault(
        ZERO2, swap(unit(BACKWARD, 0, 2), unit(BACKWARD, 0, 1)), unit(BACKWARD, 0, 1), "the next is unit 2"
    ),
    "a whole forward comes twice": Fault(
        ZERO0, again(unit(FORWARD, 1)), unit(FORWARD, 1), "computes units a second time", 1
    ),
    "a backward of a unit is missing": Fault(
        ZERO2, drop(unit(BACKWARD, 2, 1, 1)), REDUCE.format(3), "the gradient of bucket 3", 2, stage=1
    ),
    "the last backward of the weights is missing": Fault(
        ZERO1, drop(unit(WEIGHTS, 1)), REDUCE.format(2), "before it is complete: 1 backwards", stage=1
    ),
    "a backward comes before its forward": Fault(
        ZERO0, swap(unit(FORWARD, 1), unit(BACKWARD, 1)), unit(BACKWARD, 1), "reads the activations", stage=2
    ),
    "weights go before the input": Fault(
        ZERO1, swap(unit(INPUT, 1), unit(WEIGHTS, 1)), unit(WEIGHTS, 1), "what the weights' backward needs"
    ),
    "a graph is not cut where its backward is": Fault(
        ZERO1, alter(unit(INPUT, 1), units=(2, 3)), unit(INPUT, 1, 2), "the activations of units 2 to 2"
    ),
    "units that no chunk has": Fault(
        ZERO0, alter(unit(FORWARD, 1), units=(0, 9)), "forward (micro-batch 1, chunk 0, units 0", "a chunk of 3"
    ),
    "a micro-batch that no step has": Fault(
        ZERO0, alter(unit(FORWARD, 1), micro_batch=3), unit(FORWARD, 3), "micro-batch 3 of 0 to 2"
    ),
    # vertical order
    "a unit is released before all of a group have passed it": Fault(
        VERTICAL, move(RELEASE.format(0), unit(FORWARD, 2, 0)), unit(FORWARD, 2, 0), "bucket 0, which number"
    ),
    "a gradient is reduced before all of a group have added to it": Fault(
        VERTICAL, move(REDUCE.format(2), unit(BACKWARD, 2, 2)), unit(BACKWARD, 2, 2), "before it was complete"
    ),
    "a micro-batch of a group skips a unit": Fault(
        VERTICAL2, drop(unit(FORWARD, 1, 1)), unit(FORWARD, 1, 2), "out of turn: the next is unit 1"
    ),
    "a micro-batch goes on in front of its group's row": Fault(
        VERTICAL, swap(unit(FORWARD, 1, 0), unit(FORWARD, 1, 1)), unit(FORWARD, 1, 1), "the next is unit 0", stage=1
    ),
    "a message of a group leaves before its last unit": Fault(
        VERTICAL2, move(SENDS, unit(FORWARD, 0, 2)), SENDS, "the hidden states before model chunk 1"
    ),
    "the next unit is gathered while two are there": Fault(
        VERTICAL, move(GATHER.format(2), unit(FORWARD, 2, 0)), GATHER.format(2), "the budget is 360"
    ),
    # messages
    "a send is missing": Fault(ZERO0, drop(SENDS, 2), unit(FORWARD, 2, 1), "which nothing after it reads", stage=1),
    "a send comes before its computation": Fault(
        ZERO0, move(SENDS, FORWARD, 0, 0), SENDS, "the hidden states before model chunk 1"
    ),
    "a receive is missing": Fault(ZERO0, drop(RECEIVES, 1), unit(FORWARD, 1), "before model chunk 1", stage=1),
    "a receive comes twice": Fault(
        ZERO0, again(RECEIVES, 1), RECEIVES, "which number 1, receive hidden states", 2, stage=1
    ),
    "two receives in another order": Fault(
        ZERO0,
        swap(RECEIVES, RECEIVES, 0, 1),
        RECEIVES,
        "micro-batch 0 is sent, boundary 0 of micro-batch 1",
        0,
        stage=1,
    ),
    "a send to another stage": Fault(ZERO0, alter(SENDS, 0, peer=0), SENDS, "model chunk 2 is on stage 2", stage=1),
    "another model chunk": Fault(
        ZERO0, alter(unit(FORWARD, 1), model_chunk=2), unit(FORWARD, 1), "chunk 0 is model chunk 1", stage=1
    ),
    "a stage without a norm": Fault(
        Model(zero=0, pp=2, frozen=False),
        lambda own: [i for i in own if i.op not in (Op.NORM, kinds.UPDATE)],
        REDUCE.format(2),
        "nothing after it updates the weights",
        stage=1,
    ),
}
