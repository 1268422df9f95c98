"""The anonymous memory of a program: its own pages, without mappings of files."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

EVERY = 0.005
"""Seconds between two samples."""


class Ran(NamedTuple):
    """A program that has ended. peak: the largest sample of RssAnon, in bytes. output: stdout and stderr together."""

    status: int
    peak: int
    seconds: float
    output: str


def run(command: Sequence[str], cwd: Path) -> Ran:
    """Run a command of one process to its end, and sample its memory meanwhile. Needs Linux's /proc."""
    began, peak = time.monotonic(), 0
    with subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        while child.poll() is None:
            peak = max(peak, anonymous_bytes(child.pid))
            time.sleep(EVERY)
        seconds = time.monotonic() - began
        assert child.stdout is not None
        output = child.stdout.read()
    return Ran(child.returncode, peak, seconds, output)


def anonymous_bytes(pid: int) -> int:
    """The present RssAnon of a process in bytes; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(text.split("RssAnon:")[1].split()[0]) * 1024 if "RssAnon:" in text else 0
