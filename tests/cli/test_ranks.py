"""`--ranks N`: how ranks start and end. These import no torch; tests/e2e/test_ranks.py has real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.cli.pretrain import ranks_to_start, this_command
from megazero.config.parse import ConfigError, parse_arguments
from tests.e2e.command import masks, wait_until

START = "import sys; from megazero.cli.pretrain import start_ranks; "
SAYS = "import os, sys, signal; rank = int(os.environ['RANK']); "
LISTENS = """
import os, signal, threading
def say(line):  # in one piece: both ranks write, and an unbuffered print writes word by word
    os.write(1, f"{line}\\n".encode())
KINDS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
def heard(number, frame):
    signal.pthread_sigmask(signal.SIG_BLOCK, KINDS)  # it may be told again
    say(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} heard {signal.Signals(number).name}")
    os._exit(0)
for kind in KINDS:
    signal.signal(kind, heard)
signal.pthread_sigmask(signal.SIG_UNBLOCK, KINDS)
say("ready")
threading.Event().wait()
"""


@pytest.mark.slow
def test_the_status_is_that_of_the_ranks_and_nothing_is_added_to_their_words(tmp_path: Path) -> None:
    """One launcher for all of it, which imports torch once."""
    endings = {
        "print('done' * (rank == 1), end='')": 0,
        "print('it is wrong', file=sys.stderr) if rank == 0 else None; os._exit(2)": 2,
        "sys.exit('rank 1 has failed' if rank else 0)": 1,
        "os.kill(os.getpid(), signal.SIGKILL) if rank else None": 1,
    }
    calls = [f"start_ranks(2, [sys.executable, '-c', {SAYS + ending!r}])" for ending in endings]
    environment, program = os.environ | {"TMPDIR": str(tmp_path)}, START + f"print([{', '.join(calls)}])"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"done{[*endings.values()]}\n"
    assert done.stderr.splitlines() == ["it is wrong", "rank 1 has failed", "rank 1 was ended by SIGKILL"]
    assert not [*tmp_path.iterdir()], "its files are gone"


def test_the_launcher_has_one_thread_until_it_blocks_signals() -> None:
    """A thread of before has no mask, and a signal that the thread gets ends the launcher. numpy has such threads."""
    program = "import os, sys, megazero.cli.pretrain; print('numpy' in sys.modules, len(os.listdir('/proc/self/task')))"
    environment = {name: value for name, value in os.environ.items() if not name.endswith("NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False], ids=["before there are ranks", "while they run"])
def test_the_ranks_hear_a_signal_and_their_status_is_the_end(early: bool, tmp_path: Path) -> None:
    """A signal that comes early waits until somebody listens, and ends nothing."""
    program = START + f"sys.exit(start_ranks(2, [sys.executable, '-c', {LISTENS!r}]))"
    output = tmp_path / "output"
    with output.open("wb") as sink:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=sink, stderr=subprocess.STDOUT)
    blocks, ready = lambda: masks(process.pid, "SigBlk", signal.SIGTERM), lambda: output.read_text().count("ready") == 2
    wait_until(blocks if early else ready, process, output)
    process.send_signal(signal.SIGTERM if early else signal.SIGINT)
    assert process.wait(timeout=120) == 0, output.read_text()
    name = "SIGTERM" if early else "SIGINT"
    told = [line for line in output.read_text().splitlines() if line != "ready"]
    assert sorted(told) == [f"rank {rank} of 2 heard {name}" for rank in range(2)]


@pytest.mark.parametrize(
    ("words", "environment", "count"),
    [
        ("--tp 2", {}, None),
        ("--ranks 4 --tp 2", {}, 4),
        ("--tp 2 --ranks=4", {}, 4),
        ("--ranks 4 --ranks 1", {}, 1),
        ("--ranks 4 --validate-only", {}, None),
        ("--ranks four", {}, None),
        ("--ranks 0", {}, None),
        ("--ranks 4", {"RANK": "0", "WORLD_SIZE": "1"}, None),
    ],
)
def test_what_is_started(words: str, environment: dict[str, str], count: int | None) -> None:
    assert ranks_to_start(words.split(), environment) == count


@pytest.mark.parametrize(
    ("words", "world_size", "wrong"),
    [
        ("--ranks 4", 2, "--ranks 4 starts ranks where there is no launcher; one has started 2 ranks already"),
        ("--ranks 0", 1, "--ranks 0: must be at least 1"),
        ("--ranks four", 1, "--ranks: 'four' is not a whole number"),
        ("--ranks 4 --world-size 8 --validate-only", 1, "--ranks 4 and --world-size 8 say different numbers of ranks"),
    ],
)
def test_what_is_wrong_with_ranks_is_told_with_all_else(words: str, world_size: int, wrong: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_arguments([*words.split(), "--lr", "fast"], world_size)
    assert wrong in raised.value.problems and "--lr: 'fast' is not a number" in raised.value.problems


def test_a_check_is_made_for_the_ranks() -> None:
    wrong = "--tp 3 x --pp 1 = 3 does not divide the world size 4"
    with pytest.raises(ConfigError, match=wrong):
        parse_arguments(["--ranks", "4", "--tp", "3", "--validate-only", "--num-attention-heads", "12"], 1)
    right = ["--ranks", "4", "--tp", "2", "--validate-only", "--vocab-size", "100"]
    assert parse_arguments(right, 1).command.ranks == 4


def test_ranks_are_started_as_this_program_was() -> None:
    flags = ["--ranks", "2", "--tp", "2"]
    for words in (["-m", "megazero", "pretrain"], ["/env/bin/megazero", "pretrain"], ["-X", "dev", "pretrain_gpt.py"]):
        assert this_command(["python", *words, *flags], flags) == [sys.executable, *words]
    assert this_command(["python", "-c", "a program"], flags) == [sys.executable, "-m", "megazero", "pretrain"]
