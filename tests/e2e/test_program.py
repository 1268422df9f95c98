"""What a run says that cannot begin, and what it leaves for another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import TINY, metrics, run
from tests.e2e.halting import whole


@pytest.mark.slow
def test_everything_wrong_is_said_once_before_anything_starts() -> None:
    wrong = ["--tp", 5, "--pp", 2, "--zero-stage", 7, "--lerning-rate", 1, "--global-batch-size", 7, "--lr", "fast"]
    told = run(2, wrong, status=1)  # torchrun's own status; the ranks' is 2
    ours = told[: told.index("problems in the configuration") + 2500]
    assert told.count("problems in the configuration") == 2, "once by rank 0, once in torchrun's summary"
    for text in ("--tp", "--pp", "--zero-stage", "--lerning-rate", "--lr"):
        assert text in ours, text
    assert "exitcode  : 2" in told and "<N/A>" not in told
    last = told[told.index("Root Cause") :]
    assert "problems in the configuration" in last and "--lerning-rate" in last, (
        "torchrun's summary ends with what is wrong"
    )


@pytest.mark.slow
def test_an_empty_folder_starts_from_scratch_and_the_saved_run_repeats_it(corpus: Path, tmp_path: Path) -> None:
    saved, cache = tmp_path / "saved", tmp_path / "cache"
    data = ["--data-path", corpus, "--data-cache-path", cache, "--split", "90,10,0", "--eval-iters", 1]
    flags = [*TINY, *data, "--precision", "fp32", "--global-batch-size", 8, "--train-iters", 3, "--save", saved]
    told = whole(1, [*flags, "--metrics-file", tmp_path / "m", "--load", saved], tmp_path)
    assert "from scratch (no complete checkpoint in" in told
    other = ["--metrics-file", tmp_path / "again", "--load", tmp_path / "other", "--save", tmp_path / "other"]
    whole(1, ["--config", saved / "run.yaml", *other], tmp_path)
    first, again = metrics(tmp_path / "m"), metrics(tmp_path / "again")
    assert [line["loss"] for line in again] == [line["loss"] for line in first]
    lines = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert {"iteration", "valid_loss"} <= lines[-1].keys()
    keys = "iteration consumed_samples consumed_tokens loss grad_norm lr loss_scale skipped global_batch_size "
    keys += "step_seconds tokens_per_second model_tflops_per_rank peak_memory_bytes"
    assert set(keys.split()) == first[0].keys()
