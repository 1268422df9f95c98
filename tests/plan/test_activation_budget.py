"""Whole steps under --activation-memory-budget: what their activations take, measured, is under the budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero.config.derive import FULL, NONE, RecomputeTable
from megazero.config.parse import parse_run
from megazero.mpu.axes import axes_of
from megazero.plan.recompute import activation_peaks, recompute_table
from megazero.train import job as job_module
from tests.parity.training import data_flags, job_on_rank
from tests.plan.meter import metered
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

MODEL = (
    "--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --vocab-size 1003 --precision fp32 "
    "--micro-batch-size 2 --global-batch-size 8 --attention softmax --train-iters 3 --num-workers 0"
)


def peak_on_rank(rank: int, size: int, words: list[str], table: RecomputeTable | None) -> int:
    """The most bytes that a second step allocates on this rank. table: what it recomputes instead of its choice."""
    with pytest.MonkeyPatch.context() as patch:
        if table is not None:
            patch.setattr(job_module, "recompute_of_all_ranks", lambda run, grid: table)
        job, _ = job_on_rank(rank, size, words)
    job.trainer.train_step(stop=False)
    _, taken = metered(lambda: job.trainer.train_step(stop=False))
    job.state.model.wait_parameters()
    return taken.peak


@pytest.mark.parametrize(
    ("size", "more"),
    [(1, []), (2, ["--tp", "2", "--shard-recompute-inputs"]), (1, ["--micro-batch-order", "vertical"])],
)
def test_a_step_takes_what_the_budget_allows(size: int, more: list[str], corpus: Path, tmp_path: Path) -> None:
    """One block less that is recomputed would be too much. The plan leaves out a few numbers, such as the norm."""
    words = [*MODEL.split(), *more[:2], *data_flags(corpus, tmp_path)]
    free = parse_run(words, size)
    axes = axes_of(free, size)
    budget = max(activation_peaks(free, axes, "cpu")) * 6 // 10
    words += [*more[2:], "--activation-memory-budget", str(budget)]
    run = parse_run(words, size)
    table, (planned,) = list(recompute_table(run, axes, "cpu")), activation_peaks(run, axes, "cpu")
    assert planned <= budget and table.count(FULL) > 0 and len({*table}) > 1
    for taken in run_ranks(size, peak_on_rank, size, words, None):
        assert planned <= taken <= planned + 100
    table[table.index(FULL)] = NONE
    assert min(run_ranks(size, peak_on_rank, size, words, tuple(table))) > budget
