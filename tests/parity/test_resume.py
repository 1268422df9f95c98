"""Save on one layout, go on with any other: the next steps and the final weights are those of the run that never
stopped.

Fault 26 (BLOOM: the loss of one checkpoint was 1.944, 1.954, 1.963, 2.043 at pp 12, 24, 36, 72) and faults 27 and 30.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.training import Outcome, data_flags, job_on_rank, small_model, train, worst
from tests.ranks import run_ranks
from tests.stages import SHARDED_GRADIENTS, STAGES

MODEL = small_model(5, heads=12)
NUMBERS = [
    "--precision",
    "fp64",
    "--global-batch-size",
    "12",
    "--train-iters",
    "5",
    "--lr-warmup-iters",
    "2",
    "--hidden-dropout",
    "0.1",
]
STOP = 2
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "tp4-sp": (4, ["--tp", "4", "--sequence-parallel", "--micro-batch-size", "1"]),
    "pp3": (3, ["--pp", "3", "--zero-stage", "1"]),
    **{f"tp2-dp3-z{z}": (6, ["--tp", "2", "--zero-stage", str(z), "--bucket-size", "700"]) for z in SHARDED_GRADIENTS},
    "pp2-dp2-z1": (
        4,
        ["--pp", "2", "--zero-stage", "1", "--virtual-stages", "2", "--micro-batch-size", "1", "--bucket-size", "1500"],
    ),
    "pp2-dp2-zb-v": (
        4,
        [
            "--pp",
            "2",
            "--zero-stage",
            "2",
            "--pipeline-schedule",
            "zb-v",
            "--virtual-stages",
            "2",
            "--micro-batch-size",
            "1",
        ],
    ),
    "tp3-pp2": (6, ["--tp", "3", "--pp", "2", "--pipeline-schedule", "gpipe", "--recompute-granularity", "full"]),
}


def flags_for(corpus: Path, base: Path) -> list[str]:
    return [*MODEL, *NUMBERS, *data_flags(corpus, base / "cache")]


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run that never stopped, on one process."""
    return train(1, flags_for(corpus, tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="module")
def saved(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of iteration `STOP` from every layout."""
    base = tmp_path_factory.getbasetemp()
    folders = {}
    for name, (ranks, layout) in LAYOUTS.items():
        folders[name] = base / f"saved-{name}"
        train(ranks, [*flags_for(corpus, base), *layout, "--save", str(folders[name]), "--exit-interval", str(STOP)])
    return folders


NAMES = list(LAYOUTS)
PAIRS = [(before, NAMES[(number + step) % len(NAMES)]) for number, before in enumerate(NAMES) for step in (0, 1, 3)]
"""Each layout goes on as itself, and as two others; `test_reshard` has another 21 pairs."""


@pytest.mark.slow
@pytest.mark.sampled(strength=1)
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_fault_26_any_layout_to_any_layout(
    before: str,
    after: str,
    whole: Outcome,
    saved: dict[str, Path],
    corpus: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    ranks, layout = LAYOUTS[after]
    resumed = train(ranks, [*flags_for(corpus, tmp_path_factory.getbasetemp()), *layout, "--load", str(saved[before])])
    assert [record.iteration for record in resumed.records] == [3, 4, 5]
    rest = Outcome(whole.records[STOP:], whole.losses, whole.weights)
    assert all(value < 1e-9 for value in worst(resumed, rest).values()), worst(resumed, rest)
    for ours, theirs in zip(resumed.records, rest.records, strict=True):
        assert (ours.lr, ours.consumed_samples, ours.consumed_tokens) == (
            theirs.lr,
            theirs.consumed_samples,
            theirs.consumed_tokens,
        )


@pytest.mark.slow
@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("stage", STAGES[1:])
def test_fault_27_30_three_resumes_in_a_row_are_bitwise(stage: int, corpus: Path, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS["pp2-dp2-z1"]
    flags = [*flags_for(corpus, tmp_path), *layout, "--zero-stage", str(stage), "--precision", "bf16"]
    flags = [
        word for i, word in enumerate(flags) if word != "fp64" and (word != "--precision" or flags[i + 1] == "bf16")
    ]
    whole = train(ranks, flags)
    folder = ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    records = []
    for _ in range(3):
        records += train(ranks, [*flags, *folder, "--exit-interval", "1"]).records
    last = train(ranks, [*flags, *folder])
    records += last.records
    assert [record.iteration for record in records] == [1, 2, 3, 4, 5]
    same = [(record.loss, record.grad_norm, record.lr) for record in records]
    assert same == [(record.loss, record.grad_norm, record.lr) for record in whole.records]
    assert all(bool((last.weights[name] == values).all()) for name, values in whole.weights.items())


CHAIN = (
    (4, "--zero-stage 3 --pp 2"),
    (2, "--zero-stage 0"),
    (2, "--zero-stage 3"),
    (3, "--zero-stage 3 --zero3-persist-below 30 --micro-batch-size 2"),
    (4, "--zero-stage 1 --zero-shard-size 2"),
    (4, "--zero-stage 2 --pp 2 --pipeline-schedule zb-h1 --micro-batch-size 2"),
    (4, "--zero-stage 3 --pp 2 --pipeline-schedule zb-v --virtual-stages 2"),
)
"""(ranks, flags): layouts of one step each, each after another ZeRO stage, dp or pp."""


@pytest.mark.slow
def test_from_any_stage_of_zero_to_any_other(corpus: Path, tmp_path: Path) -> None:
    """Every step of a run goes on from the checkpoint that another layout wrote, while the batch grows; the embedding
    is tied over stages.
    """
    ramp = ["--global-batch-size", "36", "--rampup-batch-size", "12", "12", "72", "--train-iters", str(len(CHAIN))]
    flags = [*flags_for(corpus, tmp_path), *ramp, "--attention-dropout", "0.1", "--micro-batch-size", "3"]
    folder = ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved"), "--exit-interval", "1"]
    runs = [train(ranks, [*flags, *folder, *words.split()]) for ranks, words in CHAIN]
    whole = train(1, [*flags, "--micro-batch-size", "12"])
    assert [record.global_batch_size for record in whole.records] == [12, 12, 12, 24, 24, 36, 36]
    ours = Outcome([record for run in runs for record in run.records], runs[-1].losses, runs[-1].weights)
    assert [record.iteration for record in ours.records] == [record.iteration for record in whole.records]
    assert all(value < 1e-9 for value in worst(ours, whole).values()), worst(ours, whole)


def evaluate_on_rank(rank: int, size: int, flags: list[str]) -> float:
    job, _ = job_on_rank(rank, size, flags)
    return job.trainer.evaluate()["valid_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("written", "read", "tolerance"), [("fp64", "fp32", 1e-5), ("fp32", "bf16", 2e-2), ("bf16", "fp64", 2e-2)]
)
def test_any_precision_opens_any_other(written: str, read: str, tolerance: float, corpus: Path, tmp_path: Path) -> None:
    base = [word for word in flags_for(corpus, tmp_path) if word not in ("--precision", "fp64")]
    train(2, [*base, "--precision", written, "--tp", "2", "--save", str(tmp_path / "saved"), "--exit-interval", "2"])
    losses = [
        run_ranks(
            2, evaluate_on_rank, 2, [*base, "--precision", precision, "--pp", "2", "--load", str(tmp_path / "saved")]
        )[0]
        for precision in (written, read)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)


@pytest.mark.slow
def test_fp16_after_bf16_begins_at_its_own_scale(corpus: Path, tmp_path: Path) -> None:
    """It went on from bf16's scale, which is 1: small gradients were lost for thousands of steps."""
    base = [word for word in flags_for(corpus, tmp_path) if word not in ("--precision", "fp64")]
    train(1, [*base, "--precision", "bf16", "--save", str(tmp_path / "saved"), "--exit-interval", "2"])
    resumed = train(
        1, [*base, "--precision", "fp16", "--initial-loss-scale", "1024", "--load", str(tmp_path / "saved")]
    )
    assert [record.loss_scale for record in resumed.records] == [1024.0] * 3
