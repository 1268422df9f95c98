"""Progress reports of long work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from megazero.telemetry.units import duration

Report = Callable[[str], None]


def silent(text: str) -> None:
    """A Report that does nothing."""


def to_stderr(text: str) -> None:
    """A Report for tools: one line on stderr."""
    print(text, file=sys.stderr, flush=True)


def without_repeats(report: Report) -> Report:
    """A Report that passes each line on once, for work that is done in two rounds."""
    said: set[str] = set()

    def say(text: str) -> None:
        if text not in said:
            said.add(text)
            report(text)

    return say


class Progress:
    """Reports '<what>: <done> of <total> <unit> (<percent>), <rate> <unit>/s, <time> left' at most every `every`
    seconds. total: None where it is not known; then the report has what is done and the rate.
    """

    def __init__(self, report: Report, what: str, total: float | None, unit: str, *, every: float = 2.0) -> None:
        self.report, self.what, self.total, self.unit, self.every = report, what, total, unit, every
        self.done = 0.0
        self._start = self._last = time.monotonic()

    def reach(self, done: float, more: str = "") -> None:
        """Set the amount that is done, in units. more: text behind the report."""
        self.done = done
        now = time.monotonic()
        if now - self._last >= self.every:
            self._last = now
            self.report(self.line(more))

    def line(self, more: str = "") -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = self.done / seconds
        if self.total is None:
            return f"{self.what}: {self.done:,.1f} {self.unit}, {rate:,.1f} {self.unit}/s{more}"
        left = duration((self.total - self.done) / rate) if rate > 0 else "?"
        share = 100 * self.done / self.total if self.total else 100.0
        return (
            f"{self.what}: {self.done:,.1f} of {self.total:,.1f} {self.unit} ({share:.0f}%), {rate:,.1f} "
            f"{self.unit}/s, {left} left{more}"
        )
