"""Kill -9 at random moments, resume, and nobody can tell from the numbers."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.command import by_iteration, run, start

STEPS = 60
KILLS = 10
SAME = ("loss", "grad_norm", "lr", "loss_scale", "skipped", "consumed_samples", "consumed_tokens")
HOME = ["--tp", 2, "--pp", 2, "--zero-stage", 1, "--micro-batch-size", 2]
AWAY = (
    ["--tp", 1, "--pp", 2, "--zero-stage", 2, "--micro-batch-size", 1, "--pipeline-schedule", "gpipe"],
    ["--tp", 4, "--pp", 1, "--zero-stage", 0, "--micro-batch-size", 4, "--sequence-parallel"],
)


def common(folder: Path, corpus: Path, precision: str) -> list[object]:
    model = ["--num-layers", 3, "--hidden-size", 24, "--num-attention-heads", 4, "--seq-length", 16, "--hidden-dropout", 0.1]
    data = ["--data-path", corpus, "--vocab-size", 1003, "--data-cache-path", folder.parent / "cache", "--split", "90,10,0"]
    steps = ["--precision", precision, "--global-batch-size", 8, "--train-iters", STEPS, "--lr-warmup-iters", 5, "--eval-iters", 0]
    return [
        *model,
        *data,
        *steps,
        "--save",
        folder / "saved",
        "--load",
        folder / "saved",
        "--save-interval",
        4,
        "--metrics-file",
        folder / "m",
    ]


def kill_at(ranks: int, flags: Sequence[object], folder: Path, seconds_after_first_step: float) -> None:
    """Start, wait for a step beyond those on file, then kill the launcher with -9 after a moment."""
    lines = folder / "m"
    before = len(lines.read_text().splitlines()) if lines.exists() else 0
    process = start(ranks, flags, folder / "output")
    deadline = time.monotonic() + 180
    while process.poll() is None and time.monotonic() < deadline:
        if lines.exists() and len(lines.read_text().splitlines()) > before:
            break
        time.sleep(0.02)
    time.sleep(seconds_after_first_step)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_killed_ten_times(tmp_path: Path, corpus: Path) -> None:
    random_ = random.Random(7)
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    run(4, [*HOME, *common(tmp_path / "whole", corpus, "fp64")])
    flags = [*common(tmp_path / "killed", corpus, "fp64"), "--async-save"]  # beside the steps or not, the same state is saved
    for number in range(KILLS):
        layout = AWAY[number // 4] if number in (3, 7) else HOME
        kill_at(4, [*layout, *flags], tmp_path / "killed", random_.uniform(0.0, 0.8))
    for _ in range(3):  # three resumes in a row, the last of which has nothing left to do
        run(4, [*HOME, *flags])
    whole, killed = by_iteration(tmp_path / "whole" / "m"), by_iteration(tmp_path / "killed" / "m")
    assert sorted(killed) == sorted(whole) == list(range(1, STEPS + 1))
    for iteration, (expected,) in whole.items():
        for line in killed[iteration]:
            for key in SAME:
                assert line[key] == pytest.approx(expected[key], rel=1e-9, abs=0), (iteration, key)


@pytest.mark.slow
def test_killed_on_one_layout_is_bitwise(tmp_path: Path, corpus: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    run(4, [*HOME, *common(tmp_path / "whole", corpus, "bf16")])
    flags = [*HOME, *common(tmp_path / "killed", corpus, "bf16"), "--async-save"]
    for seconds in (0.1, 0.4, 0.9):
        kill_at(4, flags, tmp_path / "killed", seconds)
    run(4, flags)
    whole, killed = by_iteration(tmp_path / "whole" / "m"), by_iteration(tmp_path / "killed" / "m")
    for iteration, (expected,) in whole.items():
        for line in killed[iteration]:
            assert {key: line[key] for key in SAME} == {key: expected[key] for key in SAME}
