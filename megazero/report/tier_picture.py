"""A step in time as a picture: above, the memory of a rank by tier, stacked; below, a row for each of its lanes.

Colours are told apart by people who see few of them (Tol's bright scheme), and the tiers by how light they are. Words
and lines have the colour of the page that the picture is in, or a grey that light and dark ones carry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from xml.sax.saxutils import escape

from megazero.program.instruction import Lane
from megazero.program.times import Span
from megazero.program.trace import LANES, TimedStep
from megazero.report.picture_parts import KINDS, kind_of, text
from megazero.telemetry.units import size

INK = "var(--color-foreground-primary, #6b7480)"
TIERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"device": ("device", "#4f6785"), "host": ("host memory", "#8fa4bb"), "disk": ("disks", "#cbd5df")}
)
"""By field of `TierBytes`: name and colour, from the bottom of the stack."""
_WIDTH, _LEFT, _RIGHT, _TOP = 780, 84, 16, 62
_MEMORY, _ROW, _GAP = 132, 15, 4
_FINEST, _LONGEST = 1.5, 8.0
"""Pixels: blocks of one kind that are as near to each other are drawn as one, up to this width."""
_PALEST = 0.2


@dataclass(frozen=True)
class PictureScale:
    """What fills the picture's width and the height of its areas, so that several can have one scale."""

    seconds: float
    nbytes: int

    @classmethod
    def of(cls, steps: Sequence[TimedStep]) -> PictureScale:
        """One for all of these."""
        held = [moment.held for step in steps for moment in step.moments]
        return cls(max(step.end for step in steps), max(each.device + each.host + each.disk for each in held))


def tiers_svg(step: TimedStep, heading: str, unit: str = "s", scale: PictureScale | None = None) -> str:
    """The picture as SVG. heading: the line above it. unit: of time. scale: default the step's own."""
    scale = scale or PictureScale.of([step])
    lanes_top = _TOP + _MEMORY + 30
    axis = lanes_top + len(step.lanes) * (_ROW + _GAP) + 4
    height = axis + 58
    parts = [text(0, 15, heading, 'font-size="14" font-weight="600"'), *_tier_key(step), *_grid(scale, axis, unit)]
    parts += _areas(step, scale)
    parts += _bytes_axis(scale.nbytes)
    for number, (lane, spans) in enumerate(step.lanes.items()):
        parts += _row(lane, spans, lanes_top + number * (_ROW + _GAP), scale.seconds)
    parts += _kind_key(step, height - 6)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img" '
        f'font-family="ui-sans-serif, system-ui, \'Segoe UI\', Helvetica, Arial, sans-serif" font-size="11" '
        f'fill="{INK}">\n<title>{escape(heading)}</title>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _x(seconds: float, most: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * seconds / most


def _areas(step: TimedStep, scale: PictureScale) -> Iterator[str]:
    """One stair on the other, a step for each moment."""
    below = [0] * len(step.moments)
    for tier, (name, colour) in TIERS.items():
        above = [low + getattr(moment.held, tier) for low, moment in zip(below, step.moments, strict=True)]
        if above != below:
            edges = [_stair(step, line, scale) for line in (above, below)]
            points = " ".join([*edges[0], *reversed(edges[1])])
            yield f'<polygon points="{points}" fill="{colour}"><title>{name}</title></polygon>'
            yield f'<polyline points="{" ".join(edges[0])}" fill="none" stroke="{INK}" stroke-width="0.8"/>'
        below = above


def _stair(step: TimedStep, heights: Sequence[int], scale: PictureScale) -> list[str]:
    """The corners of a line that has these heights, without those between two equal ones."""
    corners = list[tuple[float, int]]()
    for moment, value in zip(step.moments, heights, strict=True):
        if corners and corners[-1][1] == value:
            corners.pop()
        else:
            corners.append((moment.start, value))
        corners.append((moment.end, value))
    return [f"{_x(at, scale.seconds):.1f},{_y(value, scale.nbytes):.1f}" for at, value in corners]


def _y(value: float, most: float) -> float:
    return _TOP + _MEMORY * (1 - value / most)


def _ticks(most: float, wanted: int) -> list[float]:
    """Round numbers from 0 to `most`, about as many as wanted: steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** len(str(int(most))) if most >= 1 else 1.0
    steps = [power]
    while most / steps[-1] < wanted:
        steps += [power / 2, power / 5, power / 10]
        power /= 10
    step = min(steps, key=lambda each: abs(most / each - wanted))
    return [number * step for number in range(int(most / step * (1 + 1e-9)) + 1)]


def _bytes_axis(most: int) -> Iterator[str]:
    unit, per = next((name, 1024**n) for n, name in ((3, "GiB"), (2, "MiB"), (1, "KiB"), (0, "B")) if most >= 1024**n)
    for value in _ticks(most / per, 4):
        y = _y(value * per, most)
        yield f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="{INK}" stroke-opacity="0.22"/>'
        yield text(_LEFT - 8, y + 4, f"{value:g}", 'text-anchor="end"')
    y = _TOP + _MEMORY / 2
    yield text(14, y, f"memory ({unit})", f'text-anchor="middle" transform="rotate(-90 14 {y:.1f})"')


def _grid(scale: PictureScale, axis: float, unit: str) -> Iterator[str]:
    for value in _ticks(scale.seconds, 8):
        x = _x(value, scale.seconds)
        yield f'<path d="M{x:.1f} {_TOP}V{axis + 4:.1f}" stroke="{INK}" stroke-opacity="0.22"/>'
        yield text(x, axis + 17, f"{value:g}", 'text-anchor="middle"')
    yield text(_LEFT - 8, axis + 17, f"time ({unit})", 'text-anchor="end"')


def _row(lane: Lane, spans: Sequence[Span], y: float, seconds: float) -> Iterator[str]:
    """The blocks of a lane. One that stands for several is as pale as the lane is idle meanwhile."""
    yield text(_LEFT - 8, y + 11.5, LANES[lane], 'text-anchor="end"')
    line = f'x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_ROW}"'
    yield f'<rect {line} fill="{INK}" fill-opacity="0.07"/>'
    for block in _blocks(spans, seconds):
        width = max(block.right - block.left, 0.3)
        busy = max(_PALEST, min(1.0, block.busy / width))
        pale = f' fill-opacity="{busy:.2f}"' if busy < 0.99 else ""
        box = f'x="{block.left:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}"'
        yield f'<rect {box} fill="{KINDS[block.kind][0]}"{pale}/>'


@dataclass
class _Block:
    """A box of a lane, in pixels. busy: how much of its width something runs."""

    kind: str
    left: float
    right: float
    busy: float


def _blocks(spans: Sequence[Span], seconds: float) -> Iterator[_Block]:
    """One box for neighbours of a kind between which nobody could see the space."""
    block: _Block | None = None
    for span in spans:
        kind = kind_of(span.instruction.op)
        left, right = _x(span.start, seconds), _x(span.end, seconds)
        near = block is not None and block.kind == kind and left - block.right < _FINEST
        if block is not None and near and right - block.left < _LONGEST:
            block.right, block.busy = right, block.busy + right - left
            continue
        if block is not None:
            yield block
        block = _Block(kind, left, right, right - left)
    if block is not None:
        yield block


def _tier_key(step: TimedStep) -> Iterator[str]:
    """The tiers that hold something, with the most that they hold."""
    x = float(_LEFT)
    for tier, (name, colour) in TIERS.items():
        most = getattr(step.peaks, tier)
        if most:
            words = f"{name}: at most {size(most)}"
            yield f'<rect x="{x:.1f}" y="32" width="12" height="11" fill="{colour}" stroke="{INK}" stroke-width="0.8"/>'
            yield text(x + 18, 42, words)
            x += 44 + 6 * len(words)


def _kind_key(step: TimedStep, y: float) -> Iterator[str]:
    """The kinds that occur."""
    shown = {kind_of(span.instruction.op) for spans in step.lanes.values() for span in spans}
    x = float(_LEFT)
    for kind, (colour, _) in KINDS.items():
        if kind in shown:
            yield f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="12" height="11" fill="{colour}"/>'
            yield text(x + 18, y + 0.5, kind)
            x += 38 + 6.2 * len(kind)
