"""The command that the project exists for, at its own size."""

from pathlib import Path

import pytest

from tests.e2e.command import metrics, relative, run

SMALL = ["--num-layers", 13, "--hidden-size", 48, "--num-attention-heads", 12, "--seq-length", 24, "--position-embedding", "alibi"]
NUMBERS = ["--precision", "fp64", "--micro-batch-size", 1, "--global-batch-size", 6, "--train-iters", 5, "--eval-iters", 0]


@pytest.mark.slow
def test_48_ranks_equal_one_process(tmp_path: Path, corpus: Path) -> None:
    flags = [*SMALL, *NUMBERS, "--data-path", corpus, "--vocab-size", 1003, "--data-cache-path", tmp_path / "cache"]
    run(1, [*flags, "--metrics-file", tmp_path / "one.jsonl"])
    run(48, ["--tp", 4, "--pp", 12, "--zero-stage", 1, *flags, "--metrics-file", tmp_path / "many.jsonl"], timeout=900)
    one, many = metrics(tmp_path / "one.jsonl"), metrics(tmp_path / "many.jsonl")
    assert len(one) == len(many) == 5
    for key in ("loss", "grad_norm", "lr"):
        assert relative([line[key] for line in many], [line[key] for line in one]) < 1e-10
