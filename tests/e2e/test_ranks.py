"""`megazero pretrain --ranks N`, as a user of one host starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.command import TINY, environment, lines_in, metrics, start, wait_until

COMMAND = [sys.executable, "-m", "megazero", "pretrain", "--ranks", "2"]


@pytest.mark.slow
def test_ctrl_c_saves_and_ends_with_0(corpus: Path, tmp_path: Path) -> None:
    """Under torchrun it is 1 and a traceback."""
    data = ["--data-path", corpus, "--data-cache-path", tmp_path / "cache", "--eval-iters", 0, "--precision", "fp32"]
    places = ["--metrics-file", tmp_path / "m", "--save", tmp_path / "saved"]
    flags = [*TINY, *data, *places, "--global-batch-size", 4, "--train-iters", 100000, "--pp", 2]
    process = start([*COMMAND, *map(str, flags)], tmp_path / "output")
    wait_until(lambda: lines_in(tmp_path / "m") > 2, process, tmp_path / "output")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=120) == 0
    told, last = (tmp_path / "output").read_text(), metrics(tmp_path / "m")[-1]["iteration"]
    assert "2 ranks, tp 1 x pp 2 x dp 1" in told
    assert f"stopping: SIGINT\nsaved {tmp_path}/saved/iter_{last:07d}" in told
    assert "Traceback" not in told and "torch" not in told and "KeyboardInterrupt" not in told


@pytest.mark.slow
def test_a_wrong_configuration_ends_with_2_and_one_message() -> None:
    wrong = ["--tp", "5", "--lerning-rate", "1", "--lr", "fast"]
    done = subprocess.run([*COMMAND, *wrong], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].endswith("problems in the configuration:") and all(line.startswith("  ") for line in lines[1:])
    for text in ("--tp 5 does not divide", "--lerning-rate 1:", "--lr: 'fast'"):
        assert done.stderr.count(text) == 1, done.stderr
