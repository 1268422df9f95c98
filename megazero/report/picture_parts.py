"""Parts of pictures of a step, as SVG: colours of what runs, areas, a scale, strips, rows of shades."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import ceil
from types import MappingProxyType
from xml.sax.saxutils import escape

from megazero.program.instruction import UPDATE, UPDATE_HOST, Kind, Op, Piece, moves_of
from megazero.telemetry.units import size

WIDTH, LEFT = 1200, 96
INK = "#40464f"
_OTHER = "other"
KINDS: Mapping[str, tuple[str, frozenset[Kind]]] = MappingProxyType(
    {
        "forward": ("#4477aa", frozenset({Op.FORWARD})),
        "backward": ("#ee6677", frozenset({Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})),
        "update": ("#aa3377", frozenset({UPDATE, UPDATE_HOST})),
        "parameters": (
            "#66ccee",
            moves_of(Piece.PARAMETERS, Piece.UPDATED) | {Op.GATHER},
        ),
        "gradients": (
            "#ccbb44",
            moves_of(Piece.GRADIENTS, Piece.REDUCED, Piece.SUMS)
            | {Op.REDUCE, Op.REDUCE_ACROSS, Op.REDUCE_PARTIAL, Op.ADD_GRADIENT, Op.COUNT_GRADIENT},
        ),
        "optimizer state": ("#228833", moves_of(Piece.STATE)),
        "activations": ("#999999", moves_of(Piece.ACTIVATIONS)),
        _OTHER: ("#7d6b5a", frozenset()),
    }
)
"""What an instruction is about: colour and members, the last one without. The colours are told apart by people who see
few of them (Tol's bright scheme).
"""
_KIND_OF = {op: kind for kind, (_, ops) in KINDS.items() for op in ops}
_SHADES = 8
_SHADE = "#7d4a17"
_MOST_NAMES = 12


def kind_of(op: Kind) -> str:
    """The name of an instruction's kind, a key of `KINDS`."""
    return _KIND_OF.get(op, _OTHER)


def text(x: float, y: float, words: str, look: str = "") -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(words)}</text>'


def areas(
    stacked: Sequence[tuple[str, str, Sequence[int]]], most: int, frame: tuple[float, float], width: float
) -> Iterator[str]:
    """One area on the other, a stair for each step. stacked: (name, colour, values). frame: (top, height)."""
    top, height = frame
    base = [0.0] * len(stacked[0][2])
    step = width / len(base)
    for name, colour, values in stacked:
        over = [low + value for low, value in zip(base, values, strict=True)]
        forth, back = (
            [
                f"{LEFT + at * step:.2f},{top + height * (1 - y / most):.2f}"
                for n, y in enumerate(line)
                for at in (n, n + 1)
            ]
            for line in (over, base)
        )
        points = " ".join([*forth, *reversed(back)])
        yield f'<polygon points="{points}" fill="{colour}"><title>{escape(name)}</title></polygon>'
        base = over


def scale(most: int, frame: tuple[float, float], width: float) -> Iterator[str]:
    """Lines at quarters of `most`, with their bytes."""
    top, height = frame
    for part in range(5):
        y = top + height - height * part / 4
        yield f'<path d="M{LEFT} {y:.1f}h{width}" stroke="{INK}" stroke-opacity="0.25"/>'
        yield text(LEFT - 8, y + 4, size(most * part // 4), 'text-anchor="end"')


def mark(at: int, steps: int, reach: tuple[float, float], width: float) -> Iterator[str]:
    """A dashed line at a step."""
    x = LEFT + width / steps * (at + 0.5)
    yield f'<path d="M{x:.1f} {reach[0]}V{reach[1]:.1f}" stroke="#c22" stroke-dasharray="4 3"/>'


def strip(name: str, colours: Sequence[str], y: float, width: float) -> Iterator[str]:
    """A row with a colour for each step."""
    yield text(LEFT - 8, y + 10, name, 'text-anchor="end"')
    yield from _row(colours, y, width, 12)


def key(entries: Sequence[tuple[str, str]], y: float) -> Iterator[str]:
    """(name, colour) in one line."""
    x = float(LEFT)
    for name, colour in entries:
        yield f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" fill="{colour}"/>'
        yield text(x + 15, y, name, 'font-size="11"')
        x += 30 + 6.2 * len(name)


def heat(rows: Sequence[tuple[str, Sequence[int]]], y: float, width: float, height: float) -> tuple[list[str], float]:
    """Rows of values as shades, the largest of all darkest: the parts and the height that they take."""
    most = max(max(values) for _, values in rows) or 1
    every = -(-len(rows) // max(1, min(_MOST_NAMES, int(len(rows) * height / 12))))
    parts = [f'<rect x="{LEFT}" y="{y:.1f}" width="{width}" height="{height * len(rows):.1f}" fill="#f4f1ec"/>']
    for number, (name, values) in enumerate(rows):
        at = y + number * height
        if number % every == 0:
            parts.append(text(LEFT - 8, at + min(height, 10), name, 'font-size="10" text-anchor="end"'))
        # By the root, so that small ones can be told from nothing.
        shades = [f"{_SHADE}{round(255 * ceil(_SHADES * (value / most) ** 0.5) / _SHADES):02x}" for value in values]
        parts += _row(shades, at, width, height)
    return parts, height * len(rows)


def _row(colours: Sequence[str], y: float, width: float, height: float) -> Iterator[str]:
    """Boxes, one for each run of equal colours. Those that cannot be seen are left out."""
    step, at = width / len(colours), 0
    for colour, run in groupby(colours):
        count = len(list(run))
        if not (len(colour) == 9 and colour.endswith("00")):
            box = f'x="{LEFT + at * step:.2f}" y="{y:.1f}" width="{count * step:.2f}" height="{height:.1f}"'
            yield f'<rect {box} fill="{colour}"/>'
        at += count
