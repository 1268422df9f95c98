"""How large buckets are by default: the rule, and that model state, checkpoints and planner all follow it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megazero.config import derive
from megazero.config.derive import bucket_size
from megazero.config.parse import parse_run
from megazero.config.schema import ParallelConfig
from megazero.mpu.axes import Axes, Coordinates
from megazero.mpu.grid import Group
from megazero.plan.rank_state import specs_of, stage_bytes
from megazero.zero.layout import BucketLayout, Packing, group_sizes, pack
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.ranks import run_ranks

DERIVED = ParallelConfig()


@pytest.mark.parametrize(
    ("replicas", "nccl", "elements"),
    [
        *((1, False, 8_388_608), (4096, False, 8_388_608), (1, True, 40_000_000), (8, True, 40_000_000)),
        *((40, True, 40_000_000), (41, True, 41_000_000), (1024, True, 1_024_000_000)),
    ],
)
def test_the_default(replicas: int, nccl: bool, elements: int) -> None:
    assert bucket_size(DERIVED, replicas, nccl=nccl) == elements
    assert bucket_size(replace(DERIVED, bucket_size=77), replicas, nccl=nccl) == 77


FLAGS = [*small_model(4, heads=4), "--micro-batch-size", "2", "--global-batch-size", "12", "--zero-stage", "2"]
FLAGS += ["--train-iters", "2", "--precision", "fp64", "--eval-iters", "1", "--lr-decay-iters", "4"]


def small(patch: pytest.MonkeyPatch, nccl: bool) -> None:
    """Defaults with which a small model has several buckets: 4,000 elements, with NCCL 2,500 for each replica."""
    for name, value in (("BUCKET", 4000), ("BUCKET_NCCL", 6000), ("BUCKET_NCCL_PER_REPLICA", 2500)):
        patch.setattr(derive, name, value)
    patch.setattr(Group, "is_on_host", not nccl)


def trained(rank: int, size: int, flags: list[str], nccl: bool) -> tuple[list[BucketLayout], list[BucketLayout]]:
    """The buckets of a job on this rank that has trained and saved, and what they should be."""
    with pytest.MonkeyPatch.context() as patch:
        small(patch, nccl)
        job, _ = job_on_rank(rank, size, flags)
        job.fit()
    specs, sizes = specs_of(job.run, 0, 0), group_sizes(job.grid.axes, job.grid.at)
    return [bucket.layout for bucket in job.state.model.buckets], list(
        pack(specs, sizes, Packing(7500 if nccl else 4000))
    )


@pytest.mark.slow
def test_a_run_with_nccl_has_larger_buckets_and_its_checkpoint_opens(corpus: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--save", str(tmp_path / "saved"), *data_flags(corpus, tmp_path / "cache")]
    counts = []
    for nccl, more in ((True, []), (False, ["--train-iters", "3", "--load", str(tmp_path / "saved")])):
        for found, wanted in run_ranks(3, trained, 3, [*flags, *more], nccl):
            assert found == wanted
        counts.append(len(found))
    assert 1 < counts[0] < counts[1], "the probe has compared what was saved in other buckets"


def test_the_planner_has_the_same_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five ranks divide no layer, so each bucket's padding counts."""
    run, axes = parse_run([*FLAGS, "--global-batch-size", "10"], 5), Axes(dp=5)
    small(monkeypatch, True)
    parallel = run.parallel
    gloo, named, card, alone = (
        stage_bytes(replace(run, parallel=other), ranks)[0].gradients
        for other, ranks in (
            (replace(parallel, backend="gloo", device="cuda"), axes),
            (replace(parallel, backend="nccl"), axes),
            (replace(parallel, device="cuda"), axes),
            (replace(parallel, device="cuda"), Axes()),
        )
    )

    def gradients(ranks: Axes, most: int) -> int:
        sizes = group_sizes(ranks, Coordinates(0, 0, 0, 0))
        return sum(8 * layout.numel // ranks.dp for layout in pack(specs_of(run, 0, 0), sizes, Packing(most)))

    assert (gloo, named, card) == (gradients(axes, 4000), gradients(axes, 12_500), gradients(axes, 12_500))
    assert gloo != named and alone == gradients(Axes(), 4000)
