"""The memory of a step as a picture: what is alive, stacked over the instructions, with the peak marked; below it what
runs, and which units and micro-batches hold the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from megazero.program.memory import MemoryColumn, Place, Sample
from megazero.program.trace import MemoryTrace
from megazero.report.picture_parts import INK, KINDS, LEFT, WIDTH, areas, heat, key, kind_of, mark, scale, strip, text
from megazero.report.tier_picture import tiers_svg
from megazero.telemetry.units import size

COLOURS = {
    MemoryColumn.PARAMETERS: "#4878a8",
    MemoryColumn.OPTIMIZER: "#7a7f8c",
    MemoryColumn.OFFLOADED: "#a9adb7",
    MemoryColumn.GRADIENTS: "#5d9a6b",
    MemoryColumn.LOGITS: "#a58b6f",
    MemoryColumn.GATHERED: "#8ab4d8",
    MemoryColumn.BUFFERS: "#9ccaa6",
    MemoryColumn.TRAVELLING: "#c9b458",
    MemoryColumn.SPARE: "#d9d4c5",
    MemoryColumn.ACTIVATIONS: "#c87f3e",
    MemoryColumn.HIDDEN: "#b85c66",
    MemoryColumn.WORKING: "#9a6fb0",
}
"""In the order in which they are stacked, from the bottom: what is there all the time comes first."""
_TOP, _HEIGHT, _RIGHT = 64, 400, 340
_MOST_STEPS = 800
"""Of a longer list, each step of the picture is the instruction with most bytes of several."""
_HEATS = 300
"""Most points of the rows' pixels together, so that 100 units need no more room than 10."""


def svg(of: MemoryTrace, kind: str) -> str:
    """The picture as SVG, for a file of its own. kind: stands in its first line."""
    shown = _thinned(of.samples)
    width = WIDTH - LEFT - _RIGHT
    at = next(number for number, sample in enumerate(shown) if sample.number == of.peak.number)
    columns = [column for column in COLOURS if any(column in sample.columns for sample in of.samples)]
    parts = [text(LEFT, 24, f"Memory of a step on {of.rank}", 'font-size="16" font-weight="600"')]
    together = -(-len(of.samples) // len(shown))
    each = f", {together} to a point" if together > 1 else ""
    away = max(sample.columns.get(MemoryColumn.HOST, 0) for sample in of.samples)
    beside = f"; beside it at most {size(away)} of host memory" if away else ""
    parts.append(text(LEFT, 44, f"{len(of.samples)} instructions{each}, from left to right{beside}"))
    stacked = [(c.value, COLOURS[c], [sample.columns.get(c, 0) for sample in shown]) for c in columns]
    parts += areas(stacked, of.peak.total or 1, (_TOP, _HEIGHT), width)
    parts += scale(of.peak.total or 1, (_TOP, _HEIGHT), width)
    y = _TOP + _HEIGHT + 12.0
    parts += strip("what runs", [KINDS[kind_of(sample.instruction.op)][0] for sample in shown], y, width)
    parts += key([(name, colour) for name, (colour, _) in KINDS.items()], y + 30)
    y += 60
    for name, rows in (("by unit", _by_unit(of, shown)), ("by micro-batch", _by_micro_batch(of, shown))):
        if len(rows) > 1:
            parts.append(text(LEFT, y, f"{name}: the darker, the more bytes; the darkest row holds {_most(rows)}"))
            drawn, used = heat(rows, y + 8, width, max(3.0, min(14.0, _HEATS / len(rows))))
            parts += drawn
            y += used + 34
    parts += mark(at, len(shown), (_TOP - 6, y - 34), width)
    parts += _legend(columns, of)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" width="{WIDTH}" role="img" '
        f'font-family="ui-sans-serif, system-ui, \'Segoe UI\', Helvetica, Arial, sans-serif" font-size="12" '
        f'fill="{INK}"><!-- {kind} -->\n<title>Memory of a step on {escape(of.rank)}</title>\n'
        f'<rect width="{WIDTH}" height="{y:.0f}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def html(found: Sequence[MemoryTrace], kind: str) -> str:
    """A page of all ranks, the fullest first: the peaks, then the pictures and what is alive at the peak of each."""
    peaks = "\n".join(
        f'<tr><td><a href="#{number}">{escape(each.rank)}</a></td><td>{size(each.peak.total)}</td>'
        f"<td>{escape(str(each.peak.instruction))}</td></tr>"
        for number, each in enumerate(found)
    )
    sections = "\n".join(_section(number, each, kind) for number, each in enumerate(found))
    return f"""<!doctype html><!-- {kind} -->
<html lang="en"><meta charset="utf-8"><title>Memory of a step</title>
<style>body {{ font-family: system-ui, sans-serif; color: {INK}; margin: 2em }} td {{ padding: 0.1em 1.5em 0.1em 0 }}
td + td {{ text-align: right; font-variant-numeric: tabular-nums }} svg {{ max-width: 100%; height: auto }}
.beside {{ display: flex; gap: 4em; align-items: start }}</style>
<h1>Memory of a step, predicted</h1>
<table>
<tr><td>rank</td><td>peak</td><td>while it runs</td></tr>
{peaks}
</table>
{sections}
</html>
"""


def _section(number: int, of: MemoryTrace, kind: str) -> str:
    alive = _alive(of)
    rows = [_row(words, bytes_, of.peak.total) for words, bytes_ in alive[:40]]
    if len(alive) > 40:
        rest = sum(bytes_ for _, bytes_ in alive[40:])
        rows.append(_row(f"{len(alive) - 40} more", rest, of.peak.total))
    units = [
        _row(of.units[unit], bytes_, of.peak.total)
        for unit, bytes_ in sorted(of.peak.units.items(), key=lambda item: -item[1])[:40]
    ]
    words = f"Tiers and lanes over time on {of.rank}: {of.timed.end:.3g} s" if of.timed else ""
    return f"""<section id="{number}">
{svg(of, kind)}
{tiers_svg(of.timed, words) if of.timed else ""}
<h2>Alive at the peak of {escape(of.rank)}: number {of.peak.number}, {escape(str(of.peak.instruction))}</h2>
<div class="beside">
<table>
{chr(10).join(rows)}
</table>
<table>
{chr(10).join(units)}
</table>
</div>
</section>"""


def _row(words: str, bytes_: int, total: int) -> str:
    return f"<tr><td>{escape(words)}</td><td>{size(bytes_)}</td><td>{bytes_ / (total or 1):.1%}</td></tr>"


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    """At most `_MOST_STEPS` samples, each with the most bytes of its neighbours."""
    together = -(-len(samples) // _MOST_STEPS)
    groups = (samples[start : start + together] for start in range(0, len(samples), together))
    return [max(group, key=lambda sample: sample.total) for group in groups]


def _by_unit(of: MemoryTrace, shown: Sequence[Sample]) -> list[tuple[str, list[int]]]:
    return [(name, [sample.units.get(unit, 0) for sample in shown]) for unit, name in of.units.items()]


def _by_micro_batch(of: MemoryTrace, shown: Sequence[Sample]) -> list[tuple[str, list[int]]]:
    numbers = sorted({number for sample in of.samples for number in sample.micro_batches})
    return [(str(number), [sample.micro_batches.get(number, 0) for sample in shown]) for number in numbers]


def _most(rows: Sequence[tuple[str, Sequence[int]]]) -> str:
    return size(max(max(values) for _, values in rows))


def _legend(columns: Sequence[MemoryColumn], of: MemoryTrace) -> list[str]:
    """The columns with their bytes at the peak, in the order of the areas, and the largest of what is alive then."""
    peak, x, y = of.peak, WIDTH - _RIGHT + 24, float(_TOP)
    parts = [text(x, y, f"Peak: {size(peak.total)}, at number {peak.number}", 'font-weight="600" fill="#c22"')]
    parts.append(text(x, y + 18, str(peak.instruction), 'font-size="11"'))
    y += 42
    for column in reversed(columns):
        parts.append(f'<rect x="{x}" y="{y - 10:.1f}" width="14" height="12" fill="{COLOURS[column]}"/>')
        parts.append(text(x + 22, y, column.value))
        parts.append(text(WIDTH - 12, y, size(peak.columns.get(column, 0)), 'text-anchor="end"'))
        y += 20
    y += 14
    parts.append(text(x, y, "Largest at the peak", 'font-weight="600"'))
    for words, bytes_ in _alive(of)[:8]:
        y += 17
        parts.append(text(x, y, words, 'font-size="11"'))
        parts.append(text(WIDTH - 12, y, size(bytes_), 'font-size="11" text-anchor="end"'))
    return parts


def _alive(of: MemoryTrace) -> list[tuple[str, int]]:
    """(words, bytes) of what the device holds at the peak, the largest first. Activations of a micro-batch are one."""
    found: dict[str, int] = {}
    chunks = {chunk for chunk, _ in of.units}
    for place, bytes_ in of.peak.places.items():
        if place.column is MemoryColumn.HOST:
            continue
        words = _words(place, several=len(chunks) > 1)
        found[words] = found.get(words, 0) + bytes_
    return sorted(found.items(), key=lambda item: (-item[1], item[0]))


def _words(place: Place, *, several: bool) -> str:
    if place.bucket >= 0:
        return f"{place.column.value}, bucket {place.bucket}"
    if place.micro_batch >= 0:
        return f"{place.column.value}, micro-batch {place.micro_batch}" + f", chunk {place.chunk}" * several
    return place.column.value
