"""The steps of each collective on one chunk: what a rank writes into its slot and how it uses the others' slots."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_ops.native import library
from fused_ops.native.library import Library

SUFFIXES = library.SUFFIXES | {torch.float64: "f64", torch.int64: "i64"}
"""The suffix of the combining kernels by dtype: the other kernels' dtypes, float64 and int64."""
FOLD_FROM = 16384
"""From this many bytes of a chunk on, three or more ranks sum one part each. Below, each rank sums the whole chunk."""


class Transfer:
    """One chunk of a collective on this rank.

    bytes  bytes that each member puts into its slot. They must be equal on all ranks: the ranks compare them to notice
           that they have launched different collectives
    """

    bytes = 0
    needs: Sequence[int] | None = None
    """Members whose part must be posted before this rank takes; None: all."""
    folds = False
    """Whether each rank first sums its own part of the chunk, and all take when all have done so."""

    def put(self, slots: Tensor) -> None:
        """Write this rank's part. slots: uint8 [members, SLOT], the slots of this chunk (also in `fold` and `take`)."""

    def fold(self, slots: Tensor) -> None:
        """Sum this rank's part of the chunk. All members have posted."""

    def take(self, slots: Tensor) -> None:
        """Read the result. The members in `needs` have posted, or, if the chunk folds, all have folded."""


def _as(slot: Tensor, like: Tensor) -> Tensor:
    """The beginning of a slot as a view of the shape and dtype of `like`."""
    return slot[: like.nbytes].view(like.dtype).view(like.shape)


def _put_for_others(slots: Tensor, columns: Tensor, index: int) -> None:
    """Write all rows of columns [members, n] but member `index`'s own into the slot of this member."""
    mine = _as(slots[index], columns)
    mine[:index].copy_(columns[:index])
    mine[index + 1 :].copy_(columns[index + 1 :])


@dataclass(frozen=True)
class Members:
    """The number of members, this rank's index among them, and the kernels that combine their tensors."""

    index: int
    size: int
    library: Library

    def combine(self, op: str, parts: Iterable[Tensor], out: Tensor) -> None:
        """out = op ("sum", "max" or "min") over the parts in order. All are contiguous and of one dtype and length."""
        addresses = [part.data_ptr() for part in parts]
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self.library.call(
            f"combine_{op}_{SUFFIXES[out.dtype]}", out.numel(), len(addresses), ctypes.addressof(pointers), out
        )


class AllReduce(Transfer):
    """Reduce one chunk, in place.

    With two ranks or few bytes each rank sums the whole chunk. Else each rank sums one part in its own slot, from which
    the others copy it.
    """

    def __init__(self, piece: Tensor, op: str, members: Members) -> None:
        self.piece, self.op, self.members, self.bytes = piece, op, members, piece.nbytes
        self.folds = members.size > 2 and piece.nbytes >= FOLD_FROM

    def put(self, slots: Tensor) -> None:
        _as(slots[self.members.index], self.piece).copy_(self.piece)

    def fold(self, slots: Tensor) -> None:
        mine = [part[self.members.index] for part in self._shares(slots)]
        self.members.combine(self.op, mine, mine[self.members.index])

    def take(self, slots: Tensor) -> None:
        if self.folds:
            shares = self._shares(slots)
            for member, target in enumerate(self.piece.tensor_split(self.members.size)):
                target.copy_(shares[member][member])
        else:
            self.members.combine(self.op, [_as(slot, self.piece) for slot in slots], self.piece)

    def _shares(self, slots: Tensor) -> list[tuple[Tensor, ...]]:
        return [_as(slot, self.piece).tensor_split(self.members.size) for slot in slots]


class ReduceScatter(Transfer):
    """Sum one chunk. columns [members, n]: the same n columns of each member's part. output [n]: this rank's sum.

    `output` may be a view of this rank's row of `columns`.
    """

    def __init__(self, output: Tensor, columns: Tensor, members: Members) -> None:
        self.output, self.columns, self.members, self.bytes = output, columns, members, columns.nbytes

    def put(self, slots: Tensor) -> None:
        _put_for_others(slots, self.columns, self.members.index)

    def take(self, slots: Tensor) -> None:
        index = self.members.index
        parts = [_as(slot, self.columns)[index] for slot in slots]
        parts[index] = self.columns[index]
        self.members.combine("sum", parts, self.output)


class AllGather(Transfer):
    """Gather one chunk. columns [members, n]: where the members' pieces go. piece [n]: this rank's."""

    def __init__(self, columns: Tensor, piece: Tensor, index: int) -> None:
        self.columns, self.piece, self.index, self.bytes = columns, piece, index, piece.nbytes

    def put(self, slots: Tensor) -> None:
        _as(slots[self.index], self.piece).copy_(self.piece)

    def take(self, slots: Tensor) -> None:
        for member, target in enumerate(self.columns):
            source = self.piece if member == self.index else _as(slots[member], self.piece)
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)


class AllToAll(Transfer):
    """Exchange one chunk. source, output [members, n]: n columns of what goes to and what comes from each member."""

    def __init__(self, output: Tensor, source: Tensor, index: int) -> None:
        self.output, self.source, self.index, self.bytes = output, source, index, source.nbytes

    def put(self, slots: Tensor) -> None:
        _put_for_others(slots, self.source, self.index)

    def take(self, slots: Tensor) -> None:
        for member, target in enumerate(self.output):
            own = member == self.index
            target.copy_(self.source[member] if own else _as(slots[member], self.source)[self.index])


class Broadcast(Transfer):
    def __init__(self, piece: Tensor, source: int, index: int) -> None:
        self.piece, self.source, self.index, self.needs, self.bytes = piece, source, index, [source], piece.nbytes

    def put(self, slots: Tensor) -> None:
        if self.index == self.source:
            _as(slots[self.source], self.piece).copy_(self.piece)

    def take(self, slots: Tensor) -> None:
        if self.index != self.source:
            self.piece.copy_(_as(slots[self.source], self.piece))
