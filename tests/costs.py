"""The cost of each test in seconds of processor time: `pytest --cpu 30` lists the most expensive tests, files and
folders.

Wall time says little if other programs run, or if two processes of pytest share the cores. The processor time is that
of this process and of all its descendants: the pool's workers, programs that a test starts, compilers.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
PROPERTY = "cpu_seconds"
ATTEMPTS = 100
"""A kernel may have no file of children, so that reading fails each time."""


def tree_seconds(pid: int) -> float:
    """Processor seconds of a process, of children that it has waited for, and of all living descendants."""
    process = Path(f"/proc/{pid}")
    for _ in range(ATTEMPTS):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            threads = (process / "task").iterdir()
            children = [child for thread in threads for child in (thread / "children").read_text().split()]
        except OSError:
            if process.exists():
                continue  # a thread has ended, and its children are another thread's now
            break
        return sum(int(ticks) for ticks in fields[11:15]) / TICKS + sum(tree_seconds(int(child)) for child in children)
    return 0.0  # it has ended; its time counts for its parent, once that has waited for it


class Costs:
    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.before: float | None = None

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        if self.before is None:
            self.before = tree_seconds(os.getpid())
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Measure once for each test, at its end, because a measurement reads /proc for every descendant."""
        outcome = yield
        if call.when == "teardown" and self.before is not None:
            now = tree_seconds(os.getpid())
            outcome.get_result().user_properties.append((PROPERTY, now - self.before))  # type: ignore[attr-defined]
            self.before = now

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += sum(
            float(str(value)) for name, value in report.user_properties if name == PROPERTY
        )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files, rooms = defaultdict[str, float](float), defaultdict[str, float](float)
        for test, seconds in self.seconds.items():
            file = test.partition("::")[0]
            files[file] += seconds
            rooms[str(Path(file).parent)] += seconds
        write = terminalreporter.write_line
        for title, table in (("tests", self.seconds), ("files", files), ("rooms", rooms)):
            terminalreporter.section(f"processor seconds: {title}")
            for name, seconds in sorted(table.items(), key=lambda entry: -entry[1])[: self.rows]:
                write(f"{seconds:8.1f}  {name}")
        write(f"{sum(rooms.values()):8.1f}  together")
