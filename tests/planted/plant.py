"""A copy of the checkout in which one fault at a time is planted, and what the tests say of it."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib.util import cache_from_source
from pathlib import Path
from typing import NamedTuple

from tests.planted.fault import Fault

ROOT = Path(__file__).resolve().parents[2]
KERNELS = Path("fused_ops/_kernels")
OPTIONS = ("--depth", "test")
"""With the repository's seed, as in `make test`."""
SECONDS = 600
"""The longest that the tests of one fault may take. A fault may make ranks wait for each other."""
SOUND_SECONDS = 3600
"""The longest that all named tests together may take without a fault."""
OF_THE_PROGRAM = re.compile("/checkout/(megazero|fused_ops)/")
FRAME = re.compile(r'^ *File "(.+?)", line \d+', re.MULTILINE)
OF_A_TEST = re.compile(r"^(\w+\.)*(AssertionError|Failed|GradcheckError)\b", re.MULTILINE)
"""What a test's assertion raises: its own, that of `pytest.raises`, or that of torch's comparison with differences."""
REFUSED = re.compile(r"^(megazero\.program\.\w+\.)?(ProgramError|IllegalMove): ", re.MULTILINE)
"""What the checker of a step's list raises."""

NAMED = re.compile(r"^differs: the .+ at [a-z].+, step \d|number \d+ of its list| \([a-z][a-z ]*( \([^()]*\))?\)$")
"""What `megazero verify-layout` says of a value that differs, or of an instruction."""


class Judge(StrEnum):
    """What has caught a fault: the test itself, or the checker of a step's list, which the test has called; beside them
    the second judge, a proof by `megazero verify-layout`.
    """

    TEST = "test"
    CHECKER = "checker"
    PROOF = "proof"


class Verdict(NamedTuple):
    """What the tests say.

    passed   all of them ran and none failed
    judge    what has caught the fault: a test failed by an assertion of its own, or because the checker refused a list;
             None: neither
    seconds  processor time
    output   of pytest
    """

    passed: bool
    judge: Judge | None
    seconds: float
    output: str


class Proven(NamedTuple):
    """What proofs of layouts say.

    judge    `Judge.PROOF` if a layout differs; None: all of them are equal, or none could be run
    layouts  the names of those that were proven
    told     the line that says what differs, as `megazero verify-layout` prints it; "" where none does
    refused  why layouts could not be run
    seconds  processor time
    output   of the program
    """

    judge: Judge | None
    layouts: tuple[str, ...]
    told: str
    refused: tuple[str, ...]
    seconds: float
    output: str

    @property
    def is_named(self) -> bool:
        """Whether it names a value with the instruction that made it, or the instruction of a list that is refused, and
        not an error alone that has ended a rank.
        """
        return NAMED.search(self.told) is not None


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

    def sound(self, tests: Iterable[str]) -> Verdict:
        """Run these tests, each once, in the copy without a fault."""
        return self.test(list(dict.fromkeys(tests)), SOUND_SECONDS)

    def test(self, tests: Sequence[str], seconds: int = SECONDS) -> Verdict:
        """Run these tests in the copy until one fails. seconds: the longest that they may take together."""
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
        before = _child_seconds()
        status, output = _run(words, self.folder, _environment(), seconds)
        used = _child_seconds() - before
        failures, errors = _reported(self.report)
        judges = list(filter(None, map(judge_of, failures))) if status == 1 and not errors else []
        return Verdict(status == 0, judges[0] if judges else None, used, output)

    def prove(self, layouts: Sequence[str], seconds: int = SECONDS) -> Proven:
        """Prove layouts of the table in the copy, one after the other until one differs."""
        words = [sys.executable, "-m", "tests.planted.prove", *layouts]
        before = _child_seconds()
        _, output = _run(words, self.folder, _environment(), seconds)
        used = _child_seconds() - before
        said = [json.loads(line) for line in output.splitlines() if line.startswith('{"layout": ')]
        told = next((one["differs"] for one in said if one.get("differs")), "")
        refused = tuple(f"{one['layout']}: {one['refused']}" for one in said if "refused" in one)
        names = tuple(one["layout"] for one in said)
        return Proven(Judge.PROOF if told else None, names, told, refused, used, output)


def _environment() -> dict[str, str]:
    """The variables of a program in the copy: pytest's own do not reach it, and it imports the copy."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHONPATH"))}


def faulty(sound: str, fault: Fault) -> str:
    """The file's text with the fault."""
    count = sound.count(fault.line)
    assert count == 1, f"{fault.path} has {count} times, not once: {fault.line}"
    return sound.replace(fault.line, fault.planted)


def judge_of(failure: str) -> Judge | None:
    """Whose failure it is: that of a test's assertion, in its own process or on a rank, or of the checker; None: of
    anything else, such as an assertion of the program.

    failure: the traceback. That of a rank comes last.
    """
    if REFUSED.search(failure):
        return Judge.CHECKER
    frames = FRAME.findall(failure)
    raised_by_the_program = bool(frames) and OF_THE_PROGRAM.search(frames[-1]) is not None
    asserted = OF_A_TEST.search(failure[failure.rfind("Traceback") :]) is not None
    return Judge.TEST if asserted and not raised_by_the_program else None


def _run(words: Sequence[str], folder: Path, environment: dict[str, str], seconds: int) -> tuple[int | None, str]:
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
            output, _ = program.communicate(timeout=seconds)
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
