"""The memory of stages as bars of named parts, beside the memory of a device, and the same numbers as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from megazero.report.memory_picture import COLOURS
from megazero.report.page.document import PageSection, note_html
from megazero.report.page.parts import MemoryBar, Table, TableColumn
from megazero.report.page.tables import table_html
from megazero.telemetry.units import size

_FURTHER = "#5f8fa8", "#b59a4a", "#8b6fb0", "#6f9a7a", "#b07a6a", "#7d8794", "#a86f94", "#94a05a"
"""Colours of parts that are none of a step's columns, in turn."""
_ROOM = 1.02
"""The bars' width for the largest number, so that a limit is not at the edge."""


def memory_section(title: str, stages: Sequence[MemoryBar], note: str = "") -> PageSection:
    """A bar for each stage; all have one scale."""
    names = list(dict.fromkeys(name for stage in stages for name in stage.parts))
    colours = colours_of(names)
    most = _ROOM * max((max(sum(stage.parts.values()), stage.limit or 0) for stage in stages), default=1) or 1
    key = "".join(
        f'<li><span class="box" style="background:{colours[name]}"></span><span>{escape(name)}</span></li>'
        for name in names
    )
    limits = {stage.limit for stage in stages if stage.limit is not None}
    told = f'<li><span class="name">dashed: {size(max(limits))} of a device</span></li>' if len(limits) == 1 else ""
    bars = "\n".join(_bar(stage, colours, most) for stage in stages)
    html = f'{note_html(note)}<ul class="key">{key}{told}</ul><div class="bars">\n{bars}\n</div>'
    return PageSection(title, html + table_html(_table(names, stages)))


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """The colours that the columns of a step have in every picture; further names get others."""
    known = {column.value: colour for column, colour in COLOURS.items()}
    others = [name for name in names if name not in known]
    return known | {name: _FURTHER[number % len(_FURTHER)] for number, name in enumerate(others)}


def _bar(stage: MemoryBar, colours: Mapping[str, str], most: float) -> str:
    total = sum(stage.parts.values())
    spans = "".join(
        f'<span style="width:{nbytes / most:.3%};background:{colours[name]}" '
        f'title="{escape(f"{stage.label}, {name}: {size(nbytes)}, {nbytes / (total or 1):.1%}")}"></span>'
        for name, nbytes in stage.parts.items()
        if nbytes
    )
    limit = f'<i class="limit" style="left:{stage.limit / most:.3%}"></i>' if stage.limit is not None else ""
    over = " over" if stage.limit is not None and total > stage.limit else ""
    said = f"{stage.label}: {size(total)}" + (f" of {size(stage.limit)}" if stage.limit is not None else "")
    return (
        f'<div class="stage"><div class="label">{escape(stage.label)}</div>'
        f'<div class="bar" role="img" aria-label="{escape(said)}">{spans}{limit}</div>'
        f'<div class="total{over}">{size(total)}</div></div>'
    )


def _table(names: Sequence[str], stages: Sequence[MemoryBar]) -> Table:
    """The numbers of the bars. A column of notes where a stage has one."""
    noted = any(stage.note for stage in stages)
    columns = [TableColumn("stage"), TableColumn("in all", "bytes"), *(TableColumn(name, "bytes") for name in names)]
    rows = [
        [stage.label, sum(stage.parts.values()), *(stage.parts.get(name) for name in names), *([stage.note] * noted)]
        for stage in stages
    ]
    fullest = max(range(len(stages)), key=lambda at: sum(stages[at].parts.values()), default=0)
    return Table("", [*columns, *([TableColumn("at the peak")] * noted)], rows, marked=frozenset({fullest}))
