"""Programs of the documentation that train a user's own model, run on ranks of the pool."""

from __future__ import annotations

import io
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.ranks import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LOSS, HELD_OUT, ACCURACY = r"step \d+: loss ([\d.]+)", r"held out: loss ([\d.]+)", r"accuracy ([\d.]+)"


def told_by(rank: int, program: str, flags: list[str], folder: str) -> str:
    """What a rank prints."""
    path = EXAMPLES / program
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as told:
        patch.chdir(folder)
        patch.syspath_prepend(str(path.parent))  # as Python does with the folder of a program that it starts
        patch.setattr(sys, "argv", [str(path), *flags])
        runpy.run_path(str(path), run_name="__main__")
    return told.getvalue()


def told_on(ranks: int, program: str, flags: list[str], folder: Path) -> str:
    """What a program prints, which rank 0 alone does."""
    first, *others = run_ranks(ranks, told_by, program, flags, str(folder))
    assert not any(others)
    return first


def numbers(pattern: str, told: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, told)]
