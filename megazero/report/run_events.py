"""What happened in a run beside its steps: saves, resumes, skipped steps, numbers that were not finite, missing lines.

A metrics file has no lines about these, so they follow from what is on disk:

- A resume: an iteration that stands again; or the peak of memory falls, which only grows while a process lives. A
  process that repeats no step and takes at least as much memory as the one before it leaves no trace.
- A save: a checkpoint that is still in the folder of --save.
- A skip: the key `skipped` of a step. The loss of a skipped step, and the norm of its gradient, may be null.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from itertools import groupby
from math import isfinite

from megazero.report.metrics_lines import MetricsLines
from megazero.report.run_folder import RunOnDisk, Saved
from megazero.system.words import counted


class EventKind(Enum):
    """What an event is; the value is its name on a page."""

    SAVE = "save"
    RESUME = "resume"
    SKIP = "skip"
    NOT_FINITE = "not finite"
    GAP = "missing lines"


@dataclass(frozen=True)
class Event:
    """Something that happened. row: of the step at which it did, as an index of the columns; rows: of all its steps.

    first, last  its first and last iteration
    words        what there is to say of it
    """

    kind: EventKind
    first: int
    last: int
    rows: range
    words: str


def attempts(metrics: MetricsLines) -> list[range]:
    """The rows of every process that wrote the file, as far as it shows."""
    iterations, peaks = metrics.columns["iteration"], metrics.columns.get("peak_memory_bytes")
    starts = [0] if iterations else []
    for row in range(1, len(iterations)):
        falls = peaks is not None and peaks[row] < peaks[row - 1]
        if iterations[row] <= iterations[row - 1] or falls:
            starts.append(row)
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(iterations)], strict=False)]


def superseded(metrics: MetricsLines, processes: Sequence[range]) -> set[int]:
    """Rows of steps that a later process has run again. processes: of `attempts`."""
    iterations = metrics.columns["iteration"]
    gone, again = set[int](), float("inf")
    for rows in reversed(processes):
        gone.update(row for row in rows if iterations[row] >= again)
        again = min(again, iterations[rows.start])
    return gone


def events(run: RunOnDisk, processes: Sequence[range]) -> list[Event]:
    """The events of a run in the order of its lines. processes: of `attempts`."""
    of_steps = [
        *_resumes(run.metrics, processes),
        *_skips(run.metrics),
        *_not_finite(run.metrics),
        *_gaps(run.metrics),
    ]
    return sorted([*of_steps, *_saves(run)], key=lambda event: (event.rows.start, event.kind.value))


def _resumes(metrics: MetricsLines, processes: Sequence[range]) -> Iterator[Event]:
    iterations = metrics.columns["iteration"]
    for rows in processes[1:]:
        first, before = int(iterations[rows.start]), int(iterations[rows.start - 1])
        again = before - first + 1
        words = f"goes on behind iteration {first - 1:,}"
        if again > 0:
            words += f", runs {counted(again, 'step')} again" + (" so far" if iterations[rows[-1]] < before else "")
        yield Event(EventKind.RESUME, first, first, rows[:1], words)


def _runs_of(rows: Sequence[int], iterations: array[float]) -> Iterator[range]:
    """Ranges of neighbouring rows."""
    for _, group in groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
        members = [row for _, row in group]
        yield range(members[0], members[-1] + 1)


def _skips(metrics: MetricsLines) -> Iterator[Event]:
    iterations, scales = metrics.columns["iteration"], metrics.columns.get("loss_scale")
    for rows in _runs_of(metrics.skipped, iterations):
        words = f"{counted(len(rows), 'step')} changed nothing"
        if scales is not None and scales[rows.start] > 1:
            words += f", loss scale {scales[rows.start]:g}"
            words += f" to {scales[rows[-1]]:g}" if scales[rows[-1]] != scales[rows.start] else ""
        yield Event(EventKind.SKIP, int(iterations[rows.start]), int(iterations[rows[-1]]), rows, words)


def _not_finite(metrics: MetricsLines) -> Iterator[Event]:
    """Steps that were taken although a number was not finite. Of a skipped step that is no news."""
    iterations, skipped = metrics.columns["iteration"], {*metrics.skipped}
    for key, noun in (("loss", "the loss"), ("grad_norm", "the gradient's norm")):
        column = metrics.columns.get(key)
        if column is None:  # no line of the file has a finite one
            rows = range(metrics.steps)
            wrong = [row for row in rows if row not in skipped] if key == "loss" else []
        else:
            wrong = [row for row, value in enumerate(column) if not isfinite(value) and row not in skipped]
        for rows in _runs_of(wrong, iterations):
            first, last = int(iterations[rows.start]), int(iterations[rows[-1]])
            words = f"{noun} of {counted(len(rows), 'step')} that changed the weights"
            yield Event(EventKind.NOT_FINITE, first, last, rows, words)


def _gaps(metrics: MetricsLines) -> Iterator[Event]:
    iterations = metrics.columns["iteration"]
    for row in range(len(iterations)):
        before = int(iterations[row - 1]) if row else 0
        missing = int(iterations[row]) - before - 1
        if missing > 0:
            words = f"{counted(missing, 'iteration')} without a line" + (" at the begin of the file" if not row else "")
            yield Event(EventKind.GAP, before + 1, before + missing, range(row, row + 1), words)


def _saves(run: RunOnDisk) -> Iterator[Event]:
    """Checkpoints, each at the last line of its iteration."""
    last = {iteration: row for row, iteration in enumerate(run.metrics.columns["iteration"])}
    for saved in run.saved:
        row = last.get(float(saved.iteration), -1)
        yield Event(
            EventKind.SAVE, saved.iteration, saved.iteration, range(row, row + 1), f"{saved.path.name}, {clock(saved)}"
        )


def clock(saved: Saved) -> str:
    """When a checkpoint was written, in UTC."""
    return datetime.fromtimestamp(saved.time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
