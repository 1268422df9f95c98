"""A stream that breaks is told once on the other one, and nothing that is printed raises."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.telemetry.console import Console

ROOT = Path(__file__).resolve().parents[2]


class Breaking(io.StringIO):
    """A stream whose reader goes away."""

    broken = False

    def write(self, text: str) -> int:
        if self.broken:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        return super().write(text)

    def flush(self) -> None:
        if self.broken:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_what_a_stream_says_when_it_breaks_is_told_once() -> None:
    stream, told = Breaking(), list[str]()
    console = Console(stream, told.append)
    print("before", file=console, flush=True)
    assert (stream.getvalue(), told, console.isatty()) == ("before\n", [], False)
    stream.broken = True
    for _ in range(3):
        print("after", file=console, flush=True)
    assert told == ["Broken pipe"]


PROGRAM = """
import os, sys
from megazero.telemetry.console import survive_lost_console
survive_lost_console()
for number in range(3):
    print("out", number, flush=True)
    print("err", number, file=sys.stderr, flush=True)
descriptor = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(descriptor, b"%d: whole" % descriptor)
"""


@pytest.mark.parametrize(
    ("redirections", "out", "err"),
    [
        (
            ">/dev/full",
            "",
            "stdout is lost (No space left on device); the run goes on without it, and files are "
            "written as before\nerr 0\nerr 1\nerr 2\n",
        ),
        (
            "2>/dev/full",
            "out 0\nstderr is lost (No space left on device); the run goes on without it, and files are "
            "written as before\nout 1\nout 2\n",
            "",
        ),
        (">/dev/full 2>&1", "", ""),
        (">&-", "", "err 0\nerr 1\nerr 2\n"),
        (">&- 2>&- <&-", "", ""),
    ],
)
def test_a_program_goes_on_without_its_console(redirections: str, out: str, err: str, tmp_path: Path) -> None:
    words = ["bash", "-c", f'"$0" "$@" {redirections}', sys.executable, "-c", PROGRAM, str(tmp_path / "file")]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, out, err)
    number, _, text = (tmp_path / "file").read_text().partition(": ")
    assert text == "whole" and int(number) > 2, "a file that took the number of stdout would get what others print"
