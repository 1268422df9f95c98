"""tools/show_schedule.py as a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "show_schedule.py"


def show(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *words], capture_output=True, text=True)


@pytest.mark.slow
def test_the_bloom_log() -> None:
    lines = [
        json.loads(line)
        for line in show("--preset", "bloom-176b", "--iterations", "1,100,12695,31214").stdout.splitlines()
    ]
    assert [set(line) for line in lines] == [{"iteration", "consumed_samples", "lr", "global_batch_size"}] * 4
    assert [line["consumed_samples"] for line in lines] == [192, 19_200, 9_841_584, 47_768_496]
    assert [line["global_batch_size"] for line in lines] == [192, 192, 2048, 2048]
    assert [f"{line['lr']:.3E}" for line in lines] == ["0.000E+00", "6.229E-06", "5.969E-05", "5.279E-05"]
    assert lines[1]["lr"] == 6e-5 * 19_008 / 183_105, "at full precision"


@pytest.mark.slow
def test_any_flags() -> None:
    words = (
        "--iterations=2-3 --tp 4 --pp 12 --train-samples 80 --global-batch-size 8 --lr 0.5 --lr-decay-style linear "
        "--lr-warmup-samples 16"
    )
    lines = [json.loads(line) for line in show(*words.split()).stdout.splitlines()]
    assert lines == [
        {"iteration": 2, "consumed_samples": 16, "lr": 0.25, "global_batch_size": 8},
        {"iteration": 3, "consumed_samples": 24, "lr": 0.5, "global_batch_size": 8},
    ]


@pytest.mark.slow
def test_mistakes_end_with_2_and_one_message() -> None:
    result = show("--iterations", "0", "--lr", "fast", "--sed", "3")
    assert result.returncode == 2 and result.stdout == ""
    assert "3 problems" in result.stderr and "did you mean --seed?" in result.stderr
