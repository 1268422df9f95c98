"""How the program begins and ends, as its users and their schedulers see it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.command import ROOT, TINY, environment, metrics, run, start

SMALL = [*TINY, "--precision", "fp32"]


@pytest.fixture
def flags(corpus: Path, tmp_path: Path) -> list[object]:
    data = ["--data-path", corpus, "--data-cache-path", tmp_path / "cache", "--split", "90,10,0"]
    return [
        *SMALL,
        *data,
        "--global-batch-size",
        8,
        "--metrics-file",
        tmp_path / "m",
        "--save",
        tmp_path / "saved",
        "--eval-iters",
        1,
    ]


@pytest.mark.slow
def test_everything_wrong_is_said_once_before_anything_starts(tmp_path: Path) -> None:
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
    alone = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *map(str, wrong)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert alone.returncode == 2
    assert "Traceback" not in alone.stderr


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["the launcher", "one rank"])
def test_a_signal_saves_and_ends_well(whom: str, flags: list[object], tmp_path: Path) -> None:
    saves = ["--async-save", "--save-interval", 3] if whom == "the launcher" else []
    process = start(2, [*flags, "--pp", 2, "--train-iters", 100000, *saves], tmp_path / "output")
    deadline = time.monotonic() + 120
    while not ((tmp_path / "m").exists() and len((tmp_path / "m").read_text().splitlines()) > 2):
        assert process.poll() is None, (tmp_path / "output").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    if whom == "the launcher":
        process.terminate()
    else:
        children = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
        ).stdout.split()
        os.kill(int(children[-1]), signal.SIGINT)
    process.wait(timeout=120)
    told = (tmp_path / "output").read_text()
    last = metrics(tmp_path / "m")[-1]["iteration"]
    assert f"saved {tmp_path / 'saved'}/iter_{last:07d}" in told
    if whom == "one rank":
        assert process.returncode == 0, told
    again = run(2, [*flags, "--tp", 2, "--train-iters", 100000, "--exit-interval", 5, "--load", tmp_path / "saved"])
    assert f"iteration {last}" in again
    assert metrics(tmp_path / "m")[-1]["iteration"] % 5 == 0


@pytest.mark.slow
def test_time_is_up(flags: list[object], tmp_path: Path) -> None:
    told = run(2, [*flags, "--zero-stage", 2, "--train-iters", 100000, "--exit-duration-in-mins", 0.05])
    assert "stopping: --exit-duration-in-mins 0.05 has passed" in told
    assert (tmp_path / "saved" / "latest").exists()


@pytest.mark.slow
def test_the_first_failure_is_on_top(flags: list[object], tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    told_before = run(2, [*flags, "--pp", 2, "--train-iters", 4, "--exit-interval", 2])
    assert "from scratch" in told_before
    (latest,) = (tmp_path / "saved").glob("iter_*")
    fragments = sorted(latest.glob("*.safetensors"))[-1]
    fragments.write_bytes(fragments.read_bytes()[:-8])
    told = run(2, [*flags, "--pp", 2, "--train-iters", 4, "--load", tmp_path / "saved"], status=1)
    assert fragments.name in told
    assert "failed" in told


@pytest.mark.slow
def test_an_empty_folder_starts_from_scratch_and_the_saved_run_repeats_it(flags: list[object], tmp_path: Path) -> None:
    told = run(1, [*flags, "--train-iters", 3, "--load", tmp_path / "saved"])
    assert "from scratch (no complete checkpoint in" in told
    first = metrics(tmp_path / "m")
    run(
        1,
        [
            "--config",
            tmp_path / "saved" / "run.yaml",
            "--metrics-file",
            tmp_path / "again",
            "--load",
            "none",
            "--save",
            tmp_path / "other",
        ],
    )
    again = metrics(tmp_path / "again")
    assert [line["loss"] for line in again] == [line["loss"] for line in first]
    lines = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert {"iteration", "valid_loss"} <= lines[-1].keys()
    keys = {
        "iteration",
        "consumed_samples",
        "consumed_tokens",
        "loss",
        "grad_norm",
        "lr",
        "loss_scale",
        "skipped",
        "global_batch_size",
    }
    assert keys | {"step_seconds", "tokens_per_second", "model_tflops_per_rank", "peak_memory_bytes"} == first[0].keys()
