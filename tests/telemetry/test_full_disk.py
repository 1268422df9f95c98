"""A full disk ends no run: metrics wait in memory and come later, curves end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megazero.telemetry.metrics import MetricsFile
from megazero.telemetry.record import StepRecord
from megazero.telemetry.tensorboard import TensorBoard
from tests.disks import fill, small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 64 << 10) as folder:
        yield folder


def test_lines_wait_for_room_and_lose_nothing(disk: Path) -> None:
    told: list[str] = []
    file = MetricsFile(disk / "m", tell=told.append)
    file.write({"iteration": 0, "text": "x" * 4000})  # nearly a page, so that of a later line a part fits
    ballast = fill(disk)
    for iteration in range(1, 40):
        file.write({"iteration": iteration, "loss": 1 / 3})
    written = (disk / "m").read_bytes()
    assert len(written) == 4096 and not written.endswith(b"\n"), "the disk took a part of a line"
    assert len(told) == 1 and told[0].startswith(f"WARNING: {disk / 'm'} cannot be written: No space left on device")
    file.flush(durable=True)
    ballast.unlink()
    file.write({"iteration": 40, "loss": 1 / 3})
    assert [json.loads(line)["iteration"] for line in (disk / "m").read_text().splitlines()] == list(range(41))
    assert told[1:] == [f"{disk / 'm'} can be written again, and has all lines"]
    fill(disk)
    for iteration in range(41, 300):
        file.write({"iteration": iteration, "loss": 1 / 3})
    file.close()
    assert "lines of" in told[-1] and "could not be written" in told[-1]


def test_a_device_that_takes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    file = MetricsFile("/dev/full")
    for iteration in range(3):
        file.write({"iteration": iteration})
    file.close()
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("WARNING: /dev/full cannot be written: No space left on device")
    assert last == "WARNING: the last 3 lines of /dev/full could not be written"


def record(iteration: int) -> StepRecord:
    return StepRecord(iteration, 8, 64, 0.5, 0.1, 1e-3, 1.0, False, 8, 1.0, 64.0, 2.0, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # that of TensorBoard's writer
def test_curves_end_and_the_run_goes_on(disk: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed: pip install tensorboard")
    told: list[str] = []
    board = TensorBoard(disk / "tb", tell=told.append)
    board.step(record(1))
    board.flush(durable=True)
    assert told == [] and os.listdir(disk / "tb")
    fill(disk)
    for iteration in range(2, 1000):
        board.step(record(iteration))
        board.flush(durable=True)
    board.close()
    assert len(told) == 1 and "TensorBoard's files" in told[0] and "cannot be written" in told[0]
