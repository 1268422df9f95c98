"""`megazero pretrain --ranks N`, as a user of one host starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.command import TINY, command, environment, lines_in, metrics, start, wait_until

COMMAND = [sys.executable, "-m", "megazero", "pretrain", "--ranks", "2"]


@pytest.mark.slow
def test_ctrl_c_saves_and_ends_with_0(corpus: Path, tmp_path: Path) -> None:
    """Under torchrun it is 1 and a traceback."""
    data = ["--data-path", corpus, "--data-cache-path", tmp_path / "cache", "--eval-iters", 0, "--precision", "fp32"]
    places = ["--metrics-file", tmp_path / "m", "--save", tmp_path / "saved"]
    flags = [*TINY, *data, *places, "--global-batch-size", 4, "--train-iters", 100000, "--pp", 2]
    process = start([*COMMAND, *map(str, flags)], tmp_path / "output")
    wait_until(lambda: lines_in(tmp_path / "m") > 2, process, tmp_path / "output")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=120) == 0
    told, last = (tmp_path / "output").read_text(), metrics(tmp_path / "m")[-1]["iteration"]
    assert "2 ranks, tp 1 x pp 2 x dp 1" in told
    assert f"stopping: SIGINT\nsaved {tmp_path}/saved/iter_{last:07d}" in told
    assert not any(word in told for word in ("Traceback", "torchrun", "torch.distributed", "KeyboardInterrupt"))


@pytest.mark.slow
def test_a_wrong_configuration_ends_with_2_and_one_message() -> None:
    wrong = ["--tp", "5", "--lerning-rate", "1", "--lr", "fast"]
    done = subprocess.run([*COMMAND, *wrong], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].endswith("problems in the configuration:") and all(line.startswith("  ") for line in lines[1:])
    for text in ("--tp 5 does not divide", "--lerning-rate 1:", "--lr: 'fast'"):
        assert done.stderr.count(text) == 1, done.stderr


OF_ITS_OWN = """
import os, sys
from megazero.cli.pretrain import main

sys.exit(main([flag.replace("@", os.environ["RANK"]) for flag in sys.argv[1:]]))
"""
"""A program whose flags have the rank in the place of an @."""


@pytest.mark.slow
def test_a_file_that_one_rank_alone_cannot_read_is_said_soon(corpus: Path, tmp_path: Path) -> None:
    """The other ranks have found nothing wrong, so nobody waits for what they would say; and they do not wait for a
    signal to all ranks when the launcher ends them.
    """
    (tmp_path / "program.py").write_text(OF_ITS_OWN)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"words-0{suffix}").symlink_to(corpus.with_suffix(suffix))
    flags = [*TINY, "--data-path", tmp_path / "words-@", "--data-cache-path", tmp_path / "cache", "--train-iters", 2]
    begin = time.monotonic()
    done = subprocess.run(
        command(2, flags, script=str(tmp_path / "program.py")),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert time.monotonic() - begin < 25, done.stderr
    said = f"--data-path: no file {tmp_path}/words-1.bin"
    assert done.returncode == 1, "torchrun's own"
    assert done.stderr.count(said) == 2, "once by rank 1, once in torchrun's summary"
    assert "rank 1: 1 problem in the configuration:" in done.stderr
    assert "exitcode  : 2" in done.stderr and "SIGKILL" not in done.stderr
    assert "the configuration is wrong; rank 1 says how" in done.stderr, "of rank 0, in torchrun's summary"
