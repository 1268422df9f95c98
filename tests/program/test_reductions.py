"""Where gradients are reduced: each when it is complete, each as often as it has to be, in one order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megazero.pipeline.schedule import CHUNKS, make_schedule
from megazero.program.instruction import Instruction, Op
from megazero.program.passes.cut import cut, every_pass
from megazero.program.passes.reductions import place_reductions, reducing_passes
from megazero.program.shape import RankShape
from tests.program.made import shape, texts

SPREAD = ([[0], [1, 2], [2, 3]], [[4], [4, 5]])
"""A bucket of two units, a unit of two buckets, and two chunks."""


def schedules() -> list[tuple[str, int]]:
    return [(name, chunks or count) for name, chunks in CHUNKS.items() for count in (1, 2) if chunks in (None, count)]


def adds(instructions: Sequence[Instruction], rank: RankShape, bucket: int) -> list[int]:
    """The places of the instructions that complete gradients of a bucket."""
    found = []
    for at, i in enumerate(instructions):
        if i.ends_backward:
            units = range(*i.units) if i.units else range(len(rank.units[i.chunk]))
            if any(bucket in rank.units[i.chunk][unit].gradients for unit in units):
                found.append(at)
    return found


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize(("name", "virtual"), schedules())
def test_complete_and_once(name: str, virtual: int, every: bool, cuts: bool) -> None:
    rank = shape(*SPREAD[:virtual], sharded_gradient=every)
    for m in (1, 2, 5):
        for stage in make_schedule(name, 3, m, virtual):
            instructions = cut(stage, rank, every_pass(stage)) if cuts else stage
            found = place_reductions(instructions, rank, every=every)
            assert tuple(i for i in found if i.op is not Op.REDUCE) == tuple(instructions)
            reduced = Counter(i.buckets for i in found if i.op is Op.REDUCE)
            assert reduced == {(bucket,): m if every else 1 for bucket in rank.trained}
            for bucket in rank.trained:
                places = [at for at, i in enumerate(found) if i.op is Op.REDUCE and i.buckets == (bucket,)]
                completed = adds(found, rank, bucket)
                assert max(completed) < places[-1], "no gradient comes after the last reduction"
                for place in places:
                    before = max(at for at in completed if at < place)
                    assert all(i.op is Op.REDUCE for i in found[before + 1 : place]), "as soon as it is complete"
                    run = [i.buckets[0] for i in found[before + 1 : place + 1]]
                    assert run == sorted(run, reverse=True), "the last bucket first"


def test_the_list_of_a_cut_backward() -> None:
    (only,) = make_schedule("1f1b", 1, 2)
    rank = shape(SPREAD[0])
    found = place_reductions(cut(only, rank, {(1, 0)}), rank, every=False)
    assert texts(found) == [
        "forward (micro-batch 0, chunk 0)",
        "backward (micro-batch 0, chunk 0)",
        *(f"forward (micro-batch 1, chunk 0, unit {n})" for n in range(3)),
        "backward (micro-batch 1, chunk 0, unit 2)",
        "reduce gradients (bucket 3)",
        "backward (micro-batch 1, chunk 0, unit 1)",
        "reduce gradients (bucket 2)",
        "reduce gradients (bucket 1)",
        "backward (micro-batch 1, chunk 0, unit 0)",
        "reduce gradients (bucket 0)",
    ]


def test_the_last_backward_of_a_chunk_reduces_or_every_one() -> None:
    for name, virtual in schedules():
        for stage in make_schedule(name, 3, 7, virtual):
            ends = [(i.micro_batch, i.chunk) for i in stage if i.ends_backward]
            last = [next(p for p in reversed(ends) if p[1] == chunk) for chunk in range(virtual)]
            assert reducing_passes(stage, every=False) == set(last)
            assert reducing_passes(stage, every=True) == set(ends)


def test_a_table_of_two_chunks_is_reduced_with_the_first() -> None:
    """An embedding that the head on the same rank uses too: the backward of chunk 0 comes last."""
    rank = shape([[0], [1]], [[2], [0, 3]])
    (only,) = make_schedule("interleaved", 1, 3, 2)
    found = place_reductions(only, rank, every=False)
    assert [i.buckets for i in found if i.op is Op.REDUCE] == [(3,), (2,), (1,), (0,)]
    assert found[-3].op is Op.BACKWARD and found[-3].chunk == 0


def test_frozen_parameters_are_not_reduced() -> None:
    """Their units have no gradient of them."""
    rank = shape([[0, 1], [2]], sharded_gradient=True)
    units = ((replace(rank.units[0][0], gradients=(0,)), rank.units[0][1]),)
    buckets = (rank.buckets[0], replace(rank.buckets[1], trained=False), rank.buckets[2])
    (only,) = make_schedule("1f1b", 1, 2)
    found = place_reductions(only, RankShape(units, buckets), every=True)
    assert [i.buckets for i in found if i.op is Op.REDUCE] == [(2,), (0,)] * 2


def test_shards_of_several_stages_are_reduced_at_the_end() -> None:
    rank = shape([[0], [1], [0, 2]], sharded_gradient=True)
    spanning = replace(rank.buckets[0], spans_stages=True, shards_span=True)
    rank = replace(rank, buckets=(spanning, *rank.buckets[1:]))
    for every in (False, True):
        found = place_reductions(make_schedule("1f1b", 2, 3)[1], rank, every=every)
        assert [i.buckets for i in found if i.op is Op.REDUCE] == [(2,), (1,)] * (3 if every else 1) + [(0,)]
        assert found[-1].buckets == (0,)
