"""The program of the documentation that trains modules of its own."""

from __future__ import annotations

import io
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.e2e.command import environment

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "own_modules.py"


def losses_of(told: str) -> list[float]:
    """Those of steps 50, 100, 150 and 200."""
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+),", told)]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """What the program says on one process."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as told:
        patch.setattr(sys, "argv", [str(PROGRAM)])
        runpy.run_path(str(PROGRAM), run_name="__main__")
    return losses_of(told.getvalue())


def test_it_learns_alone(alone: list[float]) -> None:
    assert len(alone) == 4 and alone[-1] < 0.1


@pytest.mark.parametrize("flags", ["--pp 2", "--zero-stage 3"])
def test_ranks_train_alike(flags: str, alone: list[float]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAM)]
    done = subprocess.run(
        [*command, *flags.split()], capture_output=True, text=True, env=environment(), timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = losses_of(done.stdout)
    assert len(losses) == 4 and losses[-1] < 0.1
    if flags == "--pp 2":  # the same samples; replicas have samples of their own
        assert losses[0] == pytest.approx(alone[0], rel=0.05)
