"""--fp8 in the whole program: how far its loss is from bf16's, layouts against one process, what a checkpoint keeps,
skipped steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_ops.native.compile import CompileError, compiler
from megazero.config.parse import ConfigError, parse_run
from megazero.data.progress import silent
from megazero.mpu import fp8 as module
from megazero.mpu.fp8 import Fp8Layer
from megazero.plan.step_memory import run_memories
from megazero.telemetry.record import StepRecord
from megazero.train.prepare import prepare
from tests.parameters import Piece, assemble, values_of
from tests.parity.training import Outcome, data_flags, job_on_rank, small_model, train
from tests.parity.training import train_on_rank as trained_on_rank
from tests.plan.meter import metered
from tests.ranks import run_ranks
from tests.reference import REFERENCE, needs_reference

MODEL = [*small_model(4, heads=4), "--hidden-size", "64", "--seq-length", "32"]
NUMBERS = ["--global-batch-size", "16", "--micro-batch-size", "4", "--lr", "3e-3", "--lr-warmup-iters", "2"]
SCALINGS = {"current": ["--fp8"], "delayed": ["--fp8", "delayed", "--fp8-amax-history", "3"]}
DISTANCE = 0.005
"""Largest relative difference of the loss from bf16's, as a mean of 15 steps of real text and of SEEDS; a single step
may be twice as far. Measured: 0.05% and 0.1%.
"""
SEEDS = ("1", "2", "3")
"""One run alone says little: after 100 steps of six seeds on two processors FP8 was 0.7% below bf16 to 0.7% above, and
once 1.3% below; fp32 was 0.4% below to 0.3% above. What the seeds have in common is a fault of FP8.
"""
OF_A_PROGRESSION = 0.002
"""The same for each step of the tests' own corpus, which is learnt at once."""
LAST = 15


def flags_for(corpus: Path, base: Path, *more: str) -> list[str]:
    return [*MODEL, *NUMBERS, *data_flags(corpus, base / "cache"), *more]


def losses(outcome: Outcome) -> Tensor:
    return torch.tensor([record.loss for record in outcome.records], dtype=torch.float64)


def distance(ours: Outcome, theirs: Outcome) -> float:
    """Largest relative difference of a step's loss."""
    return ((losses(ours) - losses(theirs)).abs() / losses(theirs)).max().item()


# --- against bf16
# ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> Callable[[tuple[str, ...]], Outcome]:
    """Trains without FP8, once for all that compare with the same flags."""
    return cache(lambda flags: train(1, list(flags)))


@pytest.mark.slow
@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_loss_is_near_that_of_16_bits(
    precision: str, scaling: str, corpus: Path, plain: Callable[[tuple[str, ...]], Outcome], tmp_path: Path
) -> None:
    precisions = {"bf16": ["--precision", "bf16"], "fp16": ["--precision", "fp16", "--initial-loss-scale", "1024"]}
    steps = ["--train-iters", "80", "--micro-batch-size", "16"]
    flags = (*flags_for(corpus, corpus.parent, *steps), *precisions[precision])
    wide, narrow = plain(flags), train(1, [*flags, *SCALINGS[scaling]])
    assert losses(wide)[-5:].mean() < losses(wide)[0] - 1.5
    found = distance(narrow, wide)
    print(
        f"{precision}, {scaling}: {found:.5f}, validation {narrow.losses['valid_loss']:.5f}, plain "
        f"{wide.losses['valid_loss']:.5f}"
    )
    assert 0 < found < OF_A_PROGRESSION
    assert narrow.losses["valid_loss"] == pytest.approx(wide.losses["valid_loss"], rel=OF_A_PROGRESSION)
    assert not any(record.skipped for record in narrow.records)


@pytest.mark.slow
@needs_reference
@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("name", SCALINGS)
def test_the_loss_on_real_text(
    name: str, plain: Callable[[tuple[str, ...]], Outcome], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert REFERENCE is not None
    index = tmp_path_factory.getbasetemp() / "real-text-cache"
    data = ["--data-path", str(REFERENCE / "meg-gpt2-openwebtext_text_document"), "--data-cache-path", str(index)]
    model = [*MODEL, "--seq-length", "64", "--vocab-size", "5000"]
    flags = (*model, *NUMBERS, "--micro-batch-size", "16", *data, "--train-iters", "60", "--eval-iters", "0")
    seeded = [(*flags, "--seed", seed) for seed in SEEDS]
    wide = torch.stack([losses(plain(each)) for each in seeded]).mean(0)
    narrow = torch.stack([losses(train(1, [*each, *SCALINGS[name]])) for each in seeded]).mean(0)
    ours, theirs = narrow[-LAST:].mean(), wide[-LAST:].mean()
    furthest = ((narrow - wide).abs() / wide).max()
    print(f"{name}: {ours / theirs - 1:.5f}, steps {furthest:.5f}; loss {wide[0]:.3f} to {theirs:.3f}")
    assert theirs < wide[0] - 1.5
    assert abs(ours / theirs - 1) < DISTANCE
    assert 0 < furthest < 2 * DISTANCE


# --- layouts
# -----------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tp2": (2, ["--tp", "2"]),
    "tp2-sp-recompute": (2, ["--tp", "2", "--sequence-parallel", "--recompute-granularity", "full"]),
    "dp2-zero2": (2, ["--zero-stage", "2"]),
    "pp2-interleaved-selective": (2, ["--pp", "2", "--virtual-stages", "2", "--recompute-granularity", "selective"]),
    "zb-v": (2, ["--pp", "2", "--virtual-stages", "2", "--pipeline-schedule", "zb-v"]),
    "tp2-sp-dp2": (4, ["--tp", "2", "--sequence-parallel", "--zero-stage", "1"]),
    "tp2-pp2-zb-h1": (4, ["--tp", "2", "--pp", "2", "--pipeline-schedule", "zb-h1", "--recompute-granularity", "full"]),
}
LLAMA = ["--position-embedding", "rotary", "--norm", "rmsnorm", "--activation", "swiglu", "--ffn-hidden-size", "96"]
STEPS = 4


def train_on_rank(
    rank: int, size: int, flags: list[str]
) -> tuple[list[StepRecord], list[Piece], list[Tensor], Counter[str]]:
    """Records, weights, the scales after each step, and how many weights were cast in the run."""
    cast: Counter[str] = Counter()
    fill = module.fill

    def counting(role: str, *args: Any, **kwargs: Any) -> Tensor:
        cast[role] += 1
        return fill(role, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "fill", counting)
        job, recorder = job_on_rank(rank, size, flags)
        scales = []
        for _ in range(STEPS):
            job.trainer.train_step(stop=False)
            job.trainer.after_step()
            assert job.trainer.state.fp8 is not None
            scales.append(job.trainer.state.fp8.scales.clone())
    job.state.model.wait_parameters()
    return recorder.records, values_of(nn.ModuleList(job.stages)), scales, cast


@pytest.mark.slow
@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_one_process(name: str, scaling: str, corpus: Path, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    flags = [
        *flags_for(corpus, tmp_path, "--train-iters", str(STEPS)),
        *SCALINGS[scaling],
        *(LLAMA if "tp2-sp" in name else []),
    ]
    ((expected, weights, scales, cast),) = run_ranks(1, train_on_rank, 1, flags)
    results = run_ranks(ranks, train_on_rank, ranks, [*flags, *layout])
    assert cast["weight"] == 4 * 4 * STEPS
    for records, _, found, _ in results:
        if records:  # rank 0's
            for ours, theirs in zip(records, expected, strict=True):
                assert ours.loss == pytest.approx(theirs.loss, rel=2e-3)
                assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=3e-2)
        if scaling == "current":
            continue
        # To the bit the same on all ranks, and but for a largest value that lies at a power of two, those of one
        # process.
        assert all(torch.equal(a, b) for a, b in zip(found, results[0][2], strict=True))
        assert torch.equal(found[0][:, 1], scales[0][:, 1])  # weights as they are drawn
        for ours_, theirs_ in zip(found, scales, strict=True):
            assert ((ours_ / theirs_).log2().abs() <= 1).all()
            assert (ours_ == theirs_).double().mean() > 0.95
    # Once a step on every rank that holds it, whatever the micro-batches, recomputation and chunks.
    holders = ranks // (2 if "--pp" in layout else 1)
    assert sum(casts["weight"] for *_, casts in results) == 4 * 4 * STEPS * holders
    whole = assemble([pieces for _, pieces, _, _ in results])
    for key, value in assemble([weights]).items():
        if value.dim() == 1:  # a key's bias has no gradient but rounding, which Adam scales up
            continue
        assert ((whole[key] - value).double().norm() / value.double().norm().clamp_min(1e-9)).item() < 0.1, key


# --- checkpoints
# -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_history_goes_on_on_another_layout_and_in_another_length(corpus: Path, tmp_path: Path) -> None:
    flags = [*flags_for(corpus, tmp_path, "--train-iters", "6"), *SCALINGS["delayed"]]
    whole = train(1, flags)
    saved = [*flags, "--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    train(2, [*saved, "--tp", "2", "--exit-interval", "3"])
    rest = train(2, [*saved, "--pp", "2", "--fp8-amax-history", "9"])
    assert [record.iteration for record in rest.records] == [4, 5, 6]
    assert distance(rest, Outcome(whole.records[3:], {}, {})) < 2e-3


@pytest.mark.slow
@pytest.mark.sampled(strength=1)
@pytest.mark.parametrize("before", ["off", "current", "delayed"])
@pytest.mark.parametrize("after", ["off", "current", "delayed"])
def test_any_scaling_opens_any_others_checkpoint(before: str, after: str, corpus: Path, tmp_path: Path) -> None:
    """Its probe is computed in bf16, so that it is the same number."""
    base = flags_for(corpus, tmp_path, "--train-iters", "2", "--eval-iters", "0", "--save", str(tmp_path / "saved"))
    train(1, [*base, "--exit-interval", "1", "--fp8", before])
    resumed = train(1, [*base, "--load", str(tmp_path / "saved"), "--fp8", after])
    assert [record.iteration for record in resumed.records] == [2]


# --- steps that are not taken, and what does not count
# ------------------------------------------------------------------


class Spoiled:
    """Makes the weights of one layer infinite for one step."""

    def __init__(self, job: Any, step: int) -> None:
        self.job, self.step = job, step

    def run(self) -> list[dict[str, Tensor]]:
        """The FP8 state after each step."""
        found = []
        for number in range(5):
            weight = next(p for n, p in self.job.stages[0].named_parameters() if n == "blocks.1.mlp.up.weight")
            kept = weight.detach().clone()
            if number == self.step:
                weight.data[3, 3] = float("inf")
            self.job.trainer.train_step(stop=False)
            if number == self.step:
                weight.data.copy_(kept)
            fp8 = self.job.trainer.state.fp8
            found.append({"history": fp8.history.clone(), "scales": fp8.scales.clone()})
        return found


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALINGS)
def test_an_infinity_skips_the_step_and_leaves_the_history(scaling: str, corpus: Path, tmp_path: Path) -> None:
    """A saturating cast would turn it into 448, and train on."""
    job, recorder = job_on_rank(0, 1, [*flags_for(corpus, tmp_path, "--train-iters", "9"), *SCALINGS[scaling]])
    states = Spoiled(job, 2).run()
    job.trainer.log.flush()
    assert [record.skipped for record in recorder.records] == [False, False, True, False, False]
    assert all(torch.equal(states[1][key], states[2][key]) for key in states[1])
    assert scaling == "current" or not torch.equal(states[2]["history"], states[3]["history"])


@pytest.mark.slow
def test_an_overflow_of_fp16_reaches_the_loss_scale(corpus: Path, tmp_path: Path) -> None:
    for more in SCALINGS.values():
        job, recorder = job_on_rank(
            0,
            1,
            [
                *flags_for(
                    corpus, tmp_path, "--train-iters", "12", "--precision", "fp16", "--initial-loss-scale", "3e8"
                ),
                *("--hysteresis", "1", "--eval-iters", "0", *more),
            ],
        )
        job.fit()
        assert {record.skipped for record in recorder.records} == {True, False}
        assert recorder.records[-1].loss_scale < 3e8 and recorder.records[-1].loss < recorder.records[0].loss + 0.1


def test_seven_micro_batches_are_one_entry(corpus: Path, tmp_path: Path) -> None:
    """And evaluation none; the entry is that of one micro-batch of all the samples, but for the last bits of its
    values.
    """
    found = []
    for size in ("1", "7"):
        batch = ["--global-batch-size", "7", "--micro-batch-size", size]
        flags = [*flags_for(corpus, tmp_path, "--train-iters", "2"), *batch]
        job, _ = job_on_rank(0, 1, [*flags, *SCALINGS["delayed"]])
        job.trainer.train_step(stop=False)
        fp8 = job.trainer.state.fp8
        assert fp8 is not None
        before = fp8.history.clone(), fp8.scales.clone(), fp8.amax.clone()
        job.trainer.evaluate()
        assert all(torch.equal(a, b) for a, b in zip(before, (fp8.history, fp8.scales, fp8.amax), strict=True))
        assert (fp8.history[-1] > 0).all() and not fp8.history[:-1].any()
        found.append(fp8.history[-1])
    assert torch.equal(found[0][:, 1], found[1][:, 1])
    assert ((found[0] - found[1]).abs() / found[1]).max() < 0.1


def test_products_that_do_not_fit_stay_and_the_banner_says_which(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = "--train-iters 2 --ffn-hidden-size 72 --micro-batch-size 1 --seq-length 24 --fp8"
    flags = flags_for(corpus, tmp_path, *odd.split())
    job, _ = job_on_rank(0, 1, flags)
    said = " ".join(capsys.readouterr().out.split())
    assert "mlp.up (72 x 64 on a rank: not multiples of 16); mlp.down (64 x 72" in said
    assert "gradients of weights (24 tokens of a micro-batch" in said and "current scaling" in said
    assert job.trainer.state.fp8 is not None and set(job.trainer.state.fp8.rows) == {
        f"blocks.{i}.attention.{n}" for i in range(4) for n in ("qkv", "output")
    }
    job.trainer.train_step(stop=False)


def test_a_machine_without_it_is_an_error_before_training(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: object, **kwargs: object) -> Tensor:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(torch, "_scaled_mm", missing)
    run = parse_run([*flags_for(corpus, tmp_path, "--train-iters", "2"), "--device", "cpu", "--fp8"], 1)
    with pytest.raises(ConfigError, match=r"--fp8 current: this torch .* has no FP8 products on cpu: no kernel"):
        prepare(run, 1, silent)


@pytest.mark.slow
@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_compiled_casts_train_the_same_weights(scaling: str, corpus: Path, tmp_path: Path) -> None:
    """Beside the CPU's kernels what --compile compiles are the casts alone; it would compile what the environment asks
    for instead of them, too.
    """
    try:
        compiler()
    except CompileError:
        pytest.skip("no compiler, nothing is compiled")
    flags = [*flags_for(corpus, tmp_path, "--train-iters", "4", "--recompute-granularity", "full"), *SCALINGS[scaling]]
    plain = train(1, flags, "auto")
    ((records, pieces, graphs),) = run_ranks(1, compiled_on_rank, [*flags, "--compile"])
    assert [(r.loss, r.grad_norm) for r in records] == [(r.loss, r.grad_norm) for r in plain.records]
    weights = assemble([pieces])
    assert all(torch.equal(weights[name], value) for name, value in plain.weights.items())
    # Two shapes of inputs, four of weights, three of gradients; and the trial before the run.
    assert graphs == 2 + 4 + 3 + 1


def compiled_on_rank(rank: int, flags: list[str]) -> tuple[list[StepRecord], list[Piece], int]:
    """Records, final weights, and the number of graphs that were compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    records, _, pieces = trained_on_rank(rank, 1, flags, "auto")
    return records, pieces, int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def left_on_rank(rank: int, size: int, words: list[str]) -> int:
    """Bytes that are there after two steps and were not there after the job was built."""
    job, _ = job_on_rank(rank, size, words)
    _, taken = metered(lambda: [job.trainer.train_step(stop=False) for _ in range(2)])
    job.state.model.wait_parameters()
    return taken.left


@pytest.mark.slow
def test_under_zero_3_no_copy_of_a_weight_is_left_after_a_step(corpus: Path, tmp_path: Path) -> None:
    """The copies were whole on every rank, where ZeRO-3 shards the weights."""
    shape = "--hidden-size 32 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --precision bf16"
    given = [*small_model(3, heads=2), *shape.split(), "--zero-stage", "3", "--train-iters", "3"]
    given += data_flags(corpus, tmp_path)
    without, narrow = (run_ranks(2, left_on_rank, 2, [*given, *more]) for more in ([], ["--fp8", "current"]))
    matrix = 3 * 32 * 32
    assert max(b - a for a, b in zip(without, narrow, strict=True)) < matrix, "less than one of the matrices"


def copies_on_rank(rank: int, size: int, words: list[str]) -> tuple[int, int]:
    """Bytes of the copies of weights that are there after a step, and what the account of memory has of parameters at
    the fullest moment beside the weights themselves.
    """
    job, _ = job_on_rank(rank, size, words)
    job.trainer.train_step(stop=False)
    job.state.model.wait_parameters()
    layers = [getattr(module, "fp8", None) for stage in job.stages for module in stage.modules()]
    copies = [layer._weight for layer in layers if isinstance(layer, Fp8Layer) and layer._weight is not None]
    nbytes = sum(tensor.nbytes for copy in copies for tensor in (copy.values, copy.transposed) if tensor is not None)
    memory = run_memories(job.run, job.grid.axes, "cpu")[job.grid.at.pp]
    return nbytes, memory.peaks.device["parameters"] - memory.state.weights


@pytest.mark.parametrize(
    ("words", "blocks"),
    [
        ("", [3.0]),
        ("--tp 2", [1.5, 1.5]),
        ("--pp 2 --partition 2 1 --fp8 delayed", [2.0, 1.0]),
        ("--zero-stage 3", [0.0, 0.0]),
    ],
)
def test_the_account_of_memory_has_the_copies_of_weights(
    words: str, blocks: list[float], corpus: Path, tmp_path: Path
) -> None:
    """blocks: of each rank, for as many blocks copies stay."""
    shape = "--hidden-size 32 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --precision bf16 --fp8"
    given = [*small_model(3, heads=2), *shape.split(), *words.split(), "--train-iters", "3"]
    copies = run_ranks(len(blocks), copies_on_rank, len(blocks), given + data_flags(corpus, tmp_path))
    assert all(nbytes == planned for nbytes, planned in copies)
    # a block has 12 x 32^2 elements of weights, each twice
    assert [nbytes for nbytes, _ in copies] == [number * 2 * 12 * 32**2 for number in blocks]
