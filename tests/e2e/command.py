"""The program as its users start it: torchrun and flags, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "--num-layers",
    "2",
    "--hidden-size",
    "24",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "16",
    "--vocab-size",
    "1003",
]
"""Flags of a model that trains in a moment on the corpus of the tests."""


def command(ranks: int, flags: Sequence[object], *, launcher: bool = False) -> list[str]:
    """torchrun with a port of its own; one rank goes without a launcher, unless it is asked for."""
    program = [str(ROOT / "pretrain_gpt.py"), *map(str, flags)]
    if ranks == 1 and not launcher:
        return [sys.executable, *program]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program]


def environment(**more: str) -> dict[str, str]:
    """One thread per rank: many ranks share few cores here."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def start(ranks: int, flags: Sequence[object], output: Path) -> subprocess.Popen[bytes]:
    """The running program, in a session of its own; what it prints goes to `output`."""
    with output.open("ab") as sink:
        return subprocess.Popen(
            command(ranks, flags),
            env=environment(),
            stdout=sink,
            stderr=sink,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def run(ranks: int, flags: Sequence[object], *, timeout: float = 600, status: int = 0, launcher: bool = False) -> str:
    """Run the program to its end and return what it printed; its status must be `status`."""
    words = command(ranks, flags, launcher=launcher)
    done = subprocess.run(
        words,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == status, f"status {done.returncode}, not {status}:\n{done.stdout[-8000:]}"
    return done.stdout


def metrics(path: Path) -> list[dict[str, float]]:
    """The training steps of a metrics file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def by_iteration(path: Path) -> dict[int, list[dict[str, float]]]:
    """Every line of every iteration: steps re-run after a resume are there more than once."""
    found: dict[int, list[dict[str, float]]] = {}
    for line in metrics(path):
        found.setdefault(int(line["iteration"]), []).append(line)
    return found


def relative(a: Sequence[float], b: Sequence[float]) -> float:
    """Largest difference over the largest value."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    return float(np.abs(x - y).max() / np.abs(y).max())
