"""The program as its users start it: torchrun and flags, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "--num-layers 2 --hidden-size 24 --num-attention-heads 4 --seq-length 16 --vocab-size 1003"
TINY = SHAPE.split()
"""Flags of a model that trains in a moment on the corpus of the tests."""

Running = subprocess.Popen[bytes] | BaseProcess
"""A command, or a function's process, that has been started."""


def command(
    ranks: int, flags: Sequence[object], *, launcher: bool = False, script: str = "pretrain_gpt.py"
) -> list[str]:
    """torchrun with a port of its own; one rank goes without a launcher, unless it is asked for."""
    program = [str(ROOT / script), *map(str, flags)]
    if ranks == 1 and not launcher:
        return [sys.executable, *program]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program]


def environment(**more: str) -> dict[str, str]:
    """One thread per rank: many ranks share few cores here."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def start(words: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    """A running command, in a session of its own; what it prints goes to `output`."""
    nothing = subprocess.DEVNULL
    with output.open("ab") as sink:
        return subprocess.Popen(
            words, env=environment(), stdin=nothing, stdout=sink, stderr=sink, start_new_session=True
        )


def wait_until(happened: Callable[[], bool], process: Running, output: Path | None = None) -> None:
    """Wait until something has happened. Fails with the output if the process ends before, or after two minutes."""
    deadline = time.monotonic() + 120
    while not happened():
        ended = process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
        assert ended is None and time.monotonic() < deadline, output and output.read_text()
        time.sleep(0.002)


def lines_in(path: Path) -> int:
    """How many lines a file has so far; 0 where it is not there yet."""
    return path.read_text().count("\n") if path.exists() else 0


def children(process: int | None) -> list[int]:
    """Ids of the processes that the main thread of a process has started, the oldest first."""
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def masks(process: int, mask: str, kind: signal.Signals) -> bool:
    """Whether a signal is in a mask of a process's main thread: SigCgt has those with a handler, SigBlk the blocked."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (bits,) = (line.split()[1] for line in lines if line.startswith(f"{mask}:"))
    return bool(int(bits, 16) >> (kind - 1) & 1)


def run(
    ranks: int,
    flags: Sequence[object],
    *,
    timeout: float = 600,
    status: int = 0,
    launcher: bool = False,
    script: str = "pretrain_gpt.py",
) -> str:
    """Run the program to its end and return what it printed; its status must be `status`."""
    words, both, place = command(ranks, flags, launcher=launcher, script=script), subprocess.STDOUT, environment()
    done = subprocess.run(
        words, env=place, stdout=subprocess.PIPE, stderr=both, text=True, timeout=timeout, check=False
    )
    assert done.returncode == status, f"status {done.returncode}, not {status}:\n{done.stdout[-8000:]}"
    return done.stdout


def metrics(path: Path) -> list[dict[str, float]]:
    """The training steps of a metrics file, as far as lines are whole; none where there is no file yet."""
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [line for line in lines if "loss" in line]


def by_iteration(path: Path) -> dict[int, list[dict[str, float]]]:
    """Every line of every iteration: steps re-run after a resume are there more than once."""
    found: dict[int, list[dict[str, float]]] = {}
    for line in metrics(path):
        found.setdefault(int(line["iteration"]), []).append(line)
    return found


def same(step: dict[str, float]) -> dict[str, float]:
    """The numbers of a step that are the same in each run of a command."""
    keys = ("loss", "grad_norm", "lr", "loss_scale", "skipped", "consumed_samples", "consumed_tokens")
    return {key: step[key] for key in keys}


def relative(a: Sequence[float], b: Sequence[float]) -> float:
    """Largest difference over the largest value."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    return float(np.abs(x - y).max() / np.abs(y).max())
