"""Which elements two fragments share: arithmetic of (box, flat range), nothing else.

A fragment of a global tensor is a flat, row-major range [start, stop) within a box: the box is what a tensor-parallel
rank holds, the range is what ZeRO left it of that. Fragments of two layouts meet in no simple pattern, but every range
falls apart into at most 2*dims - 1 rectangles that are each contiguous in the range, and two rectangles meet in one.
So a copy between layouts is a few strided copies, whatever the shapes; going row by row was rejected because a matrix
split along its second dimension has as many rows as the model is wide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megazero.mpu.place import Box


@dataclass(frozen=True)
class Span:
    """Elements [start, stop), in row-major order, of the box of a global tensor."""

    box: Box
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Rectangle:
    """A box in global coordinates that lies at [offset, offset + numel) of a span, in its own row-major order."""

    box: Box
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def meet(a: Box, b: Box) -> Box | None:
    """The box of the elements in both, or None."""
    box = tuple((max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def _cut(extents: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The range [start, stop) of a tensor of these extents as boxes, in flat order."""
    if start >= stop:
        return
    if len(extents) <= 1:
        yield ((start, stop),) if extents else ()
        return
    row = math.prod(extents[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row, touching neither end
        yield from (((last, last + 1), *rest) for rest in _cut(extents[1:], start - last * row, stop - last * row))
        return
    if start < first * row:
        yield from (((first - 1, first), *rest) for rest in _cut(extents[1:], start - (first - 1) * row, row))
    if first < last:
        yield ((first, last), *((0, n) for n in extents[1:]))
    if last * row < stop:
        yield from (((last, last + 1), *rest) for rest in _cut(extents[1:], 0, stop - last * row))


def rectangles(span: Span) -> list[Rectangle]:
    """The span as rectangles in flat order, at most 2*dims - 1 of them."""
    extents = tuple(stop - start for start, stop in span.box)
    assert 0 <= span.start <= span.stop <= math.prod(extents), f"{span} does not lie within its box"
    found, offset = [], 0
    for cut in _cut(extents, span.start, span.stop):
        box = tuple((origin + i, origin + j) for (origin, _), (i, j) in zip(span.box, cut, strict=True))
        found.append(Rectangle(box, offset))
        offset += found[-1].numel
    assert offset == span.numel
    return found


@dataclass(frozen=True)
class Overlap:
    """One box that a source and a target span share, as a part of a rectangle of each."""

    box: Box
    source: Rectangle
    target: Rectangle

    @property
    def numel(self) -> int:
        return math.prod(stop - start for start, stop in self.box)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the shared elements. source, target: 1-D, the values of the two spans; dtypes and devices may differ."""
        _part(target, self.target, self.box).copy_(_part(source, self.source, self.box))


def _part(values: Tensor, within: Rectangle, box: Box) -> Tensor:
    """A view of `box` in the 1-D values of a span, one of whose rectangles holds it."""
    view = values[within.offset : within.offset + within.numel].view(within.shape)
    return view[tuple(slice(i - origin, j - origin) for (i, j), (origin, _) in zip(box, within.box, strict=True))]


def overlaps(source: Span, target: Span) -> list[Overlap]:
    """Everything that two spans of one global tensor share; empty when they share nothing."""
    if source.numel == 0 or target.numel == 0 or meet(source.box, target.box) is None:
        return []
    if source.box == target.box and (source.stop <= target.start or target.stop <= source.start):
        return []
    ours = rectangles(target)
    pairs = ((a, b, meet(a.box, b.box)) for a in rectangles(source) for b in ours)
    return [Overlap(box, a, b) for a, b, box in pairs if box is not None]
