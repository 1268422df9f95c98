"""The same run twice is the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.training import data_flags, train

MODEL = ["--num-layers", "2", "--hidden-size", "48", "--num-attention-heads", "4", "--seq-length", "32", "--vocab-size", "1003"]
NUMBERS = ["--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "20", "--lr", "1e-3", "--hidden-dropout", "0.1"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), [(1, []), (4, ["--tp", "2", "--zero-stage", "2"])], ids=["1", "tp2-dp2-zero2"])
def test_two_runs_have_the_same_bits(ranks: int, layout: list[str], corpus: Path, tmp_path: Path) -> None:
    flags = [*MODEL, *NUMBERS, *layout, "--deterministic", *data_flags(corpus, tmp_path / "cache")]
    first, second = (train(ranks, flags) for _ in range(2))
    assert len(first.records) == 20
    for key in ("loss", "grad_norm", "lr", "skipped"):
        assert [getattr(record, key) for record in first.records] == [getattr(record, key) for record in second.records], key
    assert first.losses == second.losses
    assert first.weights.keys() == second.weights.keys()
    assert all(torch.equal(value, second.weights[name]) for name, value in first.weights.items())
