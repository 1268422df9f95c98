"""A pipeline schedule as it runs: a row per stage, time from left to right."""

from __future__ import annotations

from collections.abc import Sequence

from docs.extension.svg import Picture, shade
from megazero.pipeline.schedule import CHUNKS, make_schedule
from megazero.program.instruction import Kind, Op
from megazero.program.simulate import SimulationReport, simulate
from megazero.program.times import uniform_times

COLOURS: dict[Kind, str] = {
    Op.FORWARD: "#4878a8",
    Op.BACKWARD: "#c87f3e",
    Op.BACKWARD_INPUT: "#c87f3e",
    Op.BACKWARD_WEIGHT: "#5d9a6b",
}
_ROW, _GAP, _MARGIN, _HEAD, _WIDTH = 22, 4, 96, 26, 780
_IN_README = ("1f1b", "zb-h1", "zb-v")


def simulated(name: str, pp: int, micro_batches: int) -> SimulationReport:
    """The schedule at unit times: a whole stage's forward takes 1, its backward 2, half of it for the weights."""
    chunks = CHUNKS[name] or (2 if name == "interleaved" else 1)
    times = uniform_times(pp * chunks, 1 / chunks, 2 / chunks)
    return simulate(make_schedule(name, pp, micro_batches, chunks), times)


def schedule(name: str = "1f1b", pp: int = 4, micro_batches: int = 8) -> str:
    """One schedule."""
    report = simulated(name, pp, micro_batches)
    picture = Picture(_WIDTH, _height(report) + 24, f"Pipeline schedule {name}, {pp} stages")
    _rows(picture, name, report, 0, report.makespan)
    _legend(picture, [report])
    return picture.svg()


def schedules(pp: int = 4, micro_batches: int = 8) -> str:
    """Three schedules of the same work below each other, on one scale of time."""
    reports = {name: simulated(name, pp, micro_batches) for name in _IN_README}
    height = sum(_height(report) for report in reports.values())
    picture = Picture(_WIDTH, height + 24, f"{', '.join(reports)}: {pp} stages, {micro_batches} micro-batches")
    longest, top = max(report.makespan for report in reports.values()), 0.0
    for name, report in reports.items():
        _rows(picture, name, report, top, longest)
        top += _height(report)
    _legend(picture, list(reports.values()))
    return picture.svg()


def _height(report: SimulationReport) -> float:
    return _HEAD + len(report.spans) * (_ROW + _GAP) + 10


def _rows(picture: Picture, name: str, report: SimulationReport, top: float, longest: float) -> None:
    scale = (picture.width - _MARGIN) / longest
    chunks = 1 + max(span.instruction.chunk for row in report.spans for span in row)
    held = max(report.peak_activations)
    of = "micro-batches" if chunks == 1 else f"micro-batches of 1/{chunks} of its layers"
    said = f"{report.bubble:.1%} of the time is idle; a stage holds the activations of at most {held} {of}"
    picture.text(0, top + 16, name, at="start", size=13, bold=True)
    picture.text(_MARGIN, top + 16, said, at="start")
    for stage, spans in enumerate(report.spans):
        y = top + _HEAD + stage * (_ROW + _GAP)
        picture.text(0, y + 15, f"stage {stage}", at="start", size=11)
        for span in spans:
            i = span.instruction
            fill = shade(COLOURS[i.op], 0.22 * (i.chunk % 2) - 0.12 * (i.micro_batch % 2))
            x, width = _MARGIN + span.start * scale, (span.end - span.start) * scale
            picture.box(x + 0.5, y, width - 1, _ROW, fill)
            picture.text(x + width / 2, y + 15, str(i.micro_batch), size=10.5, fill="#fff")


def _legend(picture: Picture, reports: Sequence[SimulationReport]) -> None:
    """The colours that occur."""
    shown = {span.instruction.op for report in reports for row in report.spans for span in row}
    split = Op.BACKWARD_WEIGHT in shown
    words: dict[Kind, str] = {
        Op.FORWARD: "forward",
        Op.BACKWARD: "backward" + ", or its part for the input" * split,
        Op.BACKWARD_WEIGHT: "backward, the part for the weights",
    }
    x, y = float(_MARGIN), picture.height - 8
    for op, said in words.items():
        if op in shown or (op is Op.BACKWARD and Op.BACKWARD_INPUT in shown):
            picture.box(x, y - 10, 14, 12, COLOURS[op])
            picture.text(x + 20, y, said, at="start", size=11)
            x += 50 + 6.2 * len(said)
