"""Faults that peers shipped and that only the whole program can show; numbers as in the list of faults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megazero.batch import MicroBatch
from megazero.mpu.gradient import GradientTarget, Write
from megazero.mpu.place import Parameter
from tests.parity.training import Outcome, data_flags, job_on_rank, worst
from tests.places import Piece, assemble, values_of
from tests.ranks import run_ranks

MODEL = ["--num-layers", "2", "--hidden-size", "24", "--num-attention-heads", "4", "--seq-length", "12", "--vocab-size", "1003"]
STEPS = 4


class Spoiled:
    """Batches whose masks leave very unequal numbers of predictions: sample 0 has one, sample 1 none, the others all."""

    def __init__(self, batches: object) -> None:
        self.batches = batches

    def micro_batches(self, consumed: int, size: int) -> list[MicroBatch]:
        made = []
        for batch in self.batches.micro_batches(consumed, size):  # type: ignore[attr-defined]
            mask = torch.ones_like(batch.labels, dtype=torch.bool)
            for row, sample in enumerate((batch.samples - consumed).tolist()):
                if sample < 2:
                    mask[row] = False
                    mask[row, : 1 - sample] = True
            made.append(MicroBatch(batch.tokens, batch.labels, mask, batch.samples, batch.documents))
        return made

    def prefetch(self, consumed: int, size: int) -> None: ...
    def upload(self) -> None: ...


def train_masked(rank: int, size: int, flags: list[str]) -> tuple[list, dict, list[Piece]]:
    job, recorder = job_on_rank(rank, size, flags)
    job.trainer.train_batches = Spoiled(job.trainer.train_batches)
    job.fit()
    job.state.wait_parameters()
    return recorder.records, recorder.losses, values_of(nn.ModuleList(job.stages))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (4, ["--zero-stage", "2"]),  # one dp rank has no prediction that counts, another has one
        (4, ["--pp", "2", "--zero-stage", "1"]),
        (4, ["--tp", "2", "--pp", "2", "--sequence-parallel"]),
    ],
)
def test_fault_17_unequal_numbers_of_valid_tokens(ranks: int, layout: list[str], corpus: Path, tmp_path: Path) -> None:
    numbers = [
        "--precision",
        "fp64",
        "--global-batch-size",
        "4",
        "--micro-batch-size",
        "1",
        "--train-iters",
        str(STEPS),
        "--clip-grad",
        "0",
    ]
    flags = [*MODEL, *numbers, *data_flags(corpus, tmp_path / "cache")]

    def outcome(size: int, more: list[str]) -> Outcome:
        results = run_ranks(size, train_masked, size, [*flags, *more])
        records, losses, _ = results[0]
        return Outcome(records, losses, assemble([pieces for *_, pieces in results]))

    differences = worst(outcome(ranks, layout), outcome(1, []))
    assert all(value < 1e-9 for value in differences.values()), differences


class SpoiledTarget:
    """A gradient target that puts a value into every element of what it takes."""

    def __init__(self, target: GradientTarget, value: float) -> None:
        self.target, self.value = target, value

    def add(self, write: Write) -> None:
        def write_and_spoil(into: Tensor, add: bool) -> None:
            write(into, add)
            into.fill_(self.value)

        self.target.add(write_and_spoil)


def train_with_overflow(rank: int, size: int, flags: list[str], spoiled: int, value: float) -> list[dict[str, object]]:
    """Step 2 of 3 meets a non-finite gradient on one rank; what every rank sees before and after."""
    job, recorder = job_on_rank(rank, size, flags)
    seen: list[dict[str, object]] = []
    for step in range(3):
        if step == 1 and rank == spoiled:
            matrix = next(p for p in reversed(list(job.stages[-1].parameters())) if isinstance(p, Parameter) and p.dim() == 2)
            target, matrix.gradient_target = matrix.gradient_target, SpoiledTarget(matrix.gradient_target, value)
        before = _state(job.optimizer)
        job.trainer.train_step(stop=False)
        if step == 1 and rank == spoiled:
            matrix.gradient_target = target
        job.state.wait_parameters()
        changed = any(not torch.equal(a, b) for a, b in zip(before, _state(job.optimizer), strict=True))
        seen.append({"changed": changed, "scale": float(job.scaler.scale), "steps": float(job.optimizer.step_count)})
    seen.append({"skipped": [record.skipped for record in recorder.records], "norms": [record.grad_norm for record in recorder.records]})
    return seen


def _state(optimizer: object) -> list[Tensor]:
    tensors = []
    for fragment in optimizer.fragments():  # type: ignore[attr-defined]
        tensors += [fragment.weight.clone(), fragment.exp_avg.clone(), fragment.exp_avg_sq.clone()]
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("layout", "spoiled"),
    [(["--tp", "2"], 1), (["--pp", "2"], 0), (["--pp", "2"], 1), (["--zero-stage", "2"], 1), (["--zero-stage", "0"], 0)],
)
def test_fault_15_one_ranks_overflow_skips_the_step_on_all(
    layout: list[str], spoiled: int, precision: str, value: float, corpus: Path, tmp_path: Path
) -> None:
    numbers = ["--precision", precision, "--global-batch-size", "4", "--micro-batch-size", "1", "--train-iters", "3"]
    scale = ["--hysteresis", "1", "--initial-loss-scale", "256"] if precision == "fp16" else []
    flags = [*MODEL, *numbers, *scale, *layout, *data_flags(corpus, tmp_path / "cache")]
    for seen in run_ranks(2, train_with_overflow, 2, flags, spoiled, value):
        steps, summary = seen[:3], seen[3]
        assert [step["changed"] for step in steps] == [True, False, True]
        assert [step["steps"] for step in steps] == [1.0, 1.0, 2.0]
        assert [step["scale"] for step in steps] == ([256.0, 128.0, 128.0] if precision == "fp16" else [1.0, 1.0, 1.0])
        if summary["skipped"]:
            assert summary["skipped"] == [False, True, False]


def train_and_tell(rank: int, size: int, flags: list[str]) -> list[float]:
    job, recorder = job_on_rank(rank, size, flags)
    job.fit()
    return [record.loss for record in recorder.records]


@pytest.mark.slow
def test_fault_29_every_log_option_on_a_stage_without_blocks(corpus: Path, tmp_path: Path) -> None:
    """Four stages and two layers: the first holds the embedding, the last the head, and the log interval spans steps."""
    numbers = ["--precision", "fp64", "--global-batch-size", "4", "--micro-batch-size", "1", "--train-iters", "5"]
    logs = ["--log-interval", "3", "--eval-interval", "2", "--metrics-file", str(tmp_path / "m"), "--tensorboard-dir", str(tmp_path / "tb")]
    saves = ["--save", str(tmp_path / "saved"), "--save-interval", "2"]
    flags = [*MODEL, *numbers, *data_flags(corpus, tmp_path / "cache")]
    many = run_ranks(4, train_and_tell, 4, [*flags, *logs, *saves, "--pp", "4", "--partition", "0", "1", "1", "0"])[0]
    one = run_ranks(1, train_and_tell, 1, flags)[0]
    assert many == pytest.approx(one, rel=1e-10)
