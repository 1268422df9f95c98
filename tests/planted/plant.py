"""A copy of the checkout in which one fault at a time is planted, and what the tests say of it."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path
from typing import NamedTuple

from tests.planted.faults import Fault

ROOT = Path(__file__).resolve().parents[2]
KERNELS = Path("fused_ops/_kernels")
OPTIONS = ("--depth", "test")
"""With the repository's seed, as in `make test`."""
SECONDS = 600
"""The longest that one run of pytest may take. A fault may make ranks wait for each other."""
OF_THE_PROGRAM = re.compile("/checkout/(megazero|fused_ops)/")
FRAME = re.compile(r'^ *File "(.+?)", line \d+', re.MULTILINE)


class Verdict(NamedTuple):
    """What the tests say.

    passed   all of them ran and none failed
    caught   a test failed, and by an assertion of its own
    seconds  processor time
    output   of pytest
    """

    passed: bool
    caught: bool
    seconds: float
    output: str


class Copy:
    """A copy of the checkout's tracked files as they are, and of its compiled kernels if there are any."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.report = folder / "checkout", folder / "report.xml"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)
        if (ROOT / KERNELS).is_dir():
            shutil.copytree(ROOT / KERNELS, self.folder / KERNELS)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """A context in which the fault is in the copy."""
        path = self.folder / fault.path
        sound = path.read_text()
        self._write(path, faulty(sound, fault))
        try:
            yield
        finally:
            self._write(path, sound)

    def _write(self, path: Path, text: str) -> None:
        """Write the file, and remove what Python has compiled of it.

        It would take that for current if the text is as long as the one before and was written in the same second.
        """
        path.write_text(text)
        Path(cache_from_source(str(path))).unlink(missing_ok=True)

    def test(self, tests: Sequence[str]) -> Verdict:
        """Run these tests in the copy until one fails."""
        self.report.unlink(missing_ok=True)
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--tb=native",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
        ]
        words += [f"--junit-xml={self.report}", *OPTIONS, *tests]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHONPATH"))
        }
        before = _child_seconds()
        status, output = _run(words, self.folder, environment)
        seconds = _child_seconds() - before
        failures, errors = _reported(self.report)
        caught = status == 1 and not errors and any(map(is_of_a_test, failures))
        return Verdict(status == 0, caught, seconds, output)


def faulty(sound: str, fault: Fault) -> str:
    """The file's text with the fault."""
    count = sound.count(fault.line)
    assert count == 1, f"{fault.path} has {count} times, not once: {fault.line}"
    return sound.replace(fault.line, fault.planted)


def is_of_a_test(failure: str) -> bool:
    """Whether a test's assertion has failed, in its own process or on a rank, and not one of the program's.

    failure: the traceback. That of a rank comes last.
    """
    frames = FRAME.findall(failure)
    raised_by_the_program = bool(frames) and OF_THE_PROGRAM.search(frames[-1]) is not None
    return "AssertionError" in failure[failure.rfind("Traceback") :] and not raised_by_the_program


def _run(words: Sequence[str], folder: Path, environment: dict[str, str]) -> tuple[int | None, str]:
    """(exit status, output) of a program; no status if it had to be ended with all that it has started."""
    with subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as program:
        try:
            output, _ = program.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            output, _ = program.communicate()
            return None, output
        return program.returncode, output


def _reported(report: Path) -> tuple[list[str], list[str]]:
    """The texts of failures and of errors (of collection, of fixtures) in pytest's report."""
    if not report.exists():
        return [], ["pytest has written no report"]
    tree = ElementTree.parse(report)
    failures, errors = ([element.text or "" for element in tree.iter(kind)] for kind in ("failure", "error"))
    return failures, errors


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
