"""Evaluations of a run: when they are made, and that they change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parity.training import data_flags, job_on_rank, small_model
from tests.ranks import run_ranks

FLAGS = [*small_model(2, heads=2), "--global-batch-size", "4", "--micro-batch-size", "1", "--train-iters", "4"]
FLAGS += ["--precision", "fp64", "--eval-iters", "2"]


def trained(rank: int, size: int, flags: list[str]) -> float:
    """Train; return the loss on the validation set before the first step, evaluated by hand in a run of its own."""
    untrained, _ = job_on_rank(rank, size, flags)
    before = untrained.trainer.evaluate()["valid_loss"]
    untrained.close()
    job, _ = job_on_rank(rank, size, [*flags, "--eval-at-start"], keep_log=True)
    job.fit()
    job.trainer.log.close()
    job.close()
    return before


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--pp 2 --late-update", "--zero-stage 3 --offload-params cpu:0.5"])
def test_a_run_evaluates_before_its_first_step(layout: str, corpus: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, *layout.split(), *data_flags(corpus, tmp_path / "cache"), "--eval-iters", "2"]
    plain, eager = tmp_path / "plain", tmp_path / "eager"
    run_ranks(2, with_metrics, 2, flags, str(plain))
    (before, _) = run_ranks(2, trained, 2, [*flags, "--metrics-file", str(eager)])
    first, *others = lines_of(eager)
    assert first == {"iteration": 0, "valid_loss": before}
    assert others == lines_of(plain) and len(others) == 5, "the steps are those of a run without"


def with_metrics(rank: int, size: int, flags: list[str], file: str) -> None:
    job, _ = job_on_rank(rank, size, [*flags, "--metrics-file", file], keep_log=True)
    job.fit()
    job.trainer.log.close()
    job.close()


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file without times and memory."""
    timed = ("step_seconds", "tokens_per_second", "model_tflops_per_rank", "peak_memory_bytes", "mfu")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in timed} for line in lines]


def test_each_evaluation_is_the_mean_over_the_tokens_that_count_of_the_same_samples(
    corpus: Path, tmp_path: Path
) -> None:
    """Predictions at a separator do not count, so that batches have different numbers of tokens that do."""
    words = [*FLAGS, *data_flags(corpus, tmp_path / "cache"), "--eval-iters", "2", "--lr", "0"]
    job, _ = job_on_rank(0, 1, [*words, "--eod-mask-loss", "--eod-id", "0"])
    trainer, loader = job.trainer, job.trainer.batches.valid["valid_loss"]
    batches = [loader.micro_batches(first, 4) for first in (0, 4)]
    counts = [
        sum(int(batch.loss_mask.sum()) for batch in of_step if batch.loss_mask is not None) for of_step in batches
    ]
    losses = [float(trainer.engine.evaluate(of_step)) for of_step in batches]
    assert counts[0] != counts[1], "else a mean of means is the mean"
    assert trainer.evaluate()["valid_loss"] == pytest.approx(sum(losses) / sum(counts), rel=1e-13)
    before = trainer.evaluate()
    job.fit()
    assert trainer.evaluate() == before, "with a learning rate of 0 the weights are those of before"
    job.close()


def test_a_run_without_data_to_evaluate_on_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talks = tmp_path / "talks.jsonl"
    talks.write_text('{"prompt": "ab", "completion": "cd"}\n' * 50)
    words = [*small_model(1, heads=2), "--instruction-data", str(talks), "--tokenizer", "byte", "--train-iters", "1"]
    words += ["--global-batch-size", "1", "--micro-batch-size", "1", "--eval-at-start", "--vocab-size", "257"]
    job, _ = job_on_rank(0, 1, [*words, "--data-cache-path", str(tmp_path / "cache")], keep_log=True)
    job.fit()
    job.close()
    assert "--eval-at-start: this run has no data to evaluate on" in capsys.readouterr().out
