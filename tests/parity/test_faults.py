"""Faults that peers shipped and that only the whole program can show; numbers as in the list of faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megazero.data.loader import TrainLoader
from megazero.model.batch import MicroBatch
from megazero.mpu.gradient import GradientTarget, Write
from megazero.mpu.parameter import Parameter
from megazero.zero.optimizer import ShardedOptimizer
from tests.parameters import Piece, assemble, held_fragments, values_of
from tests.parity.training import Outcome, data_flags, job_on_rank, small_model, train, worst
from tests.ranks import run_ranks
from tests.stages import SHARDED_GRADIENTS, STAGES

MODEL = small_model(2, heads=4)
STEPS = 4


def spoil(loader: TrainLoader) -> None:
    """Its batches get masks that leave very unequal numbers of predictions: sample 0 has one, sample 1 none, the
    others all.
    """
    load = loader.micro_batches

    def micro_batches(consumed_samples: int, global_batch: int) -> list[MicroBatch]:
        made = []
        for batch in load(consumed_samples, global_batch):
            mask = torch.ones_like(batch.labels, dtype=torch.bool)
            for row, sample in enumerate((batch.samples - consumed_samples).tolist()):
                if sample < 2:
                    mask[row] = False
                    mask[row, : 1 - sample] = True
            made.append(MicroBatch(batch.tokens, batch.labels, mask, batch.samples, batch.documents))
        return made

    loader.micro_batches = micro_batches  # type: ignore[method-assign]


def train_masked(rank: int, size: int, flags: list[str]) -> tuple[list, dict, list[Piece]]:
    job, recorder = job_on_rank(rank, size, flags)
    spoil(job.trainer.batches.train)
    job.fit()
    with job.state.model.reading():
        return recorder.records, recorder.losses, values_of(nn.ModuleList(job.stages))


def masked(ranks: int, layout: list[str], corpus: Path, folder: Path) -> Outcome:
    numbers = ["--precision", "fp64", "--global-batch-size", "4", "--micro-batch-size", "1", "--clip-grad", "0"]
    flags = [*MODEL, *numbers, "--train-iters", str(STEPS), *layout, *data_flags(corpus, folder / "cache")]
    results = run_ranks(ranks, train_masked, ranks, flags)
    records, losses, _ = results[0]
    return Outcome(records, losses, assemble([pieces for *_, pieces in results]))


@pytest.fixture(scope="module")
def masked_reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return masked(1, [], corpus, tmp_path_factory.mktemp("masked"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        # one dp rank has no prediction that counts, another has one
        *((4, ["--zero-stage", str(stage)]) for stage in SHARDED_GRADIENTS),
        (4, ["--pp", "2", "--zero-stage", str(STAGES[-1])]),
        (4, ["--pp", "2", "--zero-stage", "1"]),
        (4, ["--tp", "2", "--pp", "2", "--sequence-parallel"]),
        (2, ["--tp", "2", "--sequence-parallel"]),
        (4, ["--tp", "4", "--sequence-parallel", "--recompute-granularity", "full"]),
        (4, ["--tp", "2", "--sequence-parallel", "--zero-stage", "2"]),
    ],
)
def test_fault_16_17_of_any_degree_and_unequal_numbers_of_valid_tokens(
    ranks: int, layout: list[str], masked_reference: Outcome, corpus: Path, tmp_path: Path
) -> None:
    """DS#5555: a factor of the degree would show in the loss, in the norm, or, for a parameter's gradient alone, in the
    weights.
    """
    differences = worst(masked(ranks, layout, corpus, tmp_path), masked_reference)
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
            matrix = next(
                p for p in reversed(list(job.stages[-1].parameters())) if isinstance(p, Parameter) and p.dim() == 2
            )
            target, matrix.gradient_target = matrix.gradient_target, SpoiledTarget(matrix.gradient_target, value)
        before = _state(job.state.optimizer)
        job.trainer.train_step(stop=False)
        if step == 1 and rank == spoiled:
            matrix.gradient_target = target
        job.state.model.wait_parameters()
        changed = any(not torch.equal(a, b) for a, b in zip(before, _state(job.state.optimizer), strict=True))
        seen.append(
            {"changed": changed, "scale": float(job.state.scaler.scale), "steps": float(job.state.optimizer.step_count)}
        )
    seen.append(
        {
            "skipped": [record.skipped for record in recorder.records],
            "norms": [record.grad_norm for record in recorder.records],
        }
    )
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_fault_14_every_precision_clips(precision: str, corpus: Path, tmp_path: Path) -> None:
    """DS#3790: a step of plain SGD moves the weights by the rate times the maximum norm, and not by the gradient."""
    rate, most = 8.0, 0.05
    numbers = ["--precision", precision, "--global-batch-size", "4", "--micro-batch-size", "2", "--train-iters", "1"]
    optimizer = ["--optimizer", "sgd", "--sgd-momentum", "0", "--weight-decay", "0", "--clip-grad", str(most)]
    scale = ["--initial-loss-scale", "256"] if precision == "fp16" else []
    flags = [*MODEL, *numbers, *optimizer, *scale, *data_flags(corpus, tmp_path / "cache")]
    still, moved = (train(1, [*flags, "--lr", str(lr)]) for lr in (1e-12, rate))
    assert moved.records[0].grad_norm > 4 * most
    squares = [
        (moved.weights[name].double() - weight.double()).square().sum() for name, weight in still.weights.items()
    ]
    assert float(torch.stack(squares).sum().sqrt()) == pytest.approx(rate * most, rel=0.05)


def _state(optimizer: ShardedOptimizer) -> list[Tensor]:
    tensors = []
    for fragment in held_fragments(optimizer):
        tensors += [fragment.weight.clone(), fragment.exp_avg.clone(), fragment.exp_avg_sq.clone()]
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
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


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_fault_25_recompute_changes_no_bit_of_a_run(stage: int, corpus: Path, tmp_path: Path) -> None:
    """TT#1323, #2380: the second forward reads the same parameters and draws the same masks as the first."""
    numbers = ["--precision", "bf16", "--global-batch-size", "4", "--micro-batch-size", "1", "--train-iters", "3"]
    dropout = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    flags = [*MODEL, *numbers, *dropout, "--zero-stage", str(stage), *data_flags(corpus, tmp_path / "cache")]
    plain, *others = [train(2, [*flags, "--recompute-granularity", kind]) for kind in ("none", "selective", "full")]
    assert plain.records[0].loss != plain.records[1].loss and plain.records[0].grad_norm > 0
    for other in others:
        for key in ("loss", "grad_norm"):
            assert [getattr(r, key) for r in other.records] == [getattr(r, key) for r in plain.records], key
        assert all(torch.equal(other.weights[name], weight) for name, weight in plain.weights.items())


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
