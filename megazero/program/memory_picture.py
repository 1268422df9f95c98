"""The memory of a step as a picture: areas by column, stacked over the instructions, with the peak marked."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from megazero.program.memory import MemoryColumn, Sample
from megazero.telemetry.units import size

COLOURS = {
    MemoryColumn.PARAMETERS: "#4878a8",
    MemoryColumn.OPTIMIZER: "#7a7f8c",
    MemoryColumn.GRADIENTS: "#5d9a6b",
    MemoryColumn.GATHERED: "#8ab4d8",
    MemoryColumn.BUFFERS: "#9ccaa6",
    MemoryColumn.TRAVELLING: "#c9b458",
    MemoryColumn.SPARE: "#d9d4c5",
    MemoryColumn.ACTIVATIONS: "#c87f3e",
    MemoryColumn.HIDDEN: "#b85c66",
    MemoryColumn.WORKING: "#9a6fb0",
}
"""In the order in which they are stacked, from the bottom."""
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT = 1180, 560, 90, 64, 330
_INK = "#40464f"
_MOST_STEPS = 1000
"""Of a longer list, each step of the picture is the instruction with most bytes of several."""


def svg(rank: str, samples: Sequence[Sample], peak: Sample) -> str:
    """The picture as SVG, for a file of its own."""
    shown = _thinned(samples)
    top, width, height = peak.total or 1, _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - 50
    step = width / len(shown)
    columns = [column for column in COLOURS if any(column in sample.columns for sample in samples)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" '
        f'font-family="ui-sans-serif, system-ui, \'Segoe UI\', Helvetica, Arial, sans-serif" font-size="12" '
        f'fill="{_INK}">',
        f"<title>Memory of a step on {escape(rank)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        _text(_LEFT, 24, f"Memory of a step on {rank}", 'font-size="16" font-weight="600"'),
        _text(_LEFT, 44, f"{len(samples)} instructions, from left to right; most: {size(peak.total)}"),
    ]
    base = [0.0] * len(shown)
    for column in columns:
        over = [low + sample.columns.get(column, 0) for low, sample in zip(base, shown, strict=True)]
        parts.append(_area(base, over, step, height / top, _TOP + height, COLOURS[column], column.value))
        base = over
    for part in range(5):
        y = _TOP + height - height * part / 4
        parts.append(f'<path d="M{_LEFT} {y:.1f}h{width}" stroke="{_INK}" stroke-opacity="0.25"/>')
        parts.append(_text(_LEFT - 8, y + 4, size(top * part // 4), 'text-anchor="end"'))
    at = _LEFT + step * (0.5 + _place(shown, peak))
    parts.append(f'<path d="M{at:.1f} {_TOP - 6}v{height + 6}" stroke="#c22" stroke-dasharray="4 3"/>')
    parts += _legend(columns, peak)
    return "\n".join([*parts, "</svg>"]) + "\n"


def html(rank: str, samples: Sequence[Sample], peak: Sample) -> str:
    """The picture in a page, with a table of what is alive at the peak, the largest first."""
    rows = "\n".join(
        f"<tr><td>{escape(words)}</td><td>{size(bytes_)}</td><td>{bytes_ / (peak.total or 1):.1%}</td></tr>"
        for words, bytes_ in _alive(peak)
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Memory of a step on {escape(rank)}</title>
<style>body {{ font-family: system-ui, sans-serif; color: {_INK}; margin: 2em }} td {{ padding: 0.1em 1.5em 0.1em 0 }}
td + td {{ text-align: right; font-variant-numeric: tabular-nums }} svg {{ max-width: 100%; height: auto }}</style>
{svg(rank, samples, peak)}
<h2>Alive at the peak: number {peak.number}, {escape(str(peak.instruction))}</h2>
<table>
{rows}
</table>
</html>
"""


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    """At most `_MOST_STEPS` samples, each with the most bytes of its neighbours."""
    together = -(-len(samples) // _MOST_STEPS)
    groups = (samples[start : start + together] for start in range(0, len(samples), together))
    return [max(group, key=lambda sample: sample.total) for group in groups]


def _place(shown: Sequence[Sample], peak: Sample) -> int:
    return next(at for at, sample in enumerate(shown) if sample.number == peak.number)


def _text(x: float, y: float, words: str, look: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(words)}</text>'


def _area(
    base: Sequence[float], over: Sequence[float], step: float, scale: float, floor: float, colour: str, name: str
) -> str:
    """The area between two lines of stairs, one stair for each sample."""
    forth = [f"{_LEFT + at * step:.2f},{floor - top * scale:.2f}" for n, top in enumerate(over) for at in (n, n + 1)]
    back = [f"{_LEFT + at * step:.2f},{floor - low * scale:.2f}" for n, low in enumerate(base) for at in (n, n + 1)]
    points = " ".join([*forth, *reversed(back)])
    return f'<polygon points="{points}" fill="{colour}"><title>{escape(name)}</title></polygon>'


def _legend(columns: Sequence[MemoryColumn], peak: Sample) -> list[str]:
    """The columns with their bytes at the peak, in the order of the areas, and the largest of what is alive then."""
    x, y = _WIDTH - _RIGHT + 24, float(_TOP)
    parts = [_text(x, y, f"Peak: {size(peak.total)}, at number {peak.number}", 'font-weight="600" fill="#c22"')]
    parts.append(_text(x, y + 18, str(peak.instruction), 'font-size="11"'))
    y += 40
    for column in reversed(columns):
        parts.append(f'<rect x="{x}" y="{y - 10:.1f}" width="14" height="12" fill="{COLOURS[column]}"/>')
        parts.append(_text(x + 22, y, column.value))
        parts.append(_text(_WIDTH - 12, y, size(peak.columns.get(column, 0)), 'text-anchor="end"'))
        y += 20
    y += 14
    parts.append(_text(x, y, "Largest at the peak", 'font-weight="600"'))
    for words, bytes_ in _alive(peak)[:8]:
        y += 17
        parts.append(_text(x, y, words, 'font-size="11"'))
        parts.append(_text(_WIDTH - 12, y, size(bytes_), 'font-size="11" text-anchor="end"'))
    return parts


def _alive(peak: Sample) -> list[tuple[str, int]]:
    """(words, bytes) of what is alive at the peak, the largest first. Activations of a micro-batch are one entry."""
    found: dict[str, int] = {}
    for place, bytes_ in peak.places.items():
        words = place.column.value
        if place.bucket >= 0:
            words += f", bucket {place.bucket}"
        elif place.micro_batch >= 0:
            words += f", micro-batch {place.micro_batch}" + (f", chunk {place.chunk}" if place.chunk > 0 else "")
        found[words] = found.get(words, 0) + bytes_
    return sorted(found.items(), key=lambda item: (-item[1], item[0]))
