"""The shapes and lists of all stages by arithmetic are those that ranks have."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero.plan.rank_state import RankState
from megazero.plan.step_lists import StageLists
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.ranks import run_ranks

FLAGS = [*small_model(4, heads=4), "--micro-batch-size", "2", "--global-batch-size", "16", "--train-iters", "1"]
LAYOUTS = {
    "ZeRO-1, tied over stages": (4, "--pp 2 --zero-stage 1"),
    "ZeRO-2, shards of 1": (4, "--zero-stage 2 --zero-shard-size 2"),
    "ZeRO-3, tied over stages": (4, "--pp 2 --zero-stage 3 --zero-shard-size 1"),
    "ZeRO-3, small ones whole": (4, "--tp 2 --zero-stage 3 --zero3-persist-below 100"),
    "zb-v, partial sums": (4, "--pp 2 --tp 2 --pipeline-schedule zb-v --virtual-stages 2 --sequence-parallel"),
    "vertical, groups": (4, "--pp 2 --zero-stage 3 --micro-batch-order vertical --vertical-group-size 3"),
    "late updates": (4, "--pp 2 --zero-stage 1 --late-update"),
    "16 bits": (2, "--pp 2 --precision bf16 --untie-embeddings-and-output-weights --bucket-size 3000"),
}


def body(rank: int, size: int, flags: list[str]) -> str:
    """Compare the shape of this rank's model state with that by arithmetic; returns its list in words."""
    job, _ = job_on_rank(rank, size, flags)
    grid = job.grid
    assert job.state.model.shape == RankState(job.run, grid.axes, grid.at, nccl=False).shape
    steps = StageLists(job.run, grid.axes, nccl=False)
    steps.check()
    owed = job.run.parallel.late_update
    assert steps.of(grid.at.pp).instructions == job.probe_engine.lists.training(steps.micro_batches, owed=owed)
    return "\n".join(map(str, steps.of(grid.at.pp).instructions))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_shapes_by_arithmetic_are_those_of_the_ranks(name: str, corpus: Path, tmp_path: Path) -> None:
    ranks, words = LAYOUTS[name]
    lists = run_ranks(ranks, body, ranks, [*FLAGS, *data_flags(corpus, tmp_path), *words.split()])
    stages = 2 if "--pp 2" in words else 1
    assert len(set(lists)) == stages, "all ranks of a stage have one list"
