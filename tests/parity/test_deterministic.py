"""The same run twice is the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity.training import data_flags, job_on_rank, train
from tests.ranks import run_ranks

MODEL = [
    "--num-layers",
    "2",
    "--hidden-size",
    "48",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "32",
    "--vocab-size",
    "1003",
]
NUMBERS = [
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "8",
    "--train-iters",
    "20",
    "--lr",
    "1e-3",
    "--hidden-dropout",
    "0.1",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, []), (4, ["--tp", "2", "--zero-stage", "2"])], ids=["1", "tp2-dp2-zero2"]
)
def test_two_runs_have_the_same_bits(ranks: int, layout: list[str], corpus: Path, tmp_path: Path) -> None:
    flags = [*MODEL, *NUMBERS, *layout, "--deterministic", *data_flags(corpus, tmp_path / "cache")]
    first, second = (train(ranks, flags) for _ in range(2))
    assert len(first.records) == 20
    for key in ("loss", "grad_norm", "lr", "skipped"):
        assert [getattr(record, key) for record in first.records] == [
            getattr(record, key) for record in second.records
        ], key
    assert first.losses == second.losses
    assert first.weights.keys() == second.weights.keys()
    assert all(torch.equal(value, second.weights[name]) for name, value in first.weights.items())


def meets_a_race(rank: int, flags: list[str]) -> str:
    """A step in which a kernel runs whose result depends on timing (two values for one place); what
    torch says of it.
    """
    job, _ = job_on_rank(rank, 1, flags)
    train = job.trainer.engine.train

    def with_race(*args: object, **owed: object) -> Tensor:
        torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))
        return train(*args, **owed)  # type: ignore[arg-type]

    job.trainer.engine.train = with_race  # type: ignore[method-assign]
    try:
        job.trainer.train_step(stop=False)
    except RuntimeError as error:
        return str(error)
    return "trained"


@pytest.mark.slow
def test_what_depends_on_timing_is_refused(corpus: Path, tmp_path: Path) -> None:
    """No op of ours on a CPU does, so the flag shows in what torch does to one that would."""
    flags = [*MODEL, *NUMBERS, *data_flags(corpus, tmp_path / "cache")]
    assert run_ranks(1, meets_a_race, flags) == ["trained"]
    (said,) = run_ranks(1, meets_a_race, [*flags, "--deterministic"])
    assert "put_" in said and "does not have a deterministic implementation" in said
