"""Which tests a run of continuous integration may skip: those that need something that its machine lacks.

If the variable CI is set, a skip for any other reason is a failure. So a missing extra of `make test`, or a missing
program that the machine should have, cannot silently disable tests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator

import pytest

MAY_BE_MISSING = {
    r"no NVIDIA GPU|there is an NVIDIA GPU|there is a CUDA device|no CUDA": "a card, or a machine without one",
    r"a card before Ampere|needs compute capability": "a newer card",
    r"no history of commits": "a whole clone, as of a package of the sources",
    r"no reference data at": "other programs' data, which lie beside the checkout",
    r"no io_uring": "a kernel that lets programs use it",
    r"no browser is installed": "Chromium, which needs root; .ci/run installs it, and names it so that no test skips",
    r"there is no fio": "fio, which measures a disk without megazero",
    r"this processor has no": "instructions of another processor",
    r"could not import 'bitsandbytes": "bitsandbytes, 40 MB for two tests",
    r"Ray Train is not installed": "a scheduler of clusters, 80 MB for one test",
}
"""Allowed reasons: a regular expression that is searched for in the reason of a skip -> what the machine lacks."""


def allowed(reason: str) -> bool:
    return any(re.search(pattern, reason) for pattern in MAY_BE_MISSING)


def _judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip whose reason is not in the table into a failure."""
    if report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not allowed(reason):
        report.outcome = "failed"
        report.longrepr = (
            f"{reason}\nCI is set, and its installation should have this: tests/skips.py lists what may be missing."
        )


class SkipsAreFailures:
    """The plugin that is registered if CI is set."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        _judge(report)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        _judge(report)
        return report


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")
