"""The end of a step's list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megazero.program.instruction import Instruction, Kind, Op
from megazero.program.passes.updates import place_across, place_norm, updates_of
from megazero.program.shape import BucketShape, RankShape
from tests.program import kinds
from tests.program.made import lettered, shape, texts

REDUCTIONS = [
    item
    for bucket in (2, 1, 0)
    for item in (Instruction(Op.BACKWARD, 0, 0, units=(bucket, bucket + 1)), Instruction(Op.REDUCE, buckets=(bucket,)))
]


LETTERS: dict[Kind, str] = {Op.BACKWARD: "b", Op.REDUCE: "r", Op.REDUCE_ACROSS: "a", Op.NORM: "n"}
LETTERS |= {kinds.UPDATE: "u", Op.GATHER: "g", Op.REDUCE_PARTIAL: "p"}


def short(instructions: tuple[Instruction, ...]) -> str:
    return lettered(instructions, LETTERS)


def test_a_sum_across_follows_the_next_backward() -> None:
    """Before that backward it would make the card wait for a reduction that has just begun."""
    assert short(place_across(REDUCTIONS, shape([[0], [1], [2]], across=2))) == "b2 r2 b1 a2 r1 b0 a1 r0 a0"
    two = [REDUCTIONS[0], REDUCTIONS[1], *REDUCTIONS[3:]]
    assert short(place_across(two, shape([[0], [1], [2]], across=2))) == "b2 r2 r1 b0 a2 a1 r0 a0"
    assert place_across(REDUCTIONS, shape([[0], [1], [2]])) == tuple(REDUCTIONS)


def test_only_the_last_reduction_of_a_bucket_is_followed_by_its_sum_across() -> None:
    found = short(place_across(REDUCTIONS * 2, shape([[0], [1], [2]], across=2)))
    assert found == "b2 r2 b1 r1 b0 r0 b2 r2 b1 a2 r1 b0 a1 r0 a0"


def test_a_bucket_of_several_stages_is_summed_across_last() -> None:
    """Its stages end their backwards at different times, and its group's messages must have one order."""
    rank = shape([[0], [1], [2]], across=2)
    rank = replace(rank, buckets=(*rank.buckets[:2], replace(rank.buckets[2], spans_stages=True)))
    assert short(place_across(REDUCTIONS, rank)) == "b2 r2 b1 r1 b0 a1 r0 a0 a2"


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "n u012"),
        ({"shards": 4}, "n u012"),
        ({"shards": 4, "sharded_state": True}, "n u0 g0 u1 g1 u2 g2"),
        ({"shards": 1, "sharded_state": True}, "n u012"),
        ({"shards": 4, "sharded_state": True, "gathered": True}, "n u012"),
    ],
    ids=str,
)
def test_updates_come_after_the_norm_and_gathers_after_their_update(fields: dict[str, object], end: str) -> None:
    """A bucket is updated alone where its gather follows, so that it travels while the next one is updated."""
    found = with_updates(REDUCTIONS, shape([[0], [1], [2]], **fields))
    assert found[: len(REDUCTIONS)] == tuple(REDUCTIONS)
    assert short(found[len(REDUCTIONS) :]) == end


def with_updates(instructions: Sequence[Instruction], shape: RankShape) -> tuple[Instruction, ...]:
    """The list with the norm and all updates."""
    return (*place_norm(instructions, shape), *updates_of(shape.trained, shape))


def test_some_buckets_may_stay_whole_and_some_be_frozen() -> None:
    rank = shape([[0], [1], [2], [3]], shards=2, sharded_state=True)
    buckets = list(rank.buckets)
    buckets[0], buckets[3] = replace(buckets[0], gathered=True), replace(buckets[3], trained=False)
    assert short(with_updates((), RankShape(rank.units, tuple(buckets)))) == "n u1 g1 u2 g2 u0"


def test_partial_sums_come_before_the_norm() -> None:
    rank = replace(shape([[0]]), sums_partials=True)
    assert texts(with_updates((), rank)) == ["sum partial gradients over tp", "norm", "update (bucket 0)"]


def test_which_buckets_are_gathered_after_their_update() -> None:
    zero_1 = BucketShape(0, 8, 16, sharded_state=True, shards=2)
    assert zero_1.gathered_after_update
    for other in ({"shards": 1}, {"sharded_state": False}, {"gathered": True}, {"trained": False}):
        assert not replace(zero_1, **other).gathered_after_update
