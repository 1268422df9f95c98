"""Where pieces lie in swap files, by arithmetic: slots of pieces, shared among paths by their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from megazero.disk.checksum import BLOCK

ALIGNMENT = 4096
"""O_DIRECT: offsets, lengths and addresses of memory are multiples of this."""
HEADER_BYTES = 4096


class Extent(NamedTuple):
    """A part of a slot, in one file.

    path    index of the file
    offset  in the file, aligned
    first   the part's first byte within the piece, a multiple of BLOCK
    bytes   of the part
    """

    path: int
    offset: int
    first: int
    bytes: int


class Move(NamedTuple):
    """A row of the table that the transports execute; `csrc/cpu/disk_ring.cpp` has the same.

    file     index of the path, replaced by a descriptor when it is executed
    offset   in the file, aligned
    address  of the caller's memory
    bytes    at most those of a buffer, unless it is direct
    piece    index of the piece in its request
    block    number of the first block within the piece
    direct   1: the memory is given to the system itself, 0: a buffer in between
    """

    file: int
    offset: int
    address: int
    bytes: int
    piece: int
    block: int
    direct: int = 0


def padded(count: int, to: int = ALIGNMENT) -> int:
    """Bytes rounded up to whole multiples."""
    return -(-count // to) * to


def shared(count: int, weights: Sequence[float]) -> list[int]:
    """Cut `count` bytes into consecutive parts in proportion to positive weights, at multiples of BLOCK.

    >>> shared(10 * BLOCK + 3, (3, 1)) == [8 * BLOCK, 2 * BLOCK + 3]
    True
    """
    blocks = count / BLOCK / sum(weights)
    # Ends are rounded, not parts: rounded parts would not add up to `count`.
    ends = [min(count, round(end * blocks) * BLOCK) for end in accumulate(weights)]
    ends[-1] = count
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class SwapLayout:
    """The slots of all pieces.

    pieces   bytes by name, in the order of a step; each at least 1
    weights  of the paths: their shares of every piece
    slots    of each: 2: a step is written beside the one before it. 1: over it, in half the space
    again    names of pieces with one slot more, whose content before a write stays too, whatever else does

    In a file come the header, slot 0 of all pieces in order, then slot 1 of all, and so on: a step writes one area from
    end to end.
    """

    pieces: Mapping[str, int]
    weights: tuple[float, ...] = (1.0,)
    slots: int = 2
    again: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.slots not in (1, 2):
            raise ValueError(f"{self.slots} slots for each piece: there are 1 or 2")
        if not self.weights or min(self.weights) <= 0:
            raise ValueError(f"weights of paths are above 0: {self.weights}")
        empty = [name for name, count in self.pieces.items() if count < 1]
        if empty:
            raise ValueError(f"a piece has at least 1 byte: {', '.join(empty[:5])}")

    @cached_property
    def _placed(self) -> tuple[dict[tuple[str, int], tuple[Extent, ...]], tuple[int, ...]]:
        """(extents by piece and slot, the end of each file)."""
        ends, slots = [HEADER_BYTES] * len(self.weights), {}
        for slot in range(self.slots + bool(self.again)):
            for name, count in ((name, count) for name, count in self.pieces.items() if slot < self.slots_of(name)):
                first, extents = 0, list[Extent]()
                for path, part in enumerate(shared(count, self.weights)):
                    if part:
                        extents.append(Extent(path, ends[path], first, part))
                    ends[path], first = ends[path] + padded(part), first + part
                slots[name, slot] = tuple(extents)
        return slots, tuple(ends)

    def slots_of(self, piece: str) -> int:
        """The number of slots of a piece."""
        return self.slots + (piece in self.again)

    def extents(self, piece: str, slot: int) -> tuple[Extent, ...]:
        """The parts of a slot, one on each path that has some of it."""
        return self._placed[0][piece, slot]

    @property
    def file_bytes(self) -> tuple[int, ...]:
        """Of the file on each path."""
        return self._placed[1]


class PieceMemory(NamedTuple):
    """A piece of a request: where it is in the files, the address of its memory, and whether that needs no buffers.

    Moves that are not aligned at both ends take a buffer all the same.
    """

    extents: Sequence[Extent]
    address: int
    direct: bool = False


def moves(parts: Sequence[PieceMemory], buffer_bytes: int, direct_bytes: int) -> list[Move]:
    """The moves of a request, each of at most `buffer_bytes`, or `direct_bytes` where it needs no buffer: multiples of
    BLOCK.

    The moves of each path are in order, and the paths take turns by the share that they have done, so that all of them
    are busy to the end.
    """
    of_path: dict[int, list[Move]] = {}
    for piece, (extents, address, direct) in enumerate(parts):
        for extent in extents:
            path_moves = of_path.setdefault(extent.path, [])
            for start, count, needs_none in _cuts(
                extent, direct and address % ALIGNMENT == 0, buffer_bytes, direct_bytes
            ):
                first = extent.first + start
                path_moves.append(
                    Move(extent.path, extent.offset + start, address + first, count, piece, first // BLOCK, needs_none)
                )
    # (the share of its path that is done at a move's middle, the move)
    shares = [((number + 0.5) / len(path), move) for path in of_path.values() for number, move in enumerate(path)]
    return [move for _, move in sorted(shares, key=lambda share: share[0])]


def _cuts(extent: Extent, direct: bool, buffer_bytes: int, direct_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(first byte within the extent, bytes, whether it needs no buffer) of each move. The last bytes of a piece may be
    no whole page: they take a buffer, from the begin of their block on.
    """
    whole = extent.bytes if extent.bytes % ALIGNMENT == 0 else extent.bytes // BLOCK * BLOCK
    direct_end = whole if direct else 0
    for start in range(0, direct_end, direct_bytes):
        yield start, min(direct_bytes, direct_end - start), 1
    for start in range(direct_end, extent.bytes, buffer_bytes):
        yield start, min(buffer_bytes, extent.bytes - start), 0
