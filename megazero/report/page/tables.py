"""Tables of a page. They are whole without the script, which adds sorting and searching."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from types import MappingProxyType

from megazero.report.page.document import note_html
from megazero.report.page.parts import Cell, Table, TableColumn
from megazero.telemetry.units import count, duration, size

NOTHING = "\N{EN DASH}"
WRITTEN: Mapping[str, Callable[[float], str]] = MappingProxyType(
    {
        "whole": lambda value: f"{value:,.0f}",
        "number": lambda value: number(value),
        "count": count,
        "bytes": size,
        "seconds": lambda value: seconds(value),
        "duration": duration,
        "share": lambda value: f"{value:.1%}",
    }
)
"""How the numbers of a column are written, by `TableColumn.shows`."""
SEARCHED = 12
"""A table of more rows can be searched."""


def table_html(table: Table, *, heading: bool = True) -> str:
    """A table, with its title if a heading is wanted. A number by which a cell is sorted is its `data-value`."""
    heads = "".join(_head(number, column) for number, column in enumerate(table.columns))
    rows = "\n".join(_row(number, table) for number in range(len(table.rows)))
    title = f"<h3>{escape(table.title)}</h3>" if table.title and heading else ""
    tools = ""
    if len(table.rows) > SEARCHED:
        tools += '<label>Search <input type="search" class="search"></label>'
    if table.quiet:
        tools += f'<label><input type="checkbox" class="all"> {escape(table.more)}</label>'
    bar = f'<p class="tools">{tools} <span class="shown" role="status"></span></p>' if tools else ""
    label = escape(table.title or table.columns[0].name)
    return (
        f'<div class="table">{title}{note_html(table.note)}{bar}'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
        f'<table class="sortable"><thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div></div>'
    )


def number(value: float) -> str:
    """Four digits, those of a column below each other: 2.450, 178.0; larger numbers are whole."""
    if value == 0 or abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:#,.4g}".removesuffix(".")


def seconds(value: float) -> str:
    """Four digits with their unit: 12.34 ms, 105.2 s; from 1000 s on a clock."""
    if abs(value) >= 1000:
        return duration(value)
    for unit, per in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= per:
            return f"{value / per:.4g} {unit}"
    return f"{value / 1e-6:.4g} µs" if value else "0 s"


def _head(number: int, column: TableColumn) -> str:
    side = "text" if column.shows == "text" else "number"
    note = f' title="{escape(column.note)}"' if column.note else ""
    sorts = f'<button type="button" data-column="{number}"{note}>{escape(column.name)}</button>'
    return f'<th scope="col" class="{side}">{sorts}</th>'


def _row(number: int, table: Table) -> str:
    kinds = [name for name, rows in (("marked", table.marked), ("quiet", table.quiet)) if number in rows]
    of = f' class="{" ".join(kinds)}"' if kinds else ""
    cells = "".join(map(_cell, table.rows[number], table.columns))
    return f"<tr{of}>{cells}</tr>"


def _cell(value: Cell, column: TableColumn) -> str:
    if value is None:
        return f'<td class="none">{NOTHING}</td>'
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    return f'<td class="number" data-value="{value!r}">{escape(WRITTEN[column.shows](value))}</td>'
