"""Faults that peers shipped and that only the whole program can show; numbers as in the list of faults."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megazero.zero.optimizer import ShardedOptimizer
from tests.parameters import assemble, held_fragments, values_of
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.parity.ways import spoil
from tests.ranks import run_ranks
from tests.stages import STAGES

MODEL = small_model(2, heads=4)


def train_with_overflow(rank: int, size: int, flags: list[str], spoiled: int) -> list[dict[str, object]]:
    """Steps 2 and 4 of 5 meet gradients of one rank that are infinite and undefined; what every rank sees of each."""
    job, recorder = job_on_rank(rank, size, flags)
    if rank == spoiled:
        spoil(job, {2})
        spoil(job, {4}, math.nan)
    seen: list[dict[str, object]] = []
    for _ in range(5):
        before = _state(job.state.optimizer)
        job.trainer.train_step(stop=False)
        job.state.model.wait_parameters()
        changed = any(not torch.equal(a, b) for a, b in zip(before, _state(job.state.optimizer), strict=True))
        scale, steps = float(job.state.scaler.scale), float(job.state.optimizer.step_count)
        seen.append({"changed": changed, "scale": scale, "steps": steps})
    assert rank > 0 or [record.skipped for record in recorder.records] == [False, True, False, True, False]
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_fault_14_every_precision_clips(precision: str, corpus: Path, tmp_path: Path) -> None:
    """DS#3790: a step of plain SGD moves the weights by the rate times the maximum norm, and not by the gradient."""
    rate, most = 8.0, 0.05
    numbers = ["--precision", precision, "--global-batch-size", "4", "--micro-batch-size", "2", "--train-iters", "1"]
    optimizer = ["--optimizer", "sgd", "--sgd-momentum", "0", "--weight-decay", "0", "--clip-grad", str(most)]
    scale = ["--initial-loss-scale", "256"] if precision == "fp16" else []
    flags = [*MODEL, *numbers, *optimizer, *scale, *data_flags(corpus, tmp_path / "cache"), "--lr", str(rate)]
    job, recorder = job_on_rank(0, 1, flags)
    before = assemble([values_of(job.stages[0])])
    job.fit()
    after = assemble([values_of(job.stages[0])])
    assert recorder.records[0].grad_norm > 4 * most
    squares = [(after[name].double() - weight.double()).square().sum() for name, weight in before.items()]
    assert float(torch.stack(squares).sum().sqrt()) == pytest.approx(rate * most, rel=0.05)


def _state(optimizer: ShardedOptimizer) -> list[Tensor]:
    tensors = []
    for fragment in held_fragments(optimizer):
        tensors += [values.clone() for values in fragment.columns.values()]
    return tensors


@pytest.mark.slow
@pytest.mark.sampled(strength=1)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("layout", "spoiled"),
    [
        (["--tp", "2"], 1),
        (["--pp", "2"], 0),
        (["--pp", "2"], 1),
        *((["--zero-stage", str(stage)], 1) for stage in STAGES[1:]),
        (["--zero-stage", "0"], 0),
    ],
)
def test_fault_15_one_ranks_overflow_skips_the_step_on_all(
    layout: list[str], spoiled: int, precision: str, corpus: Path, tmp_path: Path
) -> None:
    numbers = ["--precision", precision, "--global-batch-size", "4", "--micro-batch-size", "1", "--train-iters", "5"]
    scale = ["--hysteresis", "1", "--initial-loss-scale", "256"] if precision == "fp16" else []
    flags = [*MODEL, *numbers, *scale, *layout, *data_flags(corpus, tmp_path / "cache")]
    scales = [256.0, 128.0, 128.0, 64.0, 64.0] if precision == "fp16" else [1.0] * 5
    for steps in run_ranks(2, train_with_overflow, 2, flags, spoiled):
        assert [step["changed"] for step in steps] == [True, False, True, False, True]
        assert [step["steps"] for step in steps] == [1.0, 1.0, 2.0, 2.0, 3.0]
        assert [step["scale"] for step in steps] == scales


def train_and_tell(rank: int, size: int, flags: list[str], folder: str) -> list[float]:
    logs = [
        "--metrics-file",
        f"{folder}/m",
        "--tensorboard-dir",
        f"{folder}/tb",
        "--save",
        f"{folder}/saved",
        "--save-interval",
        "2",
    ]
    job, recorder = job_on_rank(rank, size, [*flags, *logs], keep_log=True)
    assert len(job.trainer.log._sinks) == (4 if rank == 0 else 0), (
        "the log, metrics, curves and the recorder; nothing on the other ranks"
    )
    job.fit()
    job.trainer.log.close()
    return [record.loss for record in recorder.records]


@pytest.mark.slow
def test_fault_29_every_log_option_on_a_stage_without_blocks(corpus: Path, tmp_path: Path) -> None:
    """Four stages and two layers: the first holds the embedding, the last the head, and the log
    interval spans steps.
    """
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed: pip install tensorboard")
    numbers = ["--precision", "fp64", "--global-batch-size", "4", "--micro-batch-size", "1", "--train-iters", "5"]
    told = ["--log-interval", "3", "--eval-interval", "2"]
    flags = [*MODEL, *numbers, *told, *data_flags(corpus, tmp_path / "cache")]
    many = run_ranks(
        4, train_and_tell, 4, [*flags, "--pp", "4", "--partition", "0", "1", "1", "0"], str(tmp_path / "many")
    )
    one = run_ranks(1, train_and_tell, 1, flags, str(tmp_path / "one"))[0]
    assert len(one) == 5 and many[0] == pytest.approx(one, rel=1e-10)
    lines = [json.loads(line) for line in (tmp_path / "many" / "m").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == many[0]
    assert [line["iteration"] for line in lines if "valid_loss" in line] == [2, 4, 5]
