"""A simulated schedule as text: a row per stage, time from left to right, in colours or in plain ASCII.

Each computation is a block with the number of its micro-batch. In colours, forwards are white on dark, backwards black
on bright, and the weights' part of a split backward black on grey-green. Each model chunk has a colour of its own, in
two alternating shades. In plain text `|F3b` is the forward of micro-batch 3 in chunk b, W is the weights' part of a
backward, and a dot is idle time. A picture that is wider than the terminal continues in further bands below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from megazero.pipeline.simulate import ComputationSpan, SimulationReport
from megazero.program.instruction import Instruction, Op

Shades = tuple[int, int]
"""Two colours of the 256-colour palette."""

_FORWARD: tuple[Shades, ...] = ((25, 32), (30, 37), (54, 97), (60, 67))
_BACKWARD: tuple[Shades, ...] = ((172, 214), (131, 174), (142, 185), (71, 114))
_WEIGHT: tuple[Shades, ...] = ((151, 194), (152, 195), (187, 230), (188, 254))
_LETTERS = {Op.FORWARD: "F", Op.BACKWARD: "B", Op.BACKWARD_INPUT: "B", Op.BACKWARD_WEIGHT: "W"}
_FILLING = {"F": " ", "B": "-", "W": "="}
_TABLES = {"F": _FORWARD, "B": _BACKWARD, "W": _WEIGHT}
_WHITE, _BLACK = 231, 16
_BLOCKS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class DrawOptions:
    """How to draw.

    width   columns of the terminal
    colour  use Unicode and 256 colours; else plain ASCII
    fit     draw one band, also where blocks become too narrow for their labels
    """

    width: int = 100
    colour: bool = False
    fit: bool = False


@dataclass(frozen=True)
class _Cell:
    """One column of one row."""

    text: str
    of: Instruction | None = None


def draw(report: SimulationReport, look: DrawOptions) -> str:
    """The picture: bands of rows under a ruler, a legend, then idle time and peak activations of each stage."""
    chunks = 1 + max((span.instruction.chunk for row in report.spans for span in row), default=0)
    split = any(span.instruction.op is Op.BACKWARD_WEIGHT for row in report.spans for span in row)
    painter = _Painter(look, chunks, split)
    margin = len(f"stage {len(report.spans) - 1}") + 2
    room = max(10, look.width - margin)
    scale = _columns_per_unit(report, painter, room, look.fit)
    total = round(report.makespan * scale)
    rows = [painter.cells(row, scale, total) for row in report.spans]
    lines: list[str] = []
    band = _band_width(report, scale, total, room)
    for start in range(0, max(total, 1), band):
        stop = min(total, start + band)
        lines.append(" " * margin + painter.dim(_ruler(start, stop, scale)))
        lines += [f"stage {i}".ljust(margin) + painter.paint(row[start:stop]) for i, row in enumerate(rows)]
        lines.append("")
    return "\n".join([*lines, *painter.legend(margin), "", *_summary(report, painter, margin)])


def _columns_per_unit(report: SimulationReport, painter: _Painter, room: int, fit: bool) -> float:
    """Columns per unit of time: enough for every label, more where there is room; with `fit` exactly one band."""
    spans = [span for row in report.spans for span in row if span.end > span.start]
    shortest = min((span.end - span.start for span in spans), default=1.0)
    label = max((len(painter.label(span.instruction)) for span in spans), default=1)
    needed = (label + painter.gap) / shortest
    if report.makespan * needed > room:
        painter.shrunk = fit
        return room / report.makespan if fit else needed
    # The shortest block gets whole columns, at most twice the width of its label.
    whole = int(min(room / report.makespan, 2 * needed) * shortest + 1e-9)
    return max(whole / shortest, needed)


def _band_width(report: SimulationReport, scale: float, total: int, room: int) -> int:
    """Columns of a band. Bands have equal widths, multiples of the shortest block if it fits into `room`."""
    bands = max(1, -(-total // room))
    block = max(1, round(min((span.end - span.start for row in report.spans for span in row), default=1.0) * scale))
    even = -(-total // bands)
    return min(room, -(-even // block) * block) if block <= room else room


def _ruler(start: int, stop: int, scale: float) -> str:
    """Times at round numbers, at least eight columns apart."""
    step, factors = 1.0, (2.0, 2.5, 2.0)
    number = 0
    while step * scale < 8:
        step *= factors[number % 3]
        number += 1
    marks = [" "] * (stop - start)
    for i in range(int(start / (step * scale)), int(stop / (step * scale)) + 1):
        at = round(i * step * scale) - start
        text = f"{i * step:g}"
        if at >= 0 and at + len(text) <= stop - start:
            marks[at : at + len(text)] = text
    return "".join(marks).rstrip()


def _summary(report: SimulationReport, painter: _Painter, margin: int) -> list[str]:
    most = max(report.peak_activations, default=1)
    lines = [" " * margin + painter.dim("idle     peak activations")]
    for i, (busy, peak) in enumerate(zip(report.busy, report.peak_activations, strict=True)):
        idle = 1 - busy / report.makespan if report.makespan else 0.0
        lines.append(f"stage {i}".ljust(margin) + f"{idle:6.1%}   {peak:3d} {painter.bar(peak / most, 24)}".rstrip())
    return lines


class _Painter:
    def __init__(self, look: DrawOptions, chunks: int, split: bool) -> None:
        self.colour, self.chunks, self.split = look.colour, chunks, split
        self.gap = 1
        """Columns that the narrowest block has in addition to its label."""
        self.shrunk = False
        """Whether blocks may be narrower. Labels that would touch the next one are then left out."""

    def label(self, i: Instruction) -> str:
        if self.colour:
            return str(i.micro_batch)
        chunk = _letter(i.chunk) if self.chunks > 1 else ""
        return f"{_LETTERS[i.op]}{i.micro_batch}{chunk}"

    def cells(self, spans: Sequence[ComputationSpan], scale: float, total: int) -> list[_Cell]:
        """A row as columns. Blocks begin and end at rounded columns, so that simultaneous events are aligned."""
        row = [_Cell("·" if self.colour else ".")] * total
        for span in spans:
            start, stop = round(span.start * scale), round(span.end * scale)
            row[start:stop] = [
                _Cell(letter, span.instruction) for letter in self._block(span.instruction, stop - start)
            ]
        return row

    def _block(self, i: Instruction, width: int) -> str:
        label = self.label(i)
        if self.colour:
            return label.center(width) if len(label) + self.shrunk <= width else " " * width
        if len(label) < width:
            return "|" + label.ljust(width - 1, _FILLING[_LETTERS[i.op]])
        return label[0] * width

    def paint(self, cells: Sequence[_Cell]) -> str:
        return "".join(
            self._run(of, "".join(cell.text for cell in run)) for of, run in groupby(cells, key=lambda cell: cell.of)
        )

    def _run(self, of: Instruction | None, text: str) -> str:
        return (
            (self.dim(text) if of is None else self._coloured(_LETTERS[of.op], of.chunk, of.micro_batch, text))
            if self.colour
            else text
        )

    def _coloured(self, letter: str, chunk: int, micro_batch: int, text: str) -> str:
        table = _TABLES[letter]
        ground = table[chunk % len(table)][micro_batch % 2]
        return f"\x1b[38;5;{_WHITE if letter == 'F' else _BLACK};48;5;{ground}m{text}\x1b[0m"

    def dim(self, text: str) -> str:
        return f"\x1b[38;5;243m{text}\x1b[0m" if self.colour and text else text

    def bar(self, share: float, width: int) -> str:
        if not self.colour:
            return "#" * round(share * width)
        whole, eighths = divmod(round(share * width * 8), 8)
        return f"\x1b[38;5;67m{'█' * whole}{_BLOCKS[eighths].strip()}\x1b[0m"

    def legend(self, margin: int) -> Iterator[str]:
        """Lines that explain the colours or the letters."""
        if not self.colour:
            chunk = "a" if self.chunks > 1 else ""
            behind = f", chunks {', '.join(map(_letter, range(self.chunks)))}" if self.chunks > 1 else ""
            parts = f"backward of the input  |W0{chunk}= of the weights" if self.split else "backward of micro-batch 0"
            yield " " * margin + f"|F0{chunk} forward  |B0{chunk}- {parts}{behind}  . idle"
            return
        for letter, word in (("F", "forward "), ("B", "backward"), ("W", "weights "))[: 2 + self.split]:
            swatches = (
                "".join(self._coloured(letter, chunk, shade, f" {shade} ") for shade in (0, 1))
                + (f" chunk {chunk}   " if self.chunks > 1 else "")
                for chunk in range(self.chunks)
            )
            yield " " * margin + f"{word}  " + "".join(swatches).rstrip()


def _letter(chunk: int) -> str:
    """A letter from a to z; beyond that the number in brackets."""
    return chr(ord("a") + chunk) if chunk < 26 else f"({chunk})"
