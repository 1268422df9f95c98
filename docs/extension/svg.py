"""A picture as SVG, written a shape at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

INK = "#747d87"
"""Text and lines outside coloured shapes: a grey that is read on white (contrast 4.2) and on a dark page (4.4). A page
cannot give its own colour to the file of a picture.
"""
FAINT = "#8b949e"
FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
COLOURS = ("#4878a8", "#c87f3e", "#5d9a6b", "#9a6fb0", "#b85c66", "#4d9a9a", "#8a7b52", "#7a7f8c")
"""Eight that stay apart from each other, dark enough for white text."""


def shade(colour: str, by: float) -> str:
    """A colour nearer to white (by > 0) or black (by < 0), 1 being all the way."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    towards = 255 if by > 0 else 0
    return "#" + "".join(f"{round(part + (towards - part) * abs(by)):02x}" for part in parts)


@dataclass
class Picture:
    """width, height: of the canvas. title: what a screen reader says."""

    width: float
    height: float
    title: str
    shapes: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, line: str = "") -> None:
        stroke = f' stroke="{line}"' if line else ""
        self.shapes.append(
            f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" rx="2" fill="{fill}"{stroke}/>'
        )

    def frame(self, x: float, y: float, width: float, height: float, line: str) -> None:
        self.shapes.append(
            f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" rx="5" fill="none" '
            f'stroke="{line}" stroke-width="1.5"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        at: str = "middle",
        size: float = 12,
        fill: str = "",
        bold: bool = False,
    ) -> None:
        """at: start, middle or end of the words is at x; y is the line that they stand on. fill: default the ink."""
        look = f' text-anchor="{at}"' if at != "middle" else ""
        look += f' font-size="{size:g}"' if size != 12 else ""
        look += f' fill="{fill}"' if fill else ""
        look += ' font-weight="600"' if bold else ""
        self.shapes.append(f'<text x="{x:.4g}" y="{y:.4g}"{look}>{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False, arrow: bool = False) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        head = ' marker-end="url(#head)"' if arrow else ""
        self.shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{FAINT}" stroke-width="1.2"{dash}{head}/>'
        )

    def curve(self, points: Sequence[tuple[float, float]], line: str, *, width: float) -> None:
        path = " ".join(f"{x:.4g},{y:.4g}" for x, y in points)
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{line}" stroke-width="{width:g}" stroke-linejoin="round"/>'
        )

    def svg(self) -> str:
        """The picture as one element, for a page or for a file of its own."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'width="{self.width:g}" font-family="{FONT}" font-size="12" text-anchor="middle" fill="{INK}">'
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{FAINT}"/></marker></defs>'
        )
        return "\n".join([head, f"<title>{escape(self.title)}</title>", marker, *self.shapes, "</svg>"]) + "\n"
