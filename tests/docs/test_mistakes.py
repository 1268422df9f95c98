"""The page of mistakes is what the program says: each line is typed again, as a user would."""

from __future__ import annotations

import subprocess
import sys

from tests.docs.mistakes import PAGE, SECTIONS
from tests.docs.pages import ROOT


def test_the_page_is_what_the_program_answers() -> None:
    """In a process of its own: a fork of this one may wait for threads of torch that are not there."""
    command = [sys.executable, "-m", "tests.docs.mistakes", "-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == PAGE.read_text(), "answers have changed: read them, then python -m tests.docs.mistakes"
    assert "Traceback" not in done.stdout


def test_there_are_fifty() -> None:
    typed = [line for lines in SECTIONS.values() for line in lines]
    assert len(typed) == len({*typed}) >= 50
