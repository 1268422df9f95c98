"""--cuda-graphs on the card: captured micro-batches train to the bits of those that run as ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from fused_ops import fp8
from megazero.pipeline.graphs import WARM_UP, GraphedEngine
from megazero.system.device import cuda_available
from tests.e2e.command import metrics, run
from tests.gpu.jobs import assert_equal, deterministic_again, flags_of, job_on_card, train
from tests.gpu.synchronisation import raise_on_synchronisation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_available(), reason="torch finds no NVIDIA GPU on this machine"),
]

NUMBERS = ["--micro-batch-size", "2", "--lr", "1e-3", "--deterministic"]
RUNS = {
    "one micro-batch": ["--global-batch-size", "2"],
    "four, ZeRO-1": ["--global-batch-size", "8", "--zero-stage", "1"],
    "dropout": ["--global-batch-size", "6", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"],
    "untied, recompute": [
        *("--global-batch-size", "4", "--untie-embeddings-and-output-weights", "--recompute-granularity", "full"),
        *("--position-embedding", "learned"),
    ],
    "documents, masks": ["--global-batch-size", "4", "--document-mask", "--eod-mask-loss", "--eod-id", "0"],
    "fp16 overflows": [
        *("--global-batch-size", "4", "--precision", "fp16", "--initial-loss-scale", "6.4e7", "--hysteresis", "1"),
        *("--loss-scale-window", "4"),
    ],
    "FP8": ["--global-batch-size", "6", "--fp8", "delayed"],
    "a growing batch": ["--global-batch-size", "6", "--rampup-batch-size", "2", "2", "16"],
    "evaluation between": ["--global-batch-size", "4", "--eval-interval", "5"],
}


@pytest.mark.parametrize("name", RUNS)
def test_graphs_train_as_ever(name: str, corpus: Path, tmp_path: Path) -> None:
    if name == "FP8" and (missing := fp8.unavailable_reason("cuda")):
        pytest.skip(missing)
    flags = flags_of([*NUMBERS, *RUNS[name], "--train-iters", "20"], corpus, tmp_path / "cache")
    with deterministic_again():
        eager, graphed = train(flags), train([*flags, "--cuda-graphs"])
    assert_equal(graphed, eager)
    if name == "fp16 overflows":
        assert set(eager.series("skipped")) == {"True", "False"}


def test_a_replay_waits_for_nothing(corpus: Path, tmp_path: Path) -> None:
    flags = "--micro-batch-size 2 --global-batch-size 8 --train-iters 50 --log-interval 50 --cuda-graphs".split()
    job, _ = job_on_card(flags_of(flags, corpus, tmp_path / "cache"))
    assert isinstance(job.trainer.engine, GraphedEngine)
    for _ in range(WARM_UP + 1):
        job.trainer.train_step(stop=False)
    assert len(job.trainer.engine._graphs) == 2
    with raise_on_synchronisation(job.grid.device):
        for _ in range(3):
            job.trainer.train_step(stop=False)


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_the_whole_one(corpus: Path, tmp_path: Path) -> None:
    flags = flags_of([*NUMBERS, "--global-batch-size", "8", "--train-iters", "20"], corpus, tmp_path / "cache")
    with deterministic_again():
        whole = train(flags)
        saved = [*flags, "--save", str(tmp_path / "saved"), "--cuda-graphs"]
        first = train([*saved, "--exit-interval", "10"])
        rest = train([*saved, "--load", str(tmp_path / "saved")])
    assert [len(part.records) for part in (first, rest)] == [10, 10]
    rest.records[:0] = first.records
    assert_equal(rest, whole)


@pytest.mark.slow
def test_ranks_that_share_the_card_replay_between_their_first_and_last_micro_batch(
    corpus: Path, tmp_path: Path
) -> None:
    """dp 2 over gloo, ZeRO-1; four micro-batches a rank, of which two are replayed."""
    numbers = ["--global-batch-size", "16", "--train-iters", "12", "--zero-stage", "1", "--backend", "gloo"]
    flags = flags_of([*NUMBERS, *numbers], corpus, tmp_path / "cache")
    losses = []
    for more in ([], ["--cuda-graphs"]):
        path = tmp_path / f"metrics{len(more)}"
        said = run(2, [*flags, *more, "--metrics-file", path])
        assert ("replay 2 of a rank's 4 micro-batches" in said) == bool(more)
        losses.append([(line["loss"], line["grad_norm"]) for line in metrics(path)])
    assert len(losses[0]) == 12 and losses[0] == losses[1]
