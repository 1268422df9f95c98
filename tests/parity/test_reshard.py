"""Save on one layout, go on with another: 21 pairs, over every axis and schedule; and one checkpoint on ever more
pipeline stages.

`test_resume` goes on with a few layouts in turn; here every pair has a layout of its own to go on with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from megazero.config.parse import parse_run
from megazero.convert.loading import open_model
from megazero.evaluation.documents import indexed_documents
from megazero.evaluation.perplexity import Windowing, score_documents
from megazero.evaluation.scorer import Scorer
from megazero.mpu.axes import axes_of
from megazero.mpu.grid import build_grid
from tests.parity.training import Outcome, data_flags, job_on_rank, small_model, train, worst
from tests.ranks import run_ranks

SAVED, LAST = 2, 5
"""The checkpoint's iteration, and the run's end: three steps."""
MODEL = small_model(6, heads=12)
NUMBERS = [
    "--precision",
    "fp64",
    "--global-batch-size",
    "12",
    "--lr-warmup-iters",
    "2",
    "--hidden-dropout",
    "0.1",
    "--clip-grad",
    "0.5",
]
UNTIED = ["--untie-embeddings-and-output-weights"]


def layout(
    tp: int = 1, pp: int = 1, dp: int = 1, zero: int = 0, schedule: str = "1f1b", virtual: int = 1, *more: str
) -> tuple[int, list[str]]:
    """(ranks, flags)."""
    flags = {
        "tp": tp,
        "pp": pp,
        "zero-stage": zero,
        "pipeline-schedule": schedule,
        "virtual-stages": virtual,
        "micro-batch-size": 1,
    }
    return tp * pp * dp, [word for flag, value in flags.items() for word in (f"--{flag}", str(value))] + list(more)


SP = "--sequence-parallel"
SETS_OF_1, SETS_OF_2 = ("--zero-shard-size", "1"), ("--zero-shard-size", "2")
BEFORE: dict[str, tuple[int, list[str]]] = {
    "tied: one process": layout(),
    "tied: tp2 sp, interleaved pp2": layout(2, 2, 1, 0, "interleaved", 2, SP),
    "tied: zb-v pp2 dp2 ZeRO-2": layout(1, 2, 2, 2, "zb-v", 2, "--bucket-size", "700"),
    "tied: zb-h1 pp3 dp2 ZeRO-1": layout(1, 3, 2, 1, "zb-h1", 1, "--bucket-size", "1500", *SETS_OF_1),
    "untied: tp3 dp2 ZeRO-1": layout(3, 1, 2, 1),
    "untied: zb-h1 pp4": layout(1, 4, 1, 0, "zb-h1"),
    "untied: tp2 pp2 dp2 ZeRO-2": layout(2, 2, 2, 2, "1f1b", 1, "--bucket-size", "900", *SETS_OF_1),
}
AFTER: dict[str, tuple[tuple[int, list[str]], ...]] = {
    "tied: one process": (
        layout(4, 1, 1, 0, "1f1b", 1, SP),
        layout(1, 4, 1, 0, "zb-v", 2),
        layout(1, 1, 4, 2, "1f1b", 1, *SETS_OF_2),
    ),
    "tied: tp2 sp, interleaved pp2": (
        layout(),
        layout(3, 2, 1, 0, "zb-h1"),
        layout(1, 2, 2, 1, "interleaved", 2, *SETS_OF_1),
    ),
    "tied: zb-v pp2 dp2 ZeRO-2": (
        layout(1, 3, 1, 0, "zb-v", 2),
        layout(2, 1, 2, 2, "1f1b", 1, SP),
        layout(1, 2, 2, 1, "gpipe", 2),
    ),
    "tied: zb-h1 pp3 dp2 ZeRO-1": (layout(2, 2, 2, 2, "zb-v", 2), layout(3, 1), layout(1, 2, 1, 0, "interleaved", 4)),
    "untied: tp3 dp2 ZeRO-1": (
        layout(1, 6),
        layout(2, 1, 3, 2, "1f1b", 1, "--bucket-size", "700"),
        layout(3, 2, 1, 0, "interleaved", 2, SP),
    ),
    "untied: zb-h1 pp4": (layout(1, 2, 2, 2, "zb-h1"), layout(2, 2, 1, 0, "zb-v", 2, SP), layout()),
    "untied: tp2 pp2 dp2 ZeRO-2": (
        layout(4, 2, 1, 0, "zb-h1", 1, SP),
        layout(1, 1, 2, 1),
        layout(1, 3, 2, 2, "interleaved", 2),
    ),
}
PAIRS = [(before, number) for before in BEFORE for number in range(len(AFTER[before]))]


def flags_for(before: str, corpus: Path, base: Path) -> list[str]:
    untied = UNTIED if before.startswith("untied") else []
    return [*MODEL, *NUMBERS, *untied, "--train-iters", str(LAST), *data_flags(corpus, base / "cache")]


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """The run that never stopped, of the tied or the untied model, on one process."""
    return cache(lambda name: train(1, flags_for(name, corpus, tmp_path_factory.getbasetemp())))


@pytest.fixture(scope="module")
def saved(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a layout's checkpoint, which is made once."""
    base = tmp_path_factory.getbasetemp()

    @cache
    def folder(name: str) -> Path:
        (ranks, flags), made = BEFORE[name], base / f"reshard-{list(BEFORE).index(name)}"
        train(ranks, [*flags_for(name, corpus, base), *flags, "--save", str(made), "--exit-interval", str(SAVED)])
        return made

    return folder


def test_there_are_21_pairs() -> None:
    """None of them twice, none back to itself, and every axis and schedule on both sides."""
    pairs = [(before.split(":")[0], *BEFORE[before], *AFTER[before][number]) for before, number in PAIRS]
    assert len(PAIRS) == 21 == len({str(pair) for pair in pairs})
    assert all(BEFORE[before] not in AFTER[before] for before in BEFORE)
    for side in (list(BEFORE.values()), [after for own in AFTER.values() for after in own]):
        words = [" ".join(flags) for _, flags in side]
        for needed in (
            "--tp 2",
            "--tp 3",
            "--pp 2",
            "--zero-stage 1",
            "--zero-stage 2",
            "interleaved",
            "zb-h1",
            "zb-v",
            "--tp 1",
            SP,
        ):
            assert any(needed in word for word in words), needed


@pytest.mark.slow
@pytest.mark.sampled(cases=4)
@pytest.mark.parametrize(("before", "number"), PAIRS)
def test_reshard(
    before: str,
    number: int,
    whole: Callable[[str], Outcome],
    saved: Callable[[str], Path],
    corpus: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The next three steps (loss, norm), the validation loss after them and the weights at the end, to 1e-9."""
    ranks, flags = AFTER[before][number]
    resumed = train(
        ranks, [*flags_for(before, corpus, tmp_path_factory.getbasetemp()), *flags, "--load", str(saved(before))]
    )
    right = whole(before.split(":")[0])
    assert [record.iteration for record in resumed.records] == list(range(SAVED + 1, LAST + 1))
    rest = Outcome(right.records[SAVED:], right.losses, right.weights)
    assert all(value < 1e-9 for value in worst(resumed, rest).values()), worst(resumed, rest)
    for ours, theirs in zip(resumed.records, rest.records, strict=True):
        assert abs(ours.loss - theirs.loss) < 1e-9 and abs(ours.grad_norm - theirs.grad_norm) < 1e-9 * max(
            1.0, theirs.grad_norm
        )


STAGES = (1, 3, 12)
DEEP = ["--num-layers", "12", *MODEL[2:], "--global-batch-size", "12", "--lr", "3e-3", "--micro-batch-size", "1"]


def losses_on_rank(rank: int, size: int, flags: list[str], folder: Path, corpus: Path) -> tuple[float, float]:
    """(validation loss of a run that resumes here, loss of the first documents as the evaluation tool opens it)."""

    job, _ = job_on_rank(rank, size, [*flags, "--load", str(folder)])
    valid = job.trainer.evaluate()["valid_loss"]
    grid = build_grid(axes_of(parse_run(flags, size).parallel, size))
    opened = open_model(folder, grid)
    first = (document for document in indexed_documents(str(corpus)) if document.number < 20)
    scores = list(score_documents(Scorer(opened.run, opened.stages, grid, 4), first, Windowing(12, 12)))
    return valid, sum(score.loss for score in scores) / sum(score.tokens for score in scores)


@pytest.mark.slow
@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("bf16", 1e-6)])
def test_the_loss_does_not_grow_with_the_stages(precision: str, tolerance: float, corpus: Path, tmp_path: Path) -> None:
    """BLOOM's: 1.944, 1.954, 1.963, 2.043 at 12, 24, 36 and 72 stages from one checkpoint. Twelve layers here, a tied
    embedding, and the checkpoint written on three stages.
    """
    flags = [*DEEP, "--precision", precision, *data_flags(corpus, tmp_path / "cache")]
    train(3, [*flags, "--pp", "3", "--train-iters", "4", "--save", str(tmp_path / "saved")])
    found = {
        pp: run_ranks(
            pp, losses_on_rank, pp, [*flags, "--pp", str(pp), "--train-iters", "4"], tmp_path / "saved", corpus
        )[0]
        for pp in STAGES
    }
    for pp in STAGES:
        assert found[pp] == pytest.approx(found[1], rel=tolerance), found
    assert found[1][0] < 6.9, "it has learned something: a model that predicts nothing loses 6.91"
