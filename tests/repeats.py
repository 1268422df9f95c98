"""The same tests twice: which seed a run has, what it decides, and the command that repeats a failure.

The seed of the file `tests/seed` decides the cases of `make check` and `make test`, so two runs of one commit have the
same cases. `make explore` draws others. A seed decides samples of grids, generated layouts, examples of hypothesis, the
global random generators at the start of each test, and the order of sets in every process but the first.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from hypothesis import HealthCheck, core, settings
from hypothesis.internal.conjecture import providers

SEED_FILE = Path(__file__).with_name("seed")
HASH_SEED = "PYTHONHASHSEED"
REPEATED = ("MEGAZERO_FUSED",)
"""Environment variables that choose what the tests run."""


def seed_of_the_repository() -> int:
    return int(SEED_FILE.read_text())


def fix_the_order_of_sets(seed: int) -> None:
    """In all programs that this process starts, the other processes of pytest too. Python reads the variable when it
    starts, so this process keeps its order.
    """
    os.environ[HASH_SEED] = str(seed % 2**32)


def fix_examples(seed: int) -> None:
    """Settings of hypothesis under which the seed alone decides the examples, and a busy machine fails none of them.

    hypothesis keeps failing examples for the next run, and draws numbers and words from the source of the modules that
    this process has imported, which depends on the tests that ran before.
    """
    settings.register_profile(
        "megazero",
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=False,  # hypothesis sets it where there is a variable CI, and then the seed would decide nothing
    )
    settings.load_profile("megazero")
    # As its flag --hypothesis-seed does, but also where its plugin is configured before these tests.
    core.global_force_seed = seed  # type: ignore[assignment]
    providers._get_local_constants = lambda: providers._local_constants  # stays as empty as hypothesis begins


def command(test: str, config: pytest.Config) -> str:
    """The command that runs one test on the same cases as this run."""
    option = config.option
    variables = {HASH_SEED: str(option.seed % 2**32)} | {
        name: os.environ[name] for name in REPEATED if name in os.environ
    }
    words = ["python", "-m", "pytest", "--depth", option.depth, "--seed", str(option.seed)]
    words += ["--layouts", str(option.layouts)] if option.layouts else []
    return " ".join(
        [*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join([*words, test])]
    )


class Repeats:
    """Prints for each failure the command that repeats it, and adds the command to a file if one is given."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.failed: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.failed:
            return
        commands = [command(test, self.config) for test in self.failed]
        terminalreporter.section("each failure again")
        for line in commands:
            terminalreporter.write_line(line)
        if self.config.option.failures is not None:
            with self.config.option.failures.open("a") as file:
                file.writelines(f"{line}\n" for line in commands)
