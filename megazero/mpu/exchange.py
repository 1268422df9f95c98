"""Collectives among ranks of one host, through memory that they share.

A tensor is exchanged in chunks. For chunk c every rank copies its part into slot c modulo SLOTS of its own area and
publishes this in a counter. The ranks that need the part read it there and publish that they have. All ranks launch the
same collectives in the same order, so they give a chunk the same number and synchronise by the counters alone.

A launch returns once all parts of this rank are in its slots. It blocks only while no slot is free, that is, until the
other ranks have read older chunks. A rank that has launched a collective therefore does not hold up the `wait` of
another rank, as with any backend. The first and the last pipeline stage rely on this: they share the tied
embedding and wait for its collectives at different points of their schedules.

There is one exception. A large all-reduce over three ranks or more is folded: each rank sums one part, and it does so
when it waits or launches again. Ranks must wait for a folded sum, and for later collectives, at the same point.

Sums are made in the order of the group, in fp32 for 16-bit dtypes, and rounded once: all ranks get the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from fused_ops.native.library import Library
from megazero.mpu.shared_memory import FOLDED, POSTED, SLOT, SLOTS, TAKEN, SharedMemory
from megazero.mpu.transfers import SUFFIXES, AllGather, AllReduce, AllToAll, Broadcast, Members, ReduceScatter, Transfer


class SharedMemoryWork:
    """A collective through shared memory that has been launched; it replaces a backend's `torch.distributed.Work`."""

    def __init__(self, exchange: Exchange, until: int) -> None:
        self._exchange, self._until = exchange, until

    def wait(self) -> None:
        """Return once the result is there. Raises PeerError when another rank has ended or the timeout has passed."""
        self._exchange.advance(TAKEN, self._until)


class Exchange:
    """The collectives of one group, for contiguous CPU tensors.

    Before `wait` returns, inputs must not be written to and results must not be read.
    """

    def __init__(self, memory: SharedMemory, library: Library) -> None:
        self._memory, self._members = memory, Members(memory.index, memory.size, library)
        self._queues: tuple[deque[Transfer], ...] = (deque(), deque(), deque())
        """The chunks that are to be posted, folded and taken (one queue each), in order of launching."""
        self._done = [0, 0, 0]
        self._launched = 0

    def takes(self, tensor: Tensor) -> bool:
        """Whether tensors of this device and dtype can be exchanged. The answer is the same on all ranks.

        Those of uint8 are copied only: nobody sums them.
        """
        return not tensor.is_cuda and (tensor.dtype in SUFFIXES or tensor.dtype == torch.uint8)

    def all_reduce(self, tensor: Tensor, op: str) -> SharedMemoryWork:
        """See `collectives.all_reduce`."""
        pieces = tensor.detach().view(-1).split(SLOT // tensor.itemsize)
        return self._launch([AllReduce(piece, op, self._members) for piece in pieces])

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> SharedMemoryWork:
        """See `collectives.reduce_scatter`."""
        columns = whole.detach().view(self._memory.size, -1).split(self._width(whole), dim=1)
        outputs = output.detach().view(-1).split(self._width(whole))
        return self._launch([ReduceScatter(*pair, self._members) for pair in zip(outputs, columns, strict=True)])

    def all_gather(self, output: Tensor, piece: Tensor) -> SharedMemoryWork:
        """See `collectives.all_gather`."""
        width = SLOT // piece.itemsize
        columns = output.detach().view(self._memory.size, -1).split(width, dim=1)
        pieces = piece.detach().view(-1).split(width)
        return self._launch([AllGather(*pair, self._memory.index) for pair in zip(columns, pieces, strict=True)])

    def all_to_all(self, output: Tensor, source: Tensor) -> SharedMemoryWork:
        """See `collectives.all_to_all`."""
        parts, width = (self._memory.size, -1), self._width(source)
        pairs = zip(
            output.detach().view(parts).split(width, 1), source.detach().view(parts).split(width, 1), strict=True
        )
        return self._launch([AllToAll(received, sent, self._memory.index) for received, sent in pairs])

    def broadcast(self, tensor: Tensor, source_index: int) -> SharedMemoryWork:
        """See `collectives.broadcast`."""
        pieces = tensor.detach().view(-1).split(SLOT // tensor.itemsize)
        return self._launch([Broadcast(piece, source_index, self._memory.index) for piece in pieces])

    def barrier(self) -> None:
        """See `collectives.barrier`."""
        self._launch([Transfer()]).wait()

    def _width(self, whole: Tensor) -> int:
        """Columns of a chunk with one row per member: as many as fit into a slot."""
        return max(1, SLOT // whole.itemsize // self._memory.size)

    def _launch(self, transfers: Sequence[Transfer]) -> SharedMemoryWork:
        self._queues[POSTED].extend(transfers)
        self._launched += len(transfers)
        self.advance(POSTED, self._launched)
        while self._step():
            pass
        return SharedMemoryWork(self, self._launched)

    def advance(self, stage: int, until: int) -> None:
        """Work and wait until the first `until` chunks have passed a stage (POSTED, FOLDED or TAKEN)."""
        while self._done[stage] < until:
            if not self._step():
                self._memory.wait(*self._missing(self._farthest()))

    def _farthest(self) -> int:
        """The last stage whose queue has a chunk. A chunk that was launched and not yet taken is in some queue."""
        return max(stage for stage in (POSTED, FOLDED, TAKEN) if self._queues[stage])

    def _step(self) -> bool:
        """Move one chunk through one stage if that needs no waiting; return whether there was such a chunk.

        POSTED comes first, because other ranks may be waiting for it.
        """
        for stage in (POSTED, FOLDED, TAKEN):
            if self._queues[stage] and self._memory.reached(*self._missing(stage)):
                self._do(stage)
                return True
        return False

    def _missing(self, stage: int) -> tuple[int, int, Sequence[int] | None]:
        """What the next chunk of a stage has to wait for: (stage, count to be reached in it, members; None: all)."""
        chunk, transfer = self._done[stage], self._queues[stage][0]
        if stage == POSTED:  # the slot is free
            return TAKEN, chunk - SLOTS + 1, None
        if stage == FOLDED:
            return POSTED, chunk + 1, None if transfer.folds else []
        return (FOLDED, chunk + 1, None) if transfer.folds else (POSTED, chunk + 1, transfer.needs)

    def _do(self, stage: int) -> None:
        """Move the next chunk through a stage. If that fails, this rank leaves: the others must not wait for it."""
        transfer, slot = self._queues[stage][0], self._done[stage] % SLOTS
        try:
            self._work(stage, transfer, slot)
        except BaseException:
            self._memory.leave()
            raise
        self._queues[stage].popleft()
        self._done[stage] += 1
        if stage != FOLDED or transfer.folds:  # no rank waits for the FOLDED counter of a chunk that is not folded
            self._memory.publish(stage, self._done[stage])
        if stage != TAKEN:
            self._queues[stage + 1].append(transfer)

    def _work(self, stage: int, transfer: Transfer, slot: int) -> None:
        slots = self._memory.slots[:, slot]
        if stage == POSTED:
            self._memory.label(slot, transfer.bytes)
            transfer.put(slots)
        elif stage == TAKEN:
            self._memory.check_labels(slot, transfer.bytes, transfer.needs)
            transfer.take(slots)
        elif transfer.folds:
            self._memory.check_labels(slot, transfer.bytes, transfer.needs)
            transfer.fold(slots)
