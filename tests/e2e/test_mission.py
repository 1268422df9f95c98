"""The layout that the project exists for, at its own size: 48 ranks beside one process."""

from pathlib import Path

import pytest

from tests.e2e.command import metrics, relative, run
from tests.parity.training import data_flags, small_model, train, worst

SMALL = [*small_model(13, heads=12), "--hidden-size", "48", "--seq-length", "24", "--position-embedding", "alibi"]
NUMBERS = ["--precision", "fp64", "--micro-batch-size", "1", "--global-batch-size", "6"]
LAYOUT = ["--tp", "4", "--pp", "12", "--zero-stage", "1"]


@pytest.mark.slow
def test_48_ranks_equal_one_process(tmp_path: Path, corpus: Path) -> None:
    flags = [*SMALL, *NUMBERS, *data_flags(corpus, tmp_path / "cache"), "--train-iters", "2"]
    differences = worst(train(48, [*flags, *LAYOUT]), train(1, flags))
    assert all(value < 1e-10 for value in differences.values()), differences


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_command_itself(tmp_path: Path, corpus: Path) -> None:
    """48 programs under torchrun, which import torch for three seconds each."""
    flags = [*SMALL, *NUMBERS, *data_flags(corpus, tmp_path / "cache"), "--train-iters", "5"]
    run(1, [*flags, "--metrics-file", tmp_path / "one.jsonl"])
    run(48, [*LAYOUT, *flags, "--metrics-file", tmp_path / "many.jsonl"], timeout=900)
    one, many = metrics(tmp_path / "one.jsonl"), metrics(tmp_path / "many.jsonl")
    assert len(one) == len(many) == 5
    for key in ("loss", "grad_norm", "lr"):
        assert relative([line[key] for line in many], [line[key] for line in one]) < 1e-10
