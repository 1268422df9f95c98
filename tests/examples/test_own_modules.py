"""The page "Your own model": its commands print the losses of its loop in plain torch, and what the page shows."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file

from tests.docs.pages import commands, fences
from tests.e2e.command import ROOT, environment
from tests.examples.own_programs import HELD_OUT, LOSS, numbers, told_on

PAGE = "docs/how-to/own-model.md"
PROGRAMS = ("own_plain", "own_modules")
LINES = [command.line for command in commands(PAGE) if any(f"examples/{name}.py" in command.line for name in PROGRAMS)]
(LARGE,) = [line for line in LINES if "ulimit" in line]
SMALL = [line for line in LINES if line != LARGE]
OTHERWISE = ("bf16", "fp16", "--meta")
"""What makes other numbers than the plain loop does."""
OUTPUTS = [text for text in fences(PAGE, "text") if numbers(LOSS, text)]
"""What the page shows of the plain loop, and of its last command."""
NORM = r"gradient norm ([\d.]+)"


@cache
def told(line: str) -> str:
    """What a command of the page prints."""
    words = shlex.split(line)
    ranks = int(words[words.index("--nproc-per-node") + 1]) if words[0] == "torchrun" else 1
    at = next(number for number, word in enumerate(words) if word.endswith(".py"))
    with TemporaryDirectory() as folder:
        flags = [word.replace("/scratch", folder) for word in words[at + 1 :]]
        return told_on(ranks, Path(words[at]).name, flags, Path(folder))


def test_the_page_shows_what_the_plain_loop_prints() -> None:
    printed, shown = told(SMALL[0]), OUTPUTS[0]
    assert len(numbers(LOSS, shown)) == 4
    for pattern in (LOSS, NORM, HELD_OUT):
        assert numbers(pattern, printed) == pytest.approx(numbers(pattern, shown), rel=0.02)


@pytest.mark.parametrize("line", [line for line in SMALL[1:] if not any(word in line for word in OTHERWISE)])
def test_a_layout_prints_what_the_plain_loop_prints(line: str) -> None:
    for pattern in (LOSS, NORM, HELD_OUT):
        assert numbers(pattern, told(line)) == pytest.approx(numbers(pattern, told(SMALL[0])), rel=0.01)


@pytest.mark.parametrize("line", [line for line in SMALL if any(word in line for word in OTHERWISE)])
def test_others_learn_too(line: str) -> None:
    losses = numbers(LOSS, told(line))
    assert len(losses) == 4 and losses[-1] < 0.5 * losses[0] and numbers(HELD_OUT, told(line))[0] < 0.3


def test_ranks_train_alike(tmp_path: Path) -> None:
    """Under torchrun, as a reader starts it."""
    line = next(line for line in SMALL if line.startswith("torchrun"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *shlex.split(line)[1:]]
    done = subprocess.run([*command, "--steps", "4"], cwd=ROOT, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert numbers(LOSS, done.stdout) == numbers(LOSS, told_on(1, "own_modules.py", ["--steps", "4"], tmp_path))


def test_the_loop_goes_on(tmp_path: Path) -> None:
    """Stopped in the middle, and gone on with on two stages, it ends with the loss of a run in one go."""
    saved = {"save": str(tmp_path / "saved"), "load": str(tmp_path / "saved")}
    whole = told_on(1, "own_loop.py", [], tmp_path)
    begun = told_on(1, "own_loop.py", ["--settings", json.dumps({**saved, "exit_interval": 60})], tmp_path)
    ended = told_on(2, "own_loop.py", ["--settings", json.dumps({**saved, "pp": 2})], tmp_path)
    assert "stopped_by='--exit-interval 60'" in begun and "finished=True" in whole and "finished=True" in ended
    losses = [numbers(r"validation after iteration 100: +valid_loss ([\d.]+)", told) for told in (whole, ended)]
    assert losses[0] == losses[1] and losses[0][0] < 0.3


@pytest.mark.slow
def test_a_model_of_more_than_the_memory(tmp_path: Path) -> None:
    """One step of the page's last command, in the shell: the first loss is the one that the page shows."""
    line = LARGE.replace("/scratch", str(tmp_path)).replace("--steps 4", "--steps 1")
    line = line.replace("large.safetensors", str(tmp_path / "large.safetensors")).replace(
        " python ", f" {sys.executable} "
    )
    done = subprocess.run(
        ["sh", "-c", line], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    shown = numbers(LOSS, OUTPUTS[1])
    assert numbers(LOSS, done.stdout.decode()) == pytest.approx(shown[:1], rel=0.01)
    limit = 1024 * int(LARGE.split()[2].rstrip(";"))
    opened = load_file(tmp_path / "large.safetensors")
    assert sum(tensor.nbytes for tensor in opened.values()) > 1.5 * limit
    assert all(torch.isfinite(tensor).all() for tensor in opened.values())
