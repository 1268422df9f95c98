"""Which elements two fragments share: pure arithmetic of (box, flat range).

A fragment of a global tensor is a flat, row-major range [start, stop) within a box. The box is what a tensor-parallel
rank holds of the tensor, and the range is what ZeRO leaves it of that box. The fragments of two layouts overlap in no
simple pattern. But every range is a sequence of at most 2*dims - 1 boxes, each contiguous in the range, and two boxes
intersect in one box. A copy between layouts is therefore a few strided copies, whatever the shapes. Copying row by row
was rejected: a matrix that is split along its second dimension has as many rows as the model is wide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megazero.mpu.parameter import Box


@dataclass(frozen=True)
class FlatRange:
    """Elements [start, stop), in row-major order, of the box of a global tensor."""

    box: Box
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class SubBox:
    """A box in global coordinates. Its elements, in row-major order, are [offset, offset + numel) of a flat range."""

    box: Box
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def intersection(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes, or None if it is empty."""
    box = tuple((max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def _cut(extents: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cut the range [start, stop) of a tensor of these extents into boxes, in flat order."""
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


def sub_boxes(flat: FlatRange) -> list[SubBox]:
    """The flat range as at most 2*dims - 1 boxes, in flat order."""
    extents = tuple(stop - start for start, stop in flat.box)
    assert 0 <= flat.start <= flat.stop <= math.prod(extents), f"{flat} does not lie within its box"
    found, offset = [], 0
    for cut in _cut(extents, flat.start, flat.stop):
        box = tuple((origin + i, origin + j) for (origin, _), (i, j) in zip(flat.box, cut, strict=True))
        found.append(SubBox(box, offset))
        offset += found[-1].numel
    assert offset == flat.numel
    return found


@dataclass(frozen=True)
class Overlap:
    """One box that a source and a target range share, with the sub-box of each that contains it."""

    box: Box
    source: SubBox
    target: SubBox

    @property
    def numel(self) -> int:
        return math.prod(stop - start for start, stop in self.box)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the shared elements into `target`. Both are the 1-D values of their ranges, of any dtype and device."""
        _part(target, self.target, self.box).copy_(_part(source, self.source, self.box))


def _part(values: Tensor, within: SubBox, box: Box) -> Tensor:
    """A view of `box` in the 1-D values of a flat range. `within` is the sub-box of the range that contains it."""
    view = values[within.offset : within.offset + within.numel].view(within.shape)
    return view[tuple(slice(i - origin, j - origin) for (i, j), (origin, _) in zip(box, within.box, strict=True))]


def overlaps(source: FlatRange, target: FlatRange) -> list[Overlap]:
    """All overlaps of two flat ranges of one global tensor; empty if they share no element."""
    if source.numel == 0 or target.numel == 0 or intersection(source.box, target.box) is None:
        return []
    if source.box == target.box and (source.stop <= target.start or target.stop <= source.start):
        return []
    ours = sub_boxes(target)
    pairs = ((a, b, intersection(a.box, b.box)) for a in sub_boxes(source) for b in ours)
    return [Overlap(box, a, b) for a, b, box in pairs if box is not None]
