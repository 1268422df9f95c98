"""Collectives among ranks of one host, through memory that they share.

A tensor travels in chunks. Every rank puts its part of chunk c into slot c modulo SLOTS of its own area and says so; who needs it
reads it there, and says when it has. All ranks launch the same collectives in the same order, so that they number the chunks alike and
nothing but the counters has to be agreed on.

A launch returns when everything is put: at once where there are slots for it, else when the others have taken what was in them. A
`wait` therefore depends on no later deed of a rank that has launched, as with any other backend: a first and a last pipeline stage, which share the tied
embedding, wait for it at different places, the one for the sake of the other. (Of a large sum over three ranks or more each rank makes a share,
when it waits itself or comes by again; such a sum is waited for where all ranks do.)

Sums are made in the order of the members, in fp32 where the dtype has 16 bits, rounded once: the same bits on every rank.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_ops.native.library import Library
from megazero.mpu.shared_memory import FOLDED, POSTED, SLOT, SLOTS, TAKEN, SharedMemory

SUFFIXES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64"}
FOLD_FROM = 16384
"""Bytes of a chunk from which three or more ranks sum a part each, instead of everything each."""


class Transfer:
    """One chunk of a collective, as this rank sees it: what it puts, folds and takes, and whose slots it needs for that."""

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


@dataclass
class _Numbers:
    """What the sums need to know."""

    library: Library
    index: int
    size: int

    def combine(self, op: str, parts: Iterable[Tensor], out: Tensor) -> None:
        """out = op over the parts in order; all contiguous, of one dtype and length."""
        addresses = [part.data_ptr() for part in parts]
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self.library.call(f"combine_{op}_{SUFFIXES[out.dtype]}", out.numel(), len(addresses), ctypes.addressof(pointers), out)


class _AllReduce(Transfer):
    """Two ranks, or few bytes: everybody sums everything. Else everybody sums a share in its own slot, where the others find it."""

    def __init__(self, piece: Tensor, op: str, numbers: _Numbers) -> None:
        self.piece, self.op, self.numbers = piece, op, numbers
        self.folds = numbers.size > 2 and piece.nbytes >= FOLD_FROM

    def put(self, slots: Tensor) -> None:
        self._of(slots, self.numbers.index).copy_(self.piece)

    def fold(self, slots: Tensor) -> None:
        mine = [part[self.numbers.index] for part in self._shares(slots)]
        self.numbers.combine(self.op, mine, mine[self.numbers.index])

    def take(self, slots: Tensor) -> None:
        if self.folds:
            shares = self._shares(slots)
            for member, target in enumerate(self.piece.tensor_split(self.numbers.size)):
                target.copy_(shares[member][member])
        else:
            self.numbers.combine(self.op, [self._of(slots, member) for member in range(self.numbers.size)], self.piece)

    def _of(self, slots: Tensor, member: int) -> Tensor:
        return slots[member, : self.piece.nbytes].view(self.piece.dtype)

    def _shares(self, slots: Tensor) -> list[tuple[Tensor, ...]]:
        return [self._of(slots, member).tensor_split(self.numbers.size) for member in range(self.numbers.size)]


class _ReduceScatter(Transfer):
    """The same columns of every part; `output` is the sum of those of this rank's part and may lie in it."""

    def __init__(self, output: Tensor, columns: Tensor, numbers: _Numbers) -> None:
        self.output, self.columns, self.numbers = output, columns, numbers

    def put(self, slots: Tensor) -> None:
        index, mine = self.numbers.index, self._of(slots, self.numbers.index)
        mine[:index].copy_(self.columns[:index])
        mine[index + 1 :].copy_(self.columns[index + 1 :])

    def take(self, slots: Tensor) -> None:
        index = self.numbers.index
        parts = [self._of(slots, member)[index] for member in range(self.numbers.size)]
        parts[index] = self.columns[index]
        self.numbers.combine("sum", parts, self.output)

    def _of(self, slots: Tensor, member: int) -> Tensor:
        return slots[member, : self.columns.nbytes].view(self.columns.dtype).view(self.columns.shape)


class _AllGather(Transfer):
    """The same columns of every piece."""

    def __init__(self, columns: Tensor, piece: Tensor, index: int) -> None:
        self.columns, self.piece, self.index = columns, piece, index

    def put(self, slots: Tensor) -> None:
        slots[self.index, : self.piece.nbytes].view(self.piece.dtype).copy_(self.piece)

    def take(self, slots: Tensor) -> None:
        there = slots[:, : self.piece.nbytes].view(self.piece.dtype)
        self.columns[: self.index].copy_(there[: self.index])
        self.columns[self.index + 1 :].copy_(there[self.index + 1 :])
        own = self.columns[self.index]
        if own.data_ptr() != self.piece.data_ptr():
            own.copy_(self.piece)


class _Broadcast(Transfer):
    def __init__(self, piece: Tensor, source: int, index: int) -> None:
        self.piece, self.source, self.index, self.needs = piece, source, index, [source]

    def put(self, slots: Tensor) -> None:
        if self.index == self.source:
            self._of(slots).copy_(self.piece)

    def take(self, slots: Tensor) -> None:
        if self.index != self.source:
            self.piece.copy_(self._of(slots))

    def _of(self, slots: Tensor) -> Tensor:
        return slots[self.source, : self.piece.nbytes].view(self.piece.dtype)


class Ticket:
    """A collective under way."""

    def __init__(self, exchange: Exchange, until: int) -> None:
        self._exchange, self._until = exchange, until

    def wait(self) -> None:
        """Until the result is there. Raises PeerError when another rank is gone."""
        self._exchange.advance(TAKEN, self._until)


class Exchange:
    """The collectives of one group. Tensors are contiguous, on the CPU; they may not be written to (a result: read) before `wait`."""

    def __init__(self, memory: SharedMemory, library: Library) -> None:
        self._memory, self._numbers = memory, _Numbers(library, memory.index, memory.size)
        self._queues: tuple[deque[Transfer], ...] = (deque(), deque(), deque())
        """What is to be put, folded, taken: each in the order of launching."""
        self._done = [0, 0, 0]
        self._launched = 0

    def takes(self, tensor: Tensor) -> bool:
        """Whether tensors like this one can be exchanged; alike on all ranks."""
        return not tensor.is_cuda and tensor.dtype in SUFFIXES

    def all_reduce(self, tensor: Tensor, op: str) -> Ticket:
        """See `collectives.all_reduce`."""
        pieces = tensor.detach().view(-1).split(SLOT // tensor.itemsize)
        return self._launch([_AllReduce(piece, op, self._numbers) for piece in pieces])

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> Ticket:
        """See `collectives.reduce_scatter`."""
        columns = whole.detach().view(self._memory.size, -1).split(self._width(whole), dim=1)
        outputs = output.detach().view(-1).split(self._width(whole))
        return self._launch([_ReduceScatter(*pair, self._numbers) for pair in zip(outputs, columns, strict=True)])

    def all_gather(self, output: Tensor, piece: Tensor) -> Ticket:
        """See `collectives.all_gather`."""
        width = SLOT // piece.itemsize
        columns = output.detach().view(self._memory.size, -1).split(width, dim=1)
        pieces = piece.detach().view(-1).split(width)
        return self._launch([_AllGather(*pair, self._memory.index) for pair in zip(columns, pieces, strict=True)])

    def broadcast(self, tensor: Tensor, source_index: int) -> Ticket:
        """See `collectives.broadcast`."""
        pieces = tensor.detach().view(-1).split(SLOT // tensor.itemsize)
        return self._launch([_Broadcast(piece, source_index, self._memory.index) for piece in pieces])

    def barrier(self) -> None:
        """See `collectives.barrier`."""
        self._launch([Transfer()]).wait()

    def _width(self, whole: Tensor) -> int:
        """Columns of a chunk that has one row per member."""
        return max(1, SLOT // whole.itemsize // self._memory.size)

    def _launch(self, transfers: Sequence[Transfer]) -> Ticket:
        self._queues[POSTED].extend(transfers)
        self._launched += len(transfers)
        self.advance(POSTED, self._launched)
        while self._step():
            pass
        return Ticket(self, self._launched)

    def advance(self, stage: int, until: int) -> None:
        """Do and wait for what is needed until the first `until` chunks are through a stage."""
        while self._done[stage] < until:
            if not self._step():
                self._memory.wait(*self._missing(next(first for first in (TAKEN, FOLDED, POSTED) if self._queues[first])))

    def _step(self) -> bool:
        """Do one thing that can be done without waiting; whether there was one. Putting comes first: others may wait for it."""
        for stage in (POSTED, FOLDED, TAKEN):
            if self._queues[stage] and self._memory.reached(*self._missing(stage)):
                self._do(stage)
                return True
        return False

    def _missing(self, stage: int) -> tuple[int, int, Sequence[int] | None]:
        """What the next chunk of a stage needs: stage and count that members must have come to, and which members."""
        chunk, transfer = self._done[stage], self._queues[stage][0]
        if stage == POSTED:  # the slot is free
            return TAKEN, chunk - SLOTS + 1, None
        if stage == FOLDED:
            return POSTED, chunk + 1, None if transfer.folds else []
        return (FOLDED, chunk + 1, None) if transfer.folds else (POSTED, chunk + 1, transfer.needs)

    def _do(self, stage: int) -> None:
        transfer = self._queues[stage].popleft()
        slots = self._memory.slots[:, self._done[stage] % SLOTS]
        if stage == POSTED:
            transfer.put(slots)
        elif stage == TAKEN:
            transfer.take(slots)
        elif transfer.folds:
            transfer.fold(slots)
        self._done[stage] += 1
        if stage != FOLDED or transfer.folds:  # nobody waits for what is not folded
            self._memory.publish(stage, self._done[stage])
        if stage != TAKEN:
            self._queues[stage + 1].append(transfer)
