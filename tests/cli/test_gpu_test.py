"""What `make gpu-test` makes of its stages; the stages themselves need a card."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import pytest

gpu_test = importlib.import_module("tools.gpu_test")  # a folder of programs, which is no package
FOUND, Stage, judged, phases, run = gpu_test.FOUND, gpu_test.Stage, gpu_test.judged, gpu_test.phases, gpu_test.run
PYTHON = sys.executable


@pytest.mark.parametrize(
    ("sanitizer", "status", "output", "verdict"),
    [
        (False, 0, "", "passed"),
        (False, 1, "1 failed", "FAILED"),
        (False, None, "", "OUT OF TIME"),
        (True, 0, "84 functions\n========= ERROR SUMMARY: 0 errors", "passed"),
        (True, 0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", "passed"),
        (True, 0, "the tool said nothing", "FAILED"),
        (True, FOUND, "========= Invalid __global__ write; device not supported by chance in the text", "FAILED"),
        (True, 1, "========= Error: Device not supported. Please refer to the documentation", "left out"),
        (True, 1, "Traceback: the program failed by itself, unable to go on: not supported", "FAILED"),
    ],
)
def test_a_verdict(sanitizer: bool, status: int | None, output: str, verdict: str) -> None:
    assert judged(Stage("x", (), 1, sanitizer=sanitizer), status, output) == verdict


@pytest.mark.slow
def test_stages_run_beside_each_other_and_have_an_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    slow = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    stages = [
        Stage("good", (PYTHON, "-c", "import time; time.sleep(1); print('all is well')"), 30),
        Stage("bad", (PYTHON, "-c", "print('what went wrong'); raise SystemExit(3)"), 30),
        Stage("slow", (PYTHON, "-c", slow), 3),
        Stage("where", (PYTHON, "-c", "import os; print(os.environ['PLACE'])"), 30, {"PLACE": "here"}),
    ]
    results = run(stages, tmp_path, began + 60)
    assert [result.verdict for result in results] == ["passed", "FAILED", "OUT OF TIME", "passed"]
    assert [result.words for result in results] == ["all is well", "what went wrong", "KeyboardInterrupt", "here"]
    assert "Traceback" in results[2].output  # it was asked before it was killed, and told where it was
    assert time.monotonic() - began < 20
    assert "    what went wrong" in capfd.readouterr().out


def test_every_file_of_a_card_has_the_mark() -> None:
    """By which `make gpu-test` selects tests."""
    for path in (Path(__file__).resolve().parents[1] / "gpu").glob("test_*.py"):
        module = importlib.import_module(f"tests.gpu.{path.stem}")
        assert "gpu" in [mark.name for mark in module.pytestmark], path
        assert any(name.startswith("test_") for name in vars(module)), path


def test_every_test_of_a_card_is_in_one_stage() -> None:
    """Files of their own stage are left out of the one that takes the rest; no stage is longer than all may take."""
    stages = {stage.name: stage for stages in phases() for stage in stages}
    commands = [stages[name].command for name in ("ranks", "parity", "attention", "fp8", "graphs")]
    named = [word for command in commands for word in command if word.startswith("tests/")]
    ignored = [word.removeprefix("--ignore=") for word in stages["steps"].command if word.startswith("--ignore=")]
    assert sorted(named) == sorted(ignored)
    assert all((Path(__file__).resolve().parents[2] / path).exists() for path in named)
