"""How a run ends that is told to stop, or that loses its terminal: what is saved, the status, and what is last on the
screen.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.command import TINY, command, environment, metrics

CTRL_C = b"\x03"


@pytest.fixture
def flags(corpus: Path, tmp_path: Path) -> list[object]:
    data = ["--data-path", corpus, "--data-cache-path", tmp_path / "cache", "--eval-iters", 0, "--precision", "fp32"]
    places = ["--metrics-file", tmp_path / "m", "--save", tmp_path / "saved"]
    return [*TINY, *data, *places, "--global-batch-size", 4, "--train-iters", 100000]


def on_a_terminal(words: list[str], cue: str, keys: bytes) -> tuple[str, int]:
    """Run a command on a terminal of its own and type keys when it has shown the cue; the screen and the status."""
    here, there = os.openpty()
    process = subprocess.Popen(
        words, env=environment(), stdin=there, stdout=there, stderr=there, start_new_session=True, preexec_fn=_take
    )
    os.close(there)
    screen, typed, deadline = b"", False, time.monotonic() + 120
    while True:
        assert time.monotonic() < deadline, screen.decode(errors="replace")
        if not select.select([here], [], [], 1)[0]:
            continue
        try:
            screen += os.read(here, 65536)
        except OSError:  # the last one who had it open has gone
            break
        if not typed and cue.encode() in screen:
            os.write(here, keys)
            typed = True
    os.close(here)
    assert typed, screen.decode(errors="replace")
    return screen.decode(errors="replace").replace("\r", ""), process.wait()


def _take() -> None:
    """In the child: its stdin becomes the terminal that Ctrl-C is typed on."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.slow
def test_ctrl_c_under_torchrun_saves_and_torchrun_says_1(flags: list[object], tmp_path: Path) -> None:
    screen, status = on_a_terminal(command(2, [*flags, "--pp", 2]), " 3/100000 ", CTRL_C)
    last = metrics(tmp_path / "m")[-1]["iteration"]
    assert f"stopping: SIGINT\nsaved {tmp_path}/saved/iter_{last:07d}" in screen
    assert status == 1 and screen.rstrip().endswith("got signal: 2"), "as docs/reference/exit-status.md says"
    assert "KeyboardInterrupt" not in screen


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_before_the_first_step_ends_at_once(ranks: int, flags: list[object], tmp_path: Path) -> None:
    """As soon as the ranks can be told; all of them are, as a launcher does it."""
    with (tmp_path / "output").open("wb") as sink:
        process = subprocess.Popen(
            command(ranks, flags), env=environment(), stdout=sink, stderr=sink, start_new_session=True
        )
    whom = [process.pid]
    deadline = time.monotonic() + 120
    while ranks > 1 and len(whom) < ranks:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.001)
        found = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
        ).stdout.split()
        whom = [int(number) for number in found] if len(found) == ranks else []
    while not all(_handles(number, signal.SIGTERM) for number in whom):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.001)
    for number in whom:
        os.kill(number, signal.SIGTERM)
    status = process.wait(timeout=120)
    told = (tmp_path / "output").read_text()
    assert told.count("stopped by SIGTERM before the first step: there is nothing to save") == 1, told
    assert status == 0 and "Traceback" not in told and not (tmp_path / "m").exists()


def _handles(process: int, kind: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (caught,) = (line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (kind - 1) & 1)


@pytest.mark.slow
def test_a_run_whose_reader_has_gone_trains_on_and_saves(flags: list[object], tmp_path: Path) -> None:
    """As with `| head -1`: both streams go into a pipe that nobody reads any more."""
    process = subprocess.Popen(
        command(1, [*flags, "--exit-interval", 9]), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert [line["iteration"] for line in metrics(tmp_path / "m")] == [*range(1, 10)]
    assert (tmp_path / "saved" / "latest").exists()
