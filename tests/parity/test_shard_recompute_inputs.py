"""Inputs of recomputed blocks that are shared out over the tensor-parallel ranks: the same bits, fewer bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megazero.config.parse import parse_run
from megazero.mpu.axes import axes_of
from megazero.plan.recompute import gathered_inputs
from tests.parity.training import data_flags, job_on_rank, small_model, train
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

MODEL = [*small_model(4, heads=6), "--global-batch-size", "6", "--micro-batch-size", "1", "--train-iters", "2"]
SHARED = ["--shard-recompute-inputs"]
FULL = "--recompute-granularity full"
ODD = "--hidden-size 25 --kv-channels 4 --ffn-hidden-size 96 --seq-length 11"
"""Hidden states of 275 elements, which neither 2 nor 3 ranks divide."""
LAYOUTS = {
    "three ranks, odd": (3, f"--tp 3 {FULL} {ODD}"),
    "zb-h1, odd, dropout": (4, f"--tp 2 --pp 2 --pipeline-schedule zb-h1 {FULL} {ODD} --hidden-dropout 0.1"),
    "zb-v, ZeRO-1": (8, f"--tp 2 --pp 2 --pipeline-schedule zb-v --virtual-stages 2 --zero-stage 1 {FULL}"),
    "ZeRO-3 in a pipeline": (8, f"--tp 2 --pp 2 --zero-stage 3 {FULL} --recompute-num-layers 2"),
    "FP8": (2, f"--tp 2 --precision bf16 --fp8 delayed {FULL} --seq-length 16 --hidden-size 96 --micro-batch-size 2"),
}


def flags(words: str, corpus: Path, cache: Path) -> list[str]:
    return [*MODEL, *words.split(), *data_flags(corpus, cache)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_bits_are_those_of_whole_inputs(name: str, corpus: Path, tmp_path: Path) -> None:
    size, words = LAYOUTS[name]
    given = flags(words, corpus, tmp_path)
    ours, theirs = train(size, [*given, *SHARED]), train(size, given)
    assert [(r.loss, r.grad_norm) for r in ours.records] == [(r.loss, r.grad_norm) for r in theirs.records]
    for key, weight in theirs.weights.items():
        assert torch.equal(ours.weights[key], weight), key


def gathered_on_rank(rank: int, size: int, words: list[str]) -> int:
    job, _ = job_on_rank(rank, size, words)
    job.trainer.train_step(stop=False)
    job.state.model.wait_parameters()
    return sum(count for (name, _), count in job.trainer.grid.tp.traffic.items() if name == "all_gather")


def test_the_bytes_that_are_gathered_are_those_of_the_plan(corpus: Path, tmp_path: Path) -> None:
    given = flags(f"--tp 2 --pp 2 {FULL} --recompute-num-layers 3 {ODD}", corpus, tmp_path)
    without, shared = (run_ranks(4, gathered_on_rank, 4, words) for words in (given, [*given, *SHARED]))
    run = parse_run([*given, *SHARED], 4)
    planned = gathered_inputs(run, axes_of(run.parallel, 4), "cpu")
    assert planned == [6 * 276 * 2, 6 * 276 * 2], "one block of each stage, six micro-batches, one element of padding"
    assert [b - a for a, b in zip(without, shared, strict=True)] == [planned[0]] * 2 + [planned[1]] * 2
