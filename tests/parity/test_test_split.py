"""--test-iters: the finished run is evaluated on the test part of --split, and on nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazero.config.parse import ConfigError
from megazero.data.indexed import IndexedDataset
from megazero.data.writer import PairWriter
from tests.parity.training import data_flags, job_on_rank, small_model
from tests.ranks import run_ranks

MODEL = small_model(2, heads=4)
NUMBERS = "--precision fp64 --global-batch-size 1 --micro-batch-size 1 --train-iters 4 --lr 1e-2 --split 80,10,10"
DOCUMENTS = 200


def evaluations(rank: int, size: int, flags: list[str]) -> list[tuple[int, dict[str, float]]]:
    job, recorder = job_on_rank(rank, size, flags)
    found: list[tuple[int, dict[str, float]]] = []
    recorder.evaluation = lambda iteration, losses: found.append((iteration, losses))  # type: ignore[method-assign]
    job.fit()
    return found


@pytest.mark.slow
def test_the_finished_run_is_evaluated_on_the_test_part(corpus: Path, tmp_path: Path) -> None:
    """Against a file of just these documents, of which every sample is taken once: the order does not matter then."""
    whole = IndexedDataset(corpus)
    with PairWriter(tmp_path / "held", whole.dtype) as writer:
        for document in range(DOCUMENTS * 9 // 10, DOCUMENTS):
            writer.write(whole[document], [len(whole[document])])
    samples = str((sum(len(whole[document]) for document in range(DOCUMENTS * 9 // 10, DOCUMENTS)) - 1) // 12)
    asked = ["--eval-iters", samples, "--valid-data-path", "held", str(tmp_path / "held"), "--test-iters", samples]
    flags = [*MODEL, *data_flags(corpus, tmp_path / "cache"), *NUMBERS.split(), *asked]
    for size, layout in ((1, []), (2, ["--pp", "2"])):
        (at, valid), (end, test) = run_ranks(size, evaluations, size, [*flags, *layout])[0]
        assert at == end == 4 and test.keys() == {"test_loss"}
        assert test["test_loss"] == pytest.approx(valid["valid_loss/held"], rel=1e-12)
        assert test["test_loss"] != pytest.approx(valid["valid_loss"], rel=1e-6)
    stopped = run_ranks(1, evaluations, 1, [*flags, "--exit-interval", "2"])[0]
    assert stopped == [], "a run that is not finished is not evaluated"


def test_a_split_without_a_test_part_is_refused(corpus: Path, tmp_path: Path) -> None:
    flags = [
        *MODEL,
        *data_flags(corpus, tmp_path / "cache"),
        *NUMBERS.split(),
        "--split",
        "90,10,0",
        "--test-iters",
        "2",
    ]
    with pytest.raises(
        ConfigError,
        match=r"2 test samples are asked of .*change --split, or ask for no test samples \(in training: --test-iters "
        r"0\)",
    ):
        job_on_rank(0, 1, flags)
