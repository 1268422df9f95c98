"""Line charts of one or more runs, with rows of what happened above them: the section, and its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from megazero.report.page.document import PageSection, note_html
from megazero.report.page.parts import Axis, Chart, Mark, Points, Series

DIGITS = 7
"""Of a number in a page. Pixels need four; the value under the pointer is shown with five."""
_PIECES = 4
"""A column is written as straight pieces where these are fewer than one for so many numbers."""


def charts_section(
    name: str, title: str, series: Sequence[Series], charts: Sequence[Chart], axes: Sequence[Axis], note: str = ""
) -> PageSection:
    """Charts that share an axis, a zoom and a place of the pointer. name: of the data, different for each section."""
    runs = [_run(each, charts, axes) for each in series]
    data = {"axes": [vars(axis) for axis in axes], "runs": runs, "charts": [_chart(chart) for chart in charts]}
    return PageSection(title, f'{note_html(note)}<div class="charts" data-from="{name}"></div>', {name: data})


def coded(values: Sequence[float]) -> dict[str, Any]:
    """A column as JSON: its numbers with null for what is not finite, or [first, step, count] of straight pieces, which
    are far shorter for iterations, samples and constants.
    """
    pieces: list[list[float]] = []
    for value in values:
        if not isfinite(value):
            break
        last = pieces[-1] if pieces else None
        if last is not None and last[2] == 1 and float(value - last[0]).is_integer():
            last[1], last[2] = value - last[0], 2
        elif last is not None and value == last[0] + last[1] * last[2]:
            last[2] += 1
        else:
            pieces.append([value, 0, 1])
    else:
        if len(pieces) * _PIECES < len(values) or len(values) <= 2:
            return {"pieces": [[_short(first), _short(step), number] for first, step, number in pieces]}
    return {"values": [_short(value) if isfinite(value) else None for value in values]}


def _short(value: float) -> float | int:
    return int(value) if value == int(value) else float(f"{value:.{DIGITS}g}")


def _run(series: Series, charts: Sequence[Chart], axes: Sequence[Axis]) -> dict[str, Any]:
    wanted = {axis.key for axis in axes} | {key for chart in charts for key in chart.lines}
    points = {key for chart in charts for key in chart.points}
    return {
        "name": series.name,
        "columns": {key: coded(values) for key, values in series.columns.items() if key in wanted},
        "starts": list(series.starts),
        "points": {key: _points(value) for key, value in series.points.items() if key in points},
        "marks": [_mark(mark) for mark in series.marks],
    }


def _points(points: Points) -> dict[str, Any]:
    return {"axes": {key: coded(values) for key, values in points.axes.items()}, "values": coded(points.values)}


def _mark(mark: Mark) -> dict[str, Any]:
    at = {key: _short(value) for key, value in mark.at.items()}
    until = {key: _short(value) for key, value in mark.until.items()}
    return {"kind": mark.kind, "words": mark.words, "at": at} | ({"until": until} if until else {})


def _chart(chart: Chart) -> dict[str, Any]:
    return {**vars(chart), "lines": dict(chart.lines), "points": dict(chart.points), "levels": list(chart.levels)}
