"""Where the gradients of a tied embedding are reduced that two pipeline stages hold."""

import pytest

from megazero.config.parse import parse_run
from megazero.config.schema import Run
from megazero.mpu.axes import Coordinates, axes_of
from megazero.pipeline.build import step_lists
from megazero.plan.rank_state import RankState
from megazero.program.instruction import Instruction, Kind, Op
from tests.parity.training import small_model
from tests.program import kinds


def listed(stage: int, *flags: str, pp: int = 2, dp: int = 2) -> tuple[list[Instruction], int]:
    """The list of a stage for four micro-batches, and the number of the tied table's bucket."""
    words = [*small_model(4, heads=4), "--pp", str(pp), "--global-batch-size", str(4 * dp), *flags]
    run: Run = parse_run(words, pp * dp)
    axes = axes_of(run, pp * dp)
    shape = RankState(run, axes, Coordinates(stage, 0, 0, 0), nccl=False).shape
    (tied,) = (number for number, bucket in enumerate(shape.buckets) if bucket.spans_stages)
    return list(step_lists(run, stage, shape).training(4)), tied


def places(instructions: list[Instruction], op: Kind, bucket: int) -> list[int]:
    return [at for at, i in enumerate(instructions) if i.op == op and bucket in i.buckets]


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("zero_stage", ["0", "1", "2"])
def test_shards_of_both_stages_are_reduced_once_after_all_backwards(stage, zero_stage):
    found, tied = listed(stage, "--zero-stage", zero_stage)
    (at,) = places(found, Op.REDUCE, tied)
    assert at > max(n for n, i in enumerate(found) if i.ends_backward)
    assert not places(found, Op.REDUCE_ACROSS, tied)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("flags", [("--zero-stage", "3"), ("--zero-stage", "2", "--zero-shard-size", "1")])
def test_shards_of_one_stage_are_reduced_in_every_backward_and_across_at_the_end(stage, flags):
    found, tied = listed(stage, *flags)
    assert len(places(found, Op.REDUCE, tied)) == 4
    (at,) = places(found, Op.REDUCE_ACROSS, tied)
    assert at > max(n for n, i in enumerate(found) if i.ends_backward or i.op is Op.REDUCE)
    assert at < found.index(Instruction(Op.NORM))


def test_a_stage_gathers_its_own_copy_of_the_table_for_forward_only():
    for stage in (0, 1):
        found, tied = listed(stage, "--zero-stage", "3")
        gathers, releases = places(found, Op.GATHER, tied), places(found, kinds.RELEASE, tied)
        uses = [n for n, i in enumerate(found) if i.op is Op.FORWARD and i.units == ((0, 1) if stage == 0 else (2, 3))]
        assert len(gathers) == len(releases) == len(uses) == 4
        assert all(g < u < r for g, u, r in zip(gathers, uses, releases, strict=True))
