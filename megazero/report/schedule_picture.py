"""A simulated schedule as text: a row per stage, time from left to right, in colours or in plain ASCII.

Each computation is a block with the number of its micro-batch. In colours, forwards are white on dark, backwards black
on bright, and the weights' part of a split backward black on grey-green. Each model chunk has a colour of its own, in
two alternating shades. In plain text `|F3b` is the forward of micro-batch 3 in chunk b, W is the weights' part of a
backward, and a dot is idle time. A picture that is wider than the terminal continues in further bands below.

With `lanes`, a stage has a row for each lane on which it communicates as well: `|G2` gathers bucket 2, R reduces one, A
reduces one across, T sums over tp, N is the norm, f and b are hidden states and gradients that arrive. U is an update.
Of what is updated in host memory, s is optimizer state, g gradients, H the update and u updated parameters: the name of
the row says from where to where they go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from megazero.program.instruction import (
    READ_LANES,
    UPDATE,
    UPDATE_HOST,
    WRITE_LANES,
    Instruction,
    Kind,
    Lane,
    Op,
    Piece,
    moves_of,
)
from megazero.program.simulate import SimulationReport
from megazero.program.times import Span

Shades = tuple[int, int]
"""Two colours of the 256-colour palette."""

_FORWARD: tuple[Shades, ...] = ((25, 32), (30, 37), (54, 97), (60, 67))
_BACKWARD: tuple[Shades, ...] = ((172, 214), (131, 174), (142, 185), (71, 114))
_WEIGHT: tuple[Shades, ...] = ((151, 194), (152, 195), (187, 230), (188, 254))
_GATHER: tuple[Shades, ...] = ((66, 73),)
_REDUCE: tuple[Shades, ...] = ((95, 138),)
_HOST: tuple[Shades, ...] = ((103, 146),)
_OTHER: tuple[Shades, ...] = ((240, 244),)
_MESSAGES: dict[Kind, tuple[str, str]] = {
    Op.RECV_FORWARD: ("f", "hidden states arrive"),
    Op.RECV_BACKWARD: ("b", "gradients arrive"),
    Op.GATHER: ("G", "gather of a bucket's parameters"),
    Op.REDUCE: ("R", "reduction of its gradients"),
    Op.REDUCE_ACROSS: ("A", "the same across"),
    Op.REDUCE_PARTIAL: ("T", "sum over tp"),
    Op.NORM: ("N", "norm"),
    UPDATE: ("U", "update"),
    UPDATE_HOST: ("H", "update there"),
    Op.ADD_GRADIENT: ("a", "added"),
    Op.COUNT_GRADIENT: ("c", "counted"),
}
_PIECES = {
    Piece.PARAMETERS: ("p", "parameters"),
    Piece.UPDATED: ("u", "updated parameters"),
    Piece.STATE: ("s", "optimizer state"),
    Piece.GRADIENTS: ("g", "gradients"),
    Piece.REDUCED: ("r", "reduced gradients"),
    Piece.SUMS: ("m", "sums"),
    Piece.ACTIVATIONS: ("k", "kept activations"),
}
"""The row of a move says from where to where."""
_MOVES = {move: (letter, words) for piece, (letter, words) in _PIECES.items() for move in moves_of(piece)}
_LETTERS: dict[Kind, str] = {Op.FORWARD: "F", Op.BACKWARD: "B", Op.BACKWARD_INPUT: "B", Op.BACKWARD_WEIGHT: "W"}
_LETTERS |= {op: letter for op, (letter, _) in (_MESSAGES | _MOVES).items()}
_FILLING = {"F": " ", "W": "=", "U": "+", "H": "+"}
"""Of the blocks in plain text; of others a dash."""
_TABLES = {"F": _FORWARD, "B": _BACKWARD, "W": _WEIGHT, "G": _GATHER, "R": _REDUCE, "A": _REDUCE} | dict.fromkeys(
    "sgHu", _HOST
)
_LANE_NAMES = {
    Lane.STAGES: "messages",
    Lane.SHARDS: "shards",
    Lane.ACROSS: "across",
    Lane.TENSOR: "tp",
    Lane.WORLD: "world",
    **READ_LANES,
    Lane.TO_HOST: "to host",
    Lane.HOST: "host",
    Lane.TO_DEVICE: "to device",
    **WRITE_LANES,
}
_WHITE, _BLACK = 231, 16
_BLOCKS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class DrawOptions:
    """How to draw.

    width   columns of the terminal
    colour  use Unicode and 256 colours; else plain ASCII
    fit     draw one band, also where blocks become too narrow for their labels
    lanes   draw the lanes of messages below each stage
    """

    width: int = 100
    colour: bool = False
    fit: bool = False
    lanes: bool = False


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
    margin = max(len(f"stage {len(report.spans) - 1}"), 10 * look.lanes) + 2
    room = max(10, look.width - margin)
    scale = _columns_per_unit(report, painter, room, look)
    drawn = list(_rows(report, look.lanes))
    total = round(max((spans[-1].end for _, spans in drawn if spans), default=0.0) * scale)
    rows = [(name, painter.cells(spans, scale, total)) for name, spans in drawn]
    lines: list[str] = []
    band = _band_width(report, scale, total, room)
    for start in range(0, max(total, 1), band):
        stop = min(total, start + band)
        lines.append(" " * margin + painter.dim(_ruler(start, stop, scale)))
        lines += [name.ljust(margin) + painter.paint(row[start:stop]) for name, row in rows]
        lines.append("")
    ops = {span.instruction.op for _, spans in drawn for span in spans}
    return "\n".join([*lines, *painter.legend(margin, ops), "", *_summary(report, painter, margin)])


def _rows(report: SimulationReport, lanes: bool) -> Iterator[tuple[str, list[Span]]]:
    """(name, spans) of each row. Units of a chunk that follow each other at once are one block."""
    for stage, spans in enumerate(report.spans):
        yield f"stage {stage}", _merged(spans)
        if lanes:
            by_lane: dict[Lane, list[Span]] = {}
            for span in report.messages[stage]:
                if span.end > span.start and not span.instruction.is_send:
                    by_lane.setdefault(span.instruction.lane, []).append(span)
            yield from ((f"  {name}", by_lane[lane]) for lane, name in _LANE_NAMES.items() if lane in by_lane)


def _columns(spans: Sequence[Span], scale: float, total: int) -> list[tuple[int, int]]:
    """The first column of each block of a row, and the one behind it: those of its times, rounded, but at least one.

    A short block beside others moves those behind it to the right, at the end of the row those before it to the left.
    Where a row has more blocks than columns, the shortest have none.
    """
    columns = [(round(span.start * scale), round(span.end * scale)) for span in spans]
    lasting = [number for number, span in enumerate(spans) if span.end > span.start]
    if len(lasting) > total:
        return columns
    free = 0
    for number in lasting:
        start = max(columns[number][0], free)
        columns[number] = start, max(columns[number][1], start + 1)
        free = columns[number][1]
    free = total
    for number in reversed(lasting):
        stop = min(columns[number][1], free)
        columns[number] = min(columns[number][0], stop - 1), stop
        free = columns[number][0]
    return columns


def _merged(spans: Sequence[Span]) -> list[Span]:
    found: list[Span] = []
    for span in spans:
        i = span.instruction._replace(units=None)
        if found and i.is_compute and found[-1].instruction == i and found[-1].end == span.start:
            found[-1] = Span(i, found[-1].start, span.end)
        else:
            found.append(Span(i, span.start, span.end))
    return found


def _columns_per_unit(report: SimulationReport, painter: _Painter, room: int, look: DrawOptions) -> float:
    """Columns per unit of time: enough for every label, more where there is room; with `fit` exactly one band.

    With `lanes` enough for the labels of whole computations; shorter blocks have none.
    """
    spans = [span for row in report.spans for span in row if span.end > span.start]
    seconds: dict[tuple[int, Instruction], float] = {}
    for stage, row in enumerate(report.spans):
        for span in row:
            if span.instruction.is_compute and span.end > span.start:
                key = stage, span.instruction._replace(units=None)
                seconds[key] = seconds.get(key, 0.0) + span.end - span.start
    shortest = min(seconds.values(), default=1.0)
    label = max((len(painter.label(span.instruction)) for span in spans), default=1)
    needed = (label + painter.gap) / shortest
    painter.shrunk = look.lanes
    if report.makespan * needed > room:
        painter.shrunk = look.fit or look.lanes
        return room / report.makespan if look.fit else needed
    # The shortest block gets whole columns, at most twice the width of its label; beside short messages more.
    whole = int(min(room / report.makespan, (8 if look.lanes else 2) * needed) * shortest + 1e-9)
    return max(whole / shortest, needed)


def _band_width(report: SimulationReport, scale: float, total: int, room: int) -> int:
    """Columns of a band. Bands have equal widths, multiples of the shortest block if it fits into `room`."""
    bands = max(1, -(-total // room))
    spans = (span for row in report.spans for span in row if span.instruction.is_compute)
    block = max(1, round(min((span.end - span.start for span in spans), default=1.0) * scale))
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
        number = str(i.micro_batch) if i.micro_batch >= 0 else ",".join(map(str, i.buckets[:1]))
        if self.colour:
            return number
        chunk = _letter(i.chunk) if self.chunks > 1 and i.chunk >= 0 else ""
        return f"{_LETTERS[i.op]}{number}{chunk}"

    def cells(self, spans: Sequence[Span], scale: float, total: int) -> list[_Cell]:
        """A row as columns. Blocks begin and end at rounded columns, so that simultaneous events are aligned."""
        row = [_Cell("·" if self.colour else ".")] * total
        for span, (start, stop) in zip(spans, _columns(spans, scale, total), strict=True):
            row[start:stop] = [
                _Cell(letter, span.instruction) for letter in self._block(span.instruction, stop - start)
            ]
        return row

    def _block(self, i: Instruction, width: int) -> str:
        label = self.label(i)
        if self.colour:
            return label.center(width) if len(label) + self.shrunk <= width else " " * width
        if len(label) < width:
            return "|" + label.ljust(width - 1, _FILLING.get(_LETTERS[i.op], "-"))
        if i.is_compute or width < 2:
            return label[0] * width if label else ""
        return "|" + label[0] * (width - 1)  # two copies of one letter stand beside each other

    def paint(self, cells: Sequence[_Cell]) -> str:
        return "".join(
            self._run(of, "".join(cell.text for cell in run)) for of, run in groupby(cells, key=lambda cell: cell.of)
        )

    def _run(self, of: Instruction | None, text: str) -> str:
        return (
            (self.dim(text) if of is None else self._coloured(_LETTERS[of.op], max(of.chunk, 0), _shade(of), text))
            if self.colour
            else text
        )

    def _coloured(self, letter: str, chunk: int, micro_batch: int, text: str) -> str:
        table = _TABLES.get(letter, _OTHER)
        ground = table[chunk % len(table)][micro_batch % 2]
        return f"\x1b[38;5;{_WHITE if letter in 'FG' else _BLACK};48;5;{ground}m{text}\x1b[0m"

    def dim(self, text: str) -> str:
        return f"\x1b[38;5;243m{text}\x1b[0m" if self.colour and text else text

    def bar(self, share: float, width: int) -> str:
        if not self.colour:
            return "#" * round(share * width)
        whole, eighths = divmod(round(share * width * 8), 8)
        return f"\x1b[38;5;67m{'█' * whole}{_BLOCKS[eighths].strip()}\x1b[0m"

    def legend(self, margin: int, ops: Collection[Kind]) -> Iterator[str]:
        """Lines that explain the colours or the letters. ops: what is drawn."""
        yield from self._computations(margin)
        for table in (_MESSAGES, _MOVES):
            words = dict.fromkeys(row for op, row in table.items() if op in ops)
            signs = (self._coloured(letter, 0, 0, f" {letter} ") if self.colour else letter for letter, _ in words)
            shown = "  ".join(f"{sign} {said}" for sign, (_, said) in zip(signs, words, strict=True))
            yield from [" " * margin + shown] * bool(words)

    def _computations(self, margin: int) -> Iterator[str]:
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


def _shade(i: Instruction) -> int:
    """A number of which neighbours have different parities."""
    return i.micro_batch if i.micro_batch >= 0 else sum(i.buckets) + max(i.part, 0)


def _letter(chunk: int) -> str:
    """A letter from a to z; beyond that the number in brackets."""
    return chr(ord("a") + chunk) if chunk < 26 else f"({chunk})"
