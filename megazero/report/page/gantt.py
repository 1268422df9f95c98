"""What lanes do over time: the section, its numbers, and the lanes of a simulated step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megazero.program.instruction import Lane
from megazero.program.simulate import SimulationReport
from megazero.program.times import Span
from megazero.program.trace import LANES, lanes_of
from megazero.report.page.charts import coded
from megazero.report.page.document import PageSection, note_html
from megazero.report.page.parts import Gantt, GanttLane, GanttSpan
from megazero.report.picture_parts import KINDS, kind_of
from megazero.report.trace_files import rows_without_overlap

_BETWEEN = "messages between stages"
_COLOURS = {**{kind: colour for kind, (colour, _) in KINDS.items()}, _BETWEEN: "#9988dd"}


def gantt_section(name: str, gantt: Gantt) -> PageSection:
    """Lanes from top to bottom. name: of the data, different for each section."""
    labels = {label: number for number, label in enumerate({s.label: None for lane in gantt.lanes for s in lane.spans})}
    shown = {span.kind for lane in gantt.lanes for span in lane.spans}
    kinds = {kind: number for number, kind in enumerate(kind for kind in gantt.kinds if kind in shown)}
    data = {
        "title": gantt.title,
        "unit": gantt.unit,
        "end": max((span.end for lane in gantt.lanes for span in lane.spans), default=1.0),
        "kinds": [[kind, gantt.kinds[kind]] for kind in kinds],
        "labels": list(labels),
        "lanes": [_lane(lane, labels, kinds) for lane in gantt.lanes if lane.spans],
    }
    return PageSection(
        gantt.title, f'{note_html(gantt.note)}<div class="gantt" data-from="{name}"></div>', {name: data}
    )


def gantt_of(title: str, report: SimulationReport, names: Sequence[str], unit: str = "s", note: str = "") -> Gantt:
    """The lanes of a simulated step. names: of the report's ranks, which are stages: "stage 0"."""
    lanes = [
        GanttLane(LANES[lane] + (f" {number}" if number > 1 else ""), [_span(span) for span in row], name)
        for rank, name in enumerate(names)
        for lane, spans in lanes_of(report, rank).items()
        for number, row in enumerate(rows_without_overlap(spans), 1)
    ]
    return Gantt(title, lanes, _COLOURS, unit, note)


def _span(span: Span) -> GanttSpan:
    i = span.instruction
    return GanttSpan(span.start, span.end, str(i), _BETWEEN if i.lane is Lane.STAGES else kind_of(i.op))


def _lane(lane: GanttLane, labels: Mapping[str, int], kinds: Mapping[str, int]) -> dict[str, Any]:
    spans = sorted(lane.spans, key=lambda span: span.start)
    return {
        "name": lane.name,
        "group": lane.group,
        "starts": coded([span.start for span in spans]),
        "ends": coded([span.end for span in spans]),
        "labels": [labels[span.label] for span in spans],
        "kinds": [kinds[span.kind] for span in spans],
    }
