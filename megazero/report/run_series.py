"""A run on disk as what a page draws: columns, evaluations, and what happened."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import isfinite, nan

from megazero.report.metrics_lines import Evaluation, MetricsLines
from megazero.report.page.parts import Axis, Mark, Points, Series
from megazero.report.run_events import Event
from megazero.report.run_folder import RunOnDisk

HOURS = "hours"
AXES = (
    Axis("iteration", "iteration"),
    Axis("consumed_samples", "samples"),
    Axis("consumed_tokens", "tokens"),
    Axis(HOURS, "hours of steps", again=True),
)
_KEPT = "loss", "grad_norm"
"""Columns of which a thinned run keeps the extremes."""


def series_of(run: RunOnDisk, processes: Sequence[range], events: Sequence[Event], most: int) -> tuple[Series, int]:
    """(the run as lines of at most about `most` steps, how many steps one stands for).

    processes: of `run_events.attempts`. Of a longer run the steps with the least and the greatest loss and norm of each
    stretch are kept, and all first steps of processes.
    """
    metrics = run.metrics
    columns: dict[str, Sequence[float]] = dict(metrics.columns)
    if "step_seconds" in columns:
        columns[HOURS] = _hours(columns["step_seconds"])
    starts = [process.start for process in processes]
    rows, together = kept_rows(metrics, starts, most)
    places = {row: number for number, row in enumerate(rows)}
    thinned = {key: [column[row] for row in rows] for key, column in columns.items()}
    points = _points(metrics, columns, starts)
    marks = [_mark(event, columns) for event in events]
    return Series(run.name, thinned, [places[start] for start in starts] or [0], points, marks), together


def kept_rows(metrics: MetricsLines, starts: Sequence[int], most: int) -> tuple[Sequence[int], int]:
    """(the rows of a thinned run, how many steps each stretch has); all rows where there are not more than `most`."""
    if metrics.steps <= most:
        return range(metrics.steps), 1
    together = -(-metrics.steps * 2 * len(_KEPT) // most)
    kept = {*starts, 0, metrics.steps - 1}
    for start in range(0, metrics.steps, together):
        stretch = range(start, min(start + together, metrics.steps))
        for key in _KEPT:
            finite = [row for row in stretch if isfinite(metrics.columns[key][row])] if key in metrics.columns else []
            kept |= (
                {min(finite, key=metrics.columns[key].__getitem__), max(finite, key=metrics.columns[key].__getitem__)}
                if finite
                else {start}
            )
    return sorted(kept), together


def _hours(seconds: Sequence[float]) -> list[float]:
    return [total / 3600 for total in accumulate(value if isfinite(value) else 0.0 for value in seconds)]


def _points(metrics: MetricsLines, columns: dict[str, Sequence[float]], starts: Sequence[int]) -> dict[str, Points]:
    """The evaluations that no later process has made again, by name."""
    later = [(start, columns["iteration"][start]) for start in starts]
    kept = [
        each
        for each in metrics.evaluations
        if not any(row > each.row and again <= each.iteration for row, again in later)
    ]
    points = {}
    for key in dict.fromkeys(key for each in kept for key in each.losses):
        made = [each for each in kept if key in each.losses]
        last = {each.iteration: each for each in made}  # two at one iteration: the loader's last word
        ordered = [last[iteration] for iteration in sorted(last)]
        axes = {"iteration": [float(each.iteration) for each in ordered]}
        if metrics.steps:
            axes |= {
                axis.key: [_place(each, columns, axis.key) for each in ordered]
                for axis in AXES[1:]
                if axis.key in columns
            }
        points[key] = Points(axes, [each.losses[key] for each in ordered])
    return points


def _place(evaluation: Evaluation, columns: dict[str, Sequence[float]], axis: str) -> float:
    """Where an evaluation is on an axis: at the step before it, or where the first step of the file begins."""
    if evaluation.row >= 0:
        return columns[axis][evaluation.row]
    if axis == HOURS:
        return 0.0
    samples = columns.get("consumed_samples", [nan])[0]
    before = samples - columns.get("global_batch_size", [nan])[0]
    return columns[axis][0] * before / samples if samples and isfinite(before) else 0.0


def _mark(event: Event, columns: dict[str, Sequence[float]]) -> Mark:
    row, last = event.rows.start, event.rows.stop - 1
    at = {"iteration": float(event.first)}
    until = {"iteration": float(event.last)} if event.last > event.first else {}
    for axis in AXES[1:]:
        column = columns.get(axis.key)
        if column is not None and row >= 0 and isfinite(column[row]):
            at[axis.key] = column[row]
            if last > row:
                until[axis.key] = column[last]
    return Mark(event.kind.value, event.words, at, until)
