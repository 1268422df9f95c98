"""Save on one layout, go on with another: the next steps and the final weights are those of the run that never stopped.

Fault 26 (BLOOM: the loss of one checkpoint was 1.944, 1.954, 1.963, 2.043 at pp 12, 24, 36, 72) and faults 27 and 30.
`tests/parity/test_tiers.py` has resumes to the bit, with everything off the device.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megazero.checkpoint.format import MANIFEST
from megazero.config.parse import parse_run
from megazero.convert.loading import open_model
from megazero.evaluation.documents import indexed_documents
from megazero.evaluation.perplexity import Windowing, score_documents
from megazero.evaluation.scorer import Scorer
from megazero.mpu.axes import axes_of
from megazero.mpu.grid import build_grid
from tests.parity.conftest import Reference
from tests.parity.layouts import BATCH, CHUNKS, Chain, chains
from tests.parity.test_layouts import Flags
from tests.parity.tier_layouts import NUMBERS
from tests.parity.training import Outcome, data_flags, job_on_rank, small_model, train, unequal, worst
from tests.ranks import run_ranks
from tests.stages import STAGES

pytestmark = pytest.mark.slow

FP8 = [*small_model(4, heads=6), *NUMBERS["fp8"].split(), "--global-batch-size", "4", "--micro-batch-size", "1"]
RAMP = ["--rampup-batch-size", str(BATCH), str(BATCH), str(3 * BATCH), "--global-batch-size", str(2 * BATCH)]
BATCHES = [BATCH, BATCH, BATCH, 2 * BATCH, 2 * BATCH]
"""The batch grows after the third step."""


@pytest.mark.layouts(draw=chains, check=0, test=3, all=30, salt=3)
def test_fault_26_any_layout_to_any_layout(case: Chain, flags_of: Flags, reference: Reference, tmp_path: Path) -> None:
    """Every step of a run goes on from the checkpoint that another layout wrote, while the batch grows."""
    more = ["--train-iters", str(len(BATCHES)), "--lr-warmup-iters", "2", *RAMP]
    flags = [*flags_of(case.layouts[0].model, "fp64", more), "--exit-interval", "1"]
    flags += ["--save", str(tmp_path), "--load", str(tmp_path)]
    runs = [train(each.ranks, [*flags, *each.layout_flags()], way=each.way()) for each in case.layouts]
    ours = Outcome([record for run in runs for record in run.records], runs[-1].losses, runs[-1].weights)
    whole = reference(case.layouts[0].model, more)
    assert [record.global_batch_size for record in whole.records] == BATCHES
    for name in ("iteration", "lr", "consumed_samples", "consumed_tokens"):
        assert [getattr(each, name) for each in ours.records] == [getattr(each, name) for each in whole.records]
    assert all(value < 1e-9 for value in worst(ours, whole).values()), worst(ours, whole)


@pytest.mark.parametrize("seed", [0, 1, 2026])
def test_what_chains_have(seed: int) -> None:
    """Every stage of ZeRO and every schedule is left and gone on with."""
    drawn = [chain.layouts for chain in chains(3, seed)]
    for part in (slice(-1), slice(1, None)):
        side = [layout for chain in drawn for layout in chain[part]]
        assert {layout.zero for layout in side} == {*STAGES} and {layout.schedule for layout in side} == {*CHUNKS}


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("stage", STAGES[1:])
def test_fault_27_30_three_resumes_in_a_row_are_bitwise(stage: int, corpus: Path, tmp_path: Path) -> None:
    """A checkpoint has the history of FP8's scales, too."""
    flags = [*FP8, *data_flags(corpus, tmp_path / "cache"), "--zero-stage", str(stage), "--train-iters", "4"]
    flags += ["--lr-warmup-iters", "2", "--hidden-dropout", "0.1", "--fp8-amax-history", "2"]
    whole = train(2, flags)
    folder = ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    runs = [train(2, [*flags, *folder, "--exit-interval", "1"]) for _ in whole.records]
    records = [record for run in runs for record in run.records]
    assert not unequal(Outcome(records, runs[-1].losses, runs[-1].weights), whole)
    kept = json.loads((tmp_path / "saved" / "iter_0000002" / MANIFEST).read_text())["progress"]["fp8"]
    assert [len(kept["blocks.3.mlp.down"][role]["amax"]) for role in ("input", "weight", "gradient")] == [2, 2, 2]


def evaluate_on_rank(rank: int, size: int, flags: list[str]) -> float:
    job, _ = job_on_rank(rank, size, flags)
    return job.trainer.evaluate()["valid_loss"]


@pytest.mark.parametrize(
    ("written", "read", "tolerance"), [("fp64", "fp32", 1e-5), ("fp32", "bf16", 2e-2), ("bf16", "fp64", 2e-2)]
)
def test_any_precision_opens_any_other(written: str, read: str, tolerance: float, corpus: Path, tmp_path: Path) -> None:
    flags = [*small_model(4, heads=6), *data_flags(corpus, tmp_path / "cache"), "--train-iters", "2"]
    flags += ["--global-batch-size", "12"]
    made = train(1, [*flags, "--precision", written, "--save", str(tmp_path / "saved")])
    reads = [*flags, "--precision", read, "--pp", "2", "--load", str(tmp_path / "saved")]
    assert run_ranks(2, evaluate_on_rank, 2, reads)[0] == pytest.approx(made.losses["valid_loss"], rel=tolerance)


def test_fp16_after_bf16_begins_at_its_own_scale(corpus: Path, tmp_path: Path) -> None:
    """It went on from bf16's scale, which is 1: small gradients were lost for thousands of steps."""
    flags = [*small_model(2, heads=6), *data_flags(corpus, tmp_path / "cache"), "--train-iters", "3"]
    flags += ["--global-batch-size", "4"]
    train(1, [*flags, "--precision", "bf16", "--save", str(tmp_path / "saved"), "--exit-interval", "1"])
    fp16 = ["--precision", "fp16", "--initial-loss-scale", "1024", "--load", str(tmp_path / "saved")]
    assert [record.loss_scale for record in train(1, [*flags, *fp16]).records] == [1024.0] * 2


PARTS = (1, 2, 6)
"""Numbers of pipeline stages."""
DEEP = [*small_model(6, heads=12), "--global-batch-size", "12", "--lr", "3e-3", "--train-iters", "6"]


def losses_on_rank(rank: int, size: int, flags: list[str], folder: Path, corpus: Path) -> tuple[float, float]:
    """(validation loss of a run that resumes here, loss of the first documents as the evaluation tool opens it)."""
    job, _ = job_on_rank(rank, size, [*flags, "--load", str(folder)])
    valid = job.trainer.evaluate()["valid_loss"]
    grid = build_grid(axes_of(parse_run(flags, size), size))
    opened = open_model(folder, grid)
    first = (document for document in indexed_documents(str(corpus)) if document.number < 20)
    scores = list(score_documents(Scorer(opened.run, opened.stages, grid, 4), first, Windowing(12, 12)))
    return valid, sum(score.loss for score in scores) / sum(score.tokens for score in scores)


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("bf16", 1e-6)])
def test_the_loss_does_not_grow_with_the_stages(precision: str, tolerance: float, corpus: Path, tmp_path: Path) -> None:
    """BLOOM's did. Six layers here, a tied embedding, and the checkpoint written on three stages."""
    flags = [*DEEP, "--precision", precision, *data_flags(corpus, tmp_path / "cache"), "--micro-batch-size", "6"]
    train(3, [*flags, "--pp", "3", "--save", str(tmp_path / "saved")])
    found = {
        pp: run_ranks(pp, losses_on_rank, pp, [*flags, "--pp", str(pp)], tmp_path / "saved", corpus)[0] for pp in PARTS
    }
    for losses in found.values():
        assert losses == pytest.approx(found[1], rel=tolerance), found
    assert found[1][0] < 6.9, "it has learned something: a model that predicts nothing loses 6.91"
