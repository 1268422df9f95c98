"""What a chunk of each collective is: what a rank puts into its slot of shared memory, and makes of the others'."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_ops.native import library
from fused_ops.native.library import Library

SUFFIXES = library.SUFFIXES | {torch.float64: "f64", torch.int64: "i64"}
"""The end of the name of a dtype's sums: those of the other kernels, and two more."""
FOLD_FROM = 16384
"""Bytes of a chunk from which three or more ranks sum a part each, instead of everything each."""


class Transfer:
    """One chunk of a collective, as this rank sees it: what it puts, folds and takes, and whose slots it needs for
    that.

    bytes  of what a member puts: alike on all ranks, or they have not launched the same collective
    """

    bytes = 0
    needs: Sequence[int] | None = None
    """Members whose part must be there before this one takes; None: all."""
    folds = False
    """Whether the parts are folded first, each rank its own share, and taken when all have."""

    def put(self, slots: Tensor) -> None:
        """slots: [members, SLOT] bytes, those of this chunk."""

    def fold(self, slots: Tensor) -> None:
        """All parts are there."""

    def take(self, slots: Tensor) -> None:
        """All that is needed is there."""


def _as(slot: Tensor, like: Tensor) -> Tensor:
    """The beginning of a slot as a tensor like another one."""
    return slot[: like.nbytes].view(like.dtype).view(like.shape)


@dataclass(frozen=True)
class Members:
    """How many there are, which this rank is, and what adds their numbers up."""

    index: int
    size: int
    library: Library

    def combine(self, op: str, parts: Iterable[Tensor], out: Tensor) -> None:
        """out = op over the parts in order; all contiguous, of one dtype and length."""
        addresses = [part.data_ptr() for part in parts]
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self.library.call(
            f"combine_{op}_{SUFFIXES[out.dtype]}", out.numel(), len(addresses), ctypes.addressof(pointers), out
        )


class AllReduce(Transfer):
    """Two ranks, or few bytes: everybody sums everything.

    Else everybody sums a share in its own slot, where the others find it.
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
    """The same columns of every part; `output` is the sum of those of this rank's part and may lie in it."""

    def __init__(self, output: Tensor, columns: Tensor, members: Members) -> None:
        self.output, self.columns, self.members, self.bytes = output, columns, members, columns.nbytes

    def put(self, slots: Tensor) -> None:
        index = self.members.index
        mine = _as(slots[index], self.columns)
        mine[:index].copy_(self.columns[:index])
        mine[index + 1 :].copy_(self.columns[index + 1 :])

    def take(self, slots: Tensor) -> None:
        index = self.members.index
        parts = [_as(slot, self.columns)[index] for slot in slots]
        parts[index] = self.columns[index]
        self.members.combine("sum", parts, self.output)


class AllGather(Transfer):
    """The same columns of every piece."""

    def __init__(self, columns: Tensor, piece: Tensor, index: int) -> None:
        self.columns, self.piece, self.index, self.bytes = columns, piece, index, piece.nbytes

    def put(self, slots: Tensor) -> None:
        _as(slots[self.index], self.piece).copy_(self.piece)

    def take(self, slots: Tensor) -> None:
        for member, target in enumerate(self.columns):
            source = self.piece if member == self.index else _as(slots[member], self.piece)
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)


class Broadcast(Transfer):
    def __init__(self, piece: Tensor, source: int, index: int) -> None:
        self.piece, self.source, self.index, self.needs, self.bytes = piece, source, index, [source], piece.nbytes

    def put(self, slots: Tensor) -> None:
        if self.index == self.source:
            _as(slots[self.source], self.piece).copy_(self.piece)

    def take(self, slots: Tensor) -> None:
        if self.index != self.source:
            self.piece.copy_(_as(slots[self.source], self.piece))
