"""Computations of a chunk as computations of its units."""

from __future__ import annotations

from megazero.pipeline.schedule import make_schedule
from megazero.program.instruction import Instruction, Op
from megazero.program.passes.cut import cut, every_pass, first_passes, units_of
from tests.program.made import shape, texts


def test_a_forward_goes_through_the_units_and_a_backward_goes_back() -> None:
    first, _ = make_schedule("1f1b", 2, 2)
    assert texts(cut(first, shape([[0], [1]]), {(1, 0)})) == [
        "forward (micro-batch 0, chunk 0)",
        "send hidden states (micro-batch 0, chunk 0, to stage 1)",
        "receive gradients (micro-batch 0, chunk 0, from stage 1)",
        "forward (micro-batch 1, chunk 0, unit 0)",
        "forward (micro-batch 1, chunk 0, unit 1)",
        "send hidden states (micro-batch 1, chunk 0, to stage 1)",
        "receive gradients (micro-batch 1, chunk 0, from stage 1)",
        "backward (micro-batch 0, chunk 0)",
        "backward (micro-batch 1, chunk 0, unit 1)",
        "backward (micro-batch 1, chunk 0, unit 0)",
    ]


def test_both_parts_of_a_split_backward_are_cut() -> None:
    (only,) = make_schedule("zb-h1", 1, 1)
    found = cut(only, shape([[0], [1], [2]]), every_pass(only))
    assert [(i.op, i.units) for i in found] == [
        *((Op.FORWARD, (n, n + 1)) for n in range(3)),
        *((Op.BACKWARD_INPUT, (n, n + 1)) for n in (2, 1, 0)),
        *((Op.BACKWARD_WEIGHT, (n, n + 1)) for n in (2, 1, 0)),
    ]


def test_nothing_but_what_is_named_is_cut() -> None:
    """A cut list with the units joined again is the list."""
    chunks = [[[0], [1], [2]], [[3]], [[4], [5]]]
    for name, virtual in (("gpipe", 3), ("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)):
        rank = shape(*chunks[:virtual])
        for stage in make_schedule(name, 3, 5, virtual):
            assert cut(stage, rank, ()) == stage
            for wanted in (first_passes(stage), every_pass(stage)):
                found = cut(stage, rank, wanted)
                assert all(
                    (i.units is not None) == (i.is_compute and (i.micro_batch, i.chunk) in wanted) for i in found
                )
                joined = [i._replace(units=None) for i in found]
                once = [i for at, i in enumerate(joined) if at == 0 or i != joined[at - 1]]
                assert tuple(once) == stage
                for whole in (i for i in stage if i.is_compute):
                    parts = [i.units for i in found if i._replace(units=None) == whole]
                    order = [(n, n + 1) for n in range(len(rank.units[whole.chunk]))]
                    assert parts == ([None] if parts == [None] else order if whole.op is Op.FORWARD else order[::-1])


def test_the_first_pass_of_a_chunk_is_the_one_that_computes_it_first() -> None:
    for stage in make_schedule("interleaved", 2, 6, 3):
        assert first_passes(stage) == {(0, 0), (0, 1), (0, 2)}
    backwards_first = [Instruction(Op.FORWARD, 4, 0), Instruction(Op.FORWARD, 1, 1), Instruction(Op.FORWARD, 0, 0)]
    assert first_passes(backwards_first) == {(4, 0), (1, 1)}
    assert every_pass(backwards_first) == {(4, 0), (1, 1), (0, 0)}


def test_a_whole_computation_is_all_units_of_its_chunk() -> None:
    rank = shape([[0]], [[1], [2], [3]])
    assert units_of(Instruction(Op.FORWARD, 0, 1), rank) == range(3)
    assert units_of(Instruction(Op.FORWARD, 0, 1, units=(1, 2)), rank) == range(1, 2)
