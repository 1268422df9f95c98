"""What steps whose messages are in blocks of int8 and int4 keep: exact weights, and what blocks have lost."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity.training import data_flags, job_on_rank, small_model, train
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

MODEL = [*small_model(2, heads=4), "--global-batch-size", "12", "--micro-batch-size", "1", "--lr", "1e-2"]
INT4 = "--zero-quantized-weights --zero-quantized-gradients int4"
ALL = f"{INT4} --zero-gradient-error-feedback"


def flags(words: str, corpus: Path, cache: Path) -> list[str]:
    return [*MODEL, "--train-iters", "4", *words.split(), *data_flags(corpus, cache)]


def overflowing(rank: int, words: list[str]) -> tuple[list[bool], bool, float, float]:
    """(steps that were skipped, whether weights are as before, the largest that is kept, and what the next step keeps
    of it)
    """
    job, recorder = job_on_rank(rank, 2, words)
    model = job.state.model
    before = [model.weights.held(index).clone() for index in range(len(model.buckets))]
    job.fit()
    same = all(torch.equal(model.weights.held(index), old) for index, old in enumerate(before))

    def largest() -> float:
        return max(lost.abs().max().item() for pair in model.messages._kept for lost in pair if lost is not None)

    kept = largest()
    model.messages.begin_step(torch.tensor(1.0))
    return [bool(r.skipped) for r in recorder.records], same, kept, largest()


def test_an_overflow_is_skipped_everywhere_and_nothing_of_it_is_kept(corpus: Path, tmp_path: Path) -> None:
    """Some blocks overflow. What the others lost is of gradients that nobody uses."""
    words = flags(f"--zero-stage 2 --precision fp16 --initial-loss-scale 1e9 --hysteresis 1 {ALL}", corpus, tmp_path)
    for skipped, same, kept, left in run_ranks(2, overflowing, words):
        assert skipped == [True] * 4 and same and 0.0 < kept < math.inf and left == 0.0


def test_the_start_of_a_step_rescales_what_is_kept(corpus: Path, tmp_path: Path) -> None:
    """Two good steps around one at which the loss scale grows: what is kept grows with it. The step behind them, whose
    factor is 1, has what is kept divided by the factor of the last one, which is twice as large with twice the scale.
    """
    words = f"--zero-stage 1 --precision fp16 --initial-loss-scale 64 {ALL} --train-iters 3"
    steady = run_ranks(2, overflowing, flags(f"{words} --loss-scale-window 100", corpus, tmp_path))
    grown = run_ranks(2, overflowing, flags(f"{words} --loss-scale-window 2", corpus, tmp_path))
    for (skipped, _, small, of_small), (_, _, large, of_large) in zip(steady, grown, strict=True):
        assert not any(skipped) and large == pytest.approx(2 * small, rel=0.02)
        assert large / of_large == pytest.approx(2 * small / of_small, rel=1e-5)


def own_weights(rank: int, words: list[str]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each bucket: this rank's exact weights, those that all ranks read there, and the former after reading."""
    job, _ = job_on_rank(rank, 2, words)
    job.fit()
    model = job.state.model
    exact = [model.weights.shard(index).clone() for index in range(len(model.buckets))]
    with model.reading():
        read = [
            model.parameters[index].whole[slice(*bucket.shard)].clone() for index, bucket in enumerate(model.buckets)
        ]
    after = [model.weights.shard(index).clone() for index in range(len(model.buckets))]
    return list(zip(exact, read, after, strict=True))


@pytest.mark.parametrize("stage", [1, 3])
def test_the_weights_that_are_updated_stay_exact(stage: int, corpus: Path, tmp_path: Path) -> None:
    words = flags(f"--zero-stage {stage} --precision fp32 --zero-quantized-weights", corpus, tmp_path)
    for buckets in run_ranks(2, own_weights, words):
        for exact, read, after in buckets:
            assert torch.equal(exact, after) and not torch.equal(exact, read)
            steps = torch.cat([block.abs().max().expand_as(block) / 127 for block in exact.split(256)])
            assert ((read - exact).abs() <= 0.5001 * steps).all()


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("more", ["", "--zero-gradient-error-feedback"])
def test_many_steps_learn_as_much(more: str, corpus: Path, tmp_path: Path) -> None:
    """With error feedback the loss is that of the exact run; without it, it may be lower too."""
    words = "--zero-stage 1 --precision bf16 --train-iters 120 --micro-batch-size 6"
    ours, theirs = (train(2, flags(each, corpus, tmp_path)).records for each in (f"{words} {INT4} {more}", words))
    means = [sum(record.loss or math.nan for record in records[-20:]) / 20 for records in (ours, theirs)]
    assert theirs[0].loss is not None and means[1] < 0.8 * theirs[0].loss, "nothing was learnt"
    assert means[0] < 1.01 * means[1] and (not more or means[0] > 0.99 * means[1]), means
