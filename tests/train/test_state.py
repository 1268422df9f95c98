"""What a checkpoint holds of a run beside its tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megazero.train.job import Job
from megazero.train.state import TrainingPosition
from tests.parity.training import data_flags, job_on_rank, small_model

FLAGS = [*small_model(1, heads=2), "--global-batch-size", "2", "--micro-batch-size", "2", "--train-iters", "9"]
SCALED = ["--loss-scale-window", "3", "--hysteresis", "2", "--initial-loss-scale", "1024"]


def overflows(job: Job, *steps: bool) -> None:
    for overflow in steps:
        job.state.scaler.update(torch.tensor(overflow))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_what_is_recorded_comes_back(precision: str, corpus: Path, tmp_path: Path) -> None:
    """The loss scale comes back with its good steps and overflows: it goes on as if the run had never ended."""
    flags = [*FLAGS, "--precision", precision, *(SCALED if precision == "fp16" else ())]
    flags += data_flags(corpus, tmp_path / "cache")
    one, other = (job_on_rank(0, 1, flags)[0] for _ in range(2))
    position = TrainingPosition(7, 14, 168)
    overflows(one, False, True, True, False, False)
    one.state.optimizer.step_count.fill_(5.0)
    progress = json.loads(json.dumps(one.state.record(position)))
    other.state.restore(progress)
    assert TrainingPosition.read(progress) == position
    for job in (one, other):
        assert float(job.state.optimizer.step_count) == 5.0
        assert float(job.state.scaler.scale) == (512.0 if precision == "fp16" else 1.0)
        overflows(job, False)
        assert float(job.state.scaler.scale) == (1024.0 if precision == "fp16" else 1.0), "the third good step"
        job.close()
