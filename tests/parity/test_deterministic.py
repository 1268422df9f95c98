"""The same run twice is the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity.training import data_flags, job_on_rank, small_model, train, unequal
from tests.ranks import run_ranks

MODEL = [*small_model(2, heads=4), "--hidden-size", "48", "--seq-length", "32"]
NUMBERS = "--micro-batch-size 2 --global-batch-size 8 --train-iters 10 --lr 1e-3 --hidden-dropout 0.1"


@pytest.mark.slow
def test_two_runs_have_the_same_bits(corpus: Path, tmp_path: Path) -> None:
    layout = ["--tp", "2", "--zero-stage", "2", "--deterministic"]
    first, second = (
        train(4, [*MODEL, *NUMBERS.split(), *layout, *data_flags(corpus, tmp_path / "cache")]) for _ in range(2)
    )
    assert len(first.records) == 10 and not unequal(first, second)


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
    flags = [*MODEL, *NUMBERS.split(), *data_flags(corpus, tmp_path / "cache")]
    assert run_ranks(1, meets_a_race, flags) == ["trained"]
    (said,) = run_ranks(1, meets_a_race, [*flags, "--deterministic"])
    assert "put_" in said and "does not have a deterministic implementation" in said
