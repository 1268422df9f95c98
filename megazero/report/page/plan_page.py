"""The page of a plan: memory of the stages, the step over time, tables of a search, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megazero.report.page.charts import charts_section
from megazero.report.page.document import PageSection, document
from megazero.report.page.gantt import gantt_section
from megazero.report.page.memory_bars import memory_section
from megazero.report.page.parts import Axis, Chart, Fact, Gantt, MemoryBar, Series, Table
from megazero.report.page.tables import table_html


@dataclass(frozen=True)
class Measured:
    """A prediction beside what a run has measured.

    series  runs as lines (`report.run_series.series_of` makes one of a metrics file)
    charts  each with what is predicted as `Chart.levels`
    axes    of the charts; the first is shown first
    beside  predicted and measured numbers as a table; None: charts alone
    note    a paragraph above the charts
    """

    series: Sequence[Series]
    charts: Sequence[Chart]
    axes: Sequence[Axis]
    beside: Table | None = None
    note: str = ""


def plan_page(
    title: str,
    summary: Sequence[Fact],
    tables: Sequence[Table],
    memories: Sequence[MemoryBar],
    gantt: Gantt | None,
    measured: Measured | None = None,
    about: str = "",
) -> str:
    """The page of a plan as HTML. What is empty or None has no section.

    title     of the page
    summary   numbers at its head
    tables    a section each, with the table's title in the list of contents: layouts of a search
    memories  a bar each
    gantt     of the step (`gantt.gantt_of` makes one of a simulation)
    about     a sentence below the title
    """
    sections = [PageSection(table.title, table_html(table, heading=False)) for table in tables]
    if memories:
        sections.append(memory_section("Memory", memories))
    if gantt is not None:
        sections.append(gantt_section("lanes", gantt))
    if measured is not None:
        of = measured.series, measured.charts, measured.axes, measured.note
        sections.append(charts_section("measured", "Predicted and measured", *of))
        if measured.beside is not None:
            sections.append(PageSection("", table_html(measured.beside)))
    return document(title, about, summary, sections)
