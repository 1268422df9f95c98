"""FP8 under ZeRO-3: no copy of a weight outlives its use, and the results are those of copies that stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megazero.mpu.fp8 import Fp8
from megazero.telemetry.record import StepRecord
from tests.parameters import Piece
from tests.parity.training import data_flags, job_on_rank, small_model, train_on_rank
from tests.plan.meter import metered
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

SHAPE = "--hidden-size 32 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --precision bf16"
MODEL = [*small_model(3, heads=2), *SHAPE.split(), "--zero-stage", "3", "--train-iters", "3"]
MATRICES = 3 * 12 * 32 * 32
"""Elements of the weights of the blocks."""


def trained(rank: int, size: int, words: list[str], keeps: bool) -> tuple[list[StepRecord], list[Piece]]:
    """A run. keeps: with copies that stay, as below ZeRO-3."""
    with pytest.MonkeyPatch.context() as patch:
        if keeps:
            patch.setattr(Fp8, "keeps_weights", property(lambda self: True, lambda self, value: None), raising=False)
        records, _, pieces = train_on_rank(rank, size, words, "auto")
        return records, pieces


@pytest.mark.parametrize("words", ["--fp8 current --tp 2", "--fp8 delayed --pp 2 --recompute-granularity full"])
def test_the_results_are_those_of_copies_that_stay(words: str, corpus: Path, tmp_path: Path) -> None:
    given = [*MODEL, *words.split(), *data_flags(corpus, tmp_path)]
    ours, theirs = (run_ranks(4, trained, 4, given, keeps) for keeps in (False, True))
    for (records, pieces), (other_records, others) in zip(ours, theirs, strict=True):
        assert [(r.loss, r.grad_norm) for r in records] == [(r.loss, r.grad_norm) for r in other_records]
        assert all(torch.equal(a.values, b.values) for a, b in zip(pieces, others, strict=True)) and pieces


def left_on_rank(rank: int, size: int, words: list[str]) -> int:
    """Bytes that are there after two steps and were not there after the job was built."""
    job, _ = job_on_rank(rank, size, words)
    _, taken = metered(lambda: [job.trainer.train_step(stop=False) for _ in range(2)])
    job.state.model.wait_parameters()
    return taken.left


def test_no_copy_of_a_weight_is_left_after_a_step(corpus: Path, tmp_path: Path) -> None:
    given = [*MODEL, *data_flags(corpus, tmp_path)]
    without, narrow = (run_ranks(2, left_on_rank, 2, [*given, *more]) for more in ([], ["--fp8", "current"]))
    assert max(b - a for a, b in zip(without, narrow, strict=True)) < MATRICES // 12, "less than one of the matrices"
