"""How a run ends that is told to stop: what is saved, the status, and what is last on the screen."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megazero.checkpoint.manager import find
from tests.e2e.command import TINY, children, command, environment, lines_in, masks, metrics, start, wait_until
from tests.e2e.halting import Halt, forked, on_nodes, whole

CTRL_C = b"\x03"


@pytest.fixture
def flags(corpus: Path, tmp_path: Path) -> list[object]:
    data = ["--data-path", corpus, "--data-cache-path", tmp_path / "cache", "--eval-iters", 0, "--precision", "fp32"]
    places = ["--metrics-file", tmp_path / "m", "--save", tmp_path / "saved"]
    return [*TINY, *data, *places, "--global-batch-size", 4, "--train-iters", 100000]


def check_saved(told: str, folder: Path) -> None:
    """The last step is saved, and it is said where."""
    last = metrics(folder / "m")[-1]["iteration"]
    assert f"saved {folder}/saved/iter_{last:07d}" in told
    newest = find(folder / "saved")
    assert newest is not None and newest.progress["iteration"] == last


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
    screen, status = on_a_terminal(command(1, flags, launcher=True), " 3/100000 ", CTRL_C)
    assert "stopping: SIGINT\nsaved " in screen
    check_saved(screen, tmp_path)
    assert status == 1 and screen.rstrip().endswith("got signal: 2"), "as docs/reference/exit-status.md says"
    assert "KeyboardInterrupt" not in screen


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True])
def test_ctrl_c_before_the_first_step_leaves_no_swap_files(kept: bool, flags: list[object], tmp_path: Path) -> None:
    """They are as large as the model's state. With --nvme-checkpoint they hold no step yet."""
    output, disk = tmp_path / "output", tmp_path / "disk"
    disk.mkdir()
    shape = ["--hidden-size", 512, "--num-layers", 8, "--num-attention-heads", 8]
    away = ["--offload-optimizer", "nvme", "--nvme-path", disk, *["--nvme-checkpoint"] * kept]
    away += ["--offload-activations", "nvme"] * (not kept)
    process = start(command(1, [*flags, *shape, *away, "--seq-length", 512]), output)
    wait_until(lambda: any(disk.glob("megazero-swap-*.bin")), process, output)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 0 and "before the first step: there is nothing to save" in output.read_text()
    assert not list(disk.iterdir()) and not (tmp_path / "m").exists()


@pytest.mark.slow
def test_a_signal_to_torchrun_saves(flags: list[object], tmp_path: Path) -> None:
    """Also while a save beside the run may be under way."""
    output, saves = tmp_path / "output", ["--async-save", "--save-interval", 3]
    process = start(command(1, [*flags, *saves], launcher=True), output)
    wait_until(lambda: lines_in(tmp_path / "m") > 2, process, output)
    process.terminate()
    process.wait(timeout=120)
    check_saved(output.read_text(), tmp_path)


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_of_them(flags: list[object], tmp_path: Path) -> None:
    output = tmp_path / "output"
    process = forked(2, [*flags, "--pp", 2], output)
    wait_until(lambda: lines_in(tmp_path / "m") > 2, process, output)
    os.kill(children(process.pid)[-1], signal.SIGINT)
    process.join(120)
    assert process.exitcode == 0, output.read_text()
    check_saved(output.read_text(), tmp_path)


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_at_once(flags: list[object], tmp_path: Path) -> None:
    """As soon as the process can be told."""
    process = start(command(1, flags), tmp_path / "output")
    wait_until(lambda: masks(process.pid, "SigCgt", signal.SIGTERM), process, tmp_path / "output")
    process.terminate()
    assert process.wait(timeout=120) == 0
    check_nothing_saved(tmp_path)


@pytest.mark.slow
def test_a_signal_to_all_ranks_before_the_first_step_ends_at_once(flags: list[object], tmp_path: Path) -> None:
    """As a launcher sends it."""
    ranks = [tmp_path / "rank-0", tmp_path / "rank-1"]
    halts = [Halt("start", 0, rank, str(file)) for rank, file in enumerate(ranks)]
    process = forked(2, flags, tmp_path / "output", halts)
    wait_until(lambda: all(file.exists() and file.read_text() for file in ranks), process, tmp_path / "output")
    for file in ranks:
        os.kill(int(file.read_text()), signal.SIGTERM)
    process.join(120)
    assert process.exitcode == 0
    check_nothing_saved(tmp_path)


def check_nothing_saved(folder: Path) -> None:
    told = (folder / "output").read_text()
    assert told.count("stopped by SIGTERM before the first step: there is nothing to save") == 1, told
    assert "Traceback" not in told and not (folder / "m").exists()


@pytest.mark.slow
def test_time_is_up(flags: list[object], tmp_path: Path) -> None:
    told = whole(2, [*flags, "--zero-stage", 2, "--exit-duration-in-mins", 0.02], tmp_path)
    assert "stopping: --exit-duration-in-mins 0.02 has passed" in told
    check_saved(told, tmp_path)


def _runs(process: int) -> bool:
    """Whether a process has not ended. Its parent is gone; nobody may have asked for its status yet."""
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def test_a_run_that_was_started_by_hand_outlives_its_shell(flags: list[object], tmp_path: Path) -> None:
    """`nohup megazero pretrain ... &`, and then the shell ends: one rank has no launcher that could have died. The
    shell is killed while the run trains, and the run goes on until it is told to stop.
    """
    output = tmp_path / "output"
    shell = start(["bash", "-c", f"{shlex.join(command(1, flags))} & wait"], output)
    wait_until(lambda: lines_in(tmp_path / "m") >= 1, shell, output)
    (run,) = children(shell.pid)
    shell.kill()
    shell.wait()
    written, deadline = lines_in(tmp_path / "m"), time.monotonic() + 120
    while lines_in(tmp_path / "m") < written + 20:
        assert _runs(run) and time.monotonic() < deadline, output.read_text()
        time.sleep(0.01)
    os.kill(run, signal.SIGTERM)
    while _runs(run):
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.01)
    check_saved(output.read_text(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [0, 1])
def test_without_a_launcher_all_ranks_end_when_one_is_mistaken(wrong: int, flags: list[object], tmp_path: Path) -> None:
    """Nobody ends the others, which wait for it to come: they look whether a rank has reported why the run ends. Rank 0
    serves their store, and stays until they have read what it reported itself.
    """
    nodes = [tmp_path / f"node{rank}" for rank in range(3)]
    for rank, node in enumerate(nodes):
        node.mkdir()
        (node / "run.yaml").write_text(f"schedule: {{lr: {-1 if rank == wrong else 0.001}}}\n")
    begin = time.monotonic()
    ends = on_nodes(
        nodes, [*flags, "--config", "run.yaml", "--global-batch-size", 6, "--distributed-timeout-minutes", 1]
    )
    assert time.monotonic() - begin < 30
    for rank, (status, told) in enumerate(ends):
        problem = "--lr -1.0: must be"
        assert status == 2, told
        if rank == wrong:
            assert f"  1. {problem}" in told, told
        else:
            assert told.splitlines()[-1].startswith(f"rank {rank} stopped: rank {wrong} says {problem}"), told
