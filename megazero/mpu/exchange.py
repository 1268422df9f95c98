"""Collectives among ranks of one host, through memory that they share.

A tensor travels in chunks. Every rank puts its part of chunk c into slot c modulo SLOTS of its own area and says so;
who needs it reads it there, and says when it has. All ranks launch the same collectives in the same order, so that they
number the chunks alike and nothing but the counters has to be agreed on.

A launch returns when everything is put: at once where there are slots for it, else when the others have taken what was
in them. A `wait` therefore depends on no later deed of a rank that has launched, as with any other backend. The ends of
a pipeline, which share the tied embedding, wait for it at different places, the one for the sake of the other. Only of
a large sum over three ranks or more each rank makes a share when it waits itself or comes by again: such a sum, and
what is launched after it, has to be waited for where all ranks do.

Sums are made in the order of the members, in fp32 where the dtype has 16 bits, rounded once: the same bits on every
rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from fused_ops.native.library import Library
from megazero.mpu.shared_memory import FOLDED, POSTED, SLOT, SLOTS, TAKEN, SharedMemory
from megazero.mpu.transfers import SUFFIXES, AllGather, AllReduce, Broadcast, Members, ReduceScatter, Transfer


class SharedMemoryWork:
    """A collective through shared memory that has been launched: what `torch.distributed.Work` is of a backend."""

    def __init__(self, exchange: Exchange, until: int) -> None:
        self._exchange, self._until = exchange, until

    def wait(self) -> None:
        """Until the result is there. Raises PeerError when another rank is gone."""
        self._exchange.advance(TAKEN, self._until)


class Exchange:
    """The collectives of one group. Tensors are contiguous, on the CPU; they may not be written to (a result: read)
    before `wait`.
    """

    def __init__(self, memory: SharedMemory, library: Library) -> None:
        self._memory, self._members = memory, Members(memory.index, memory.size, library)
        self._queues: tuple[deque[Transfer], ...] = (deque(), deque(), deque())
        """What is to be put, folded, taken: each in the order of launching."""
        self._done = [0, 0, 0]
        self._launched = 0

    def takes(self, tensor: Tensor) -> bool:
        """Whether tensors like this one can be exchanged; alike on all ranks."""
        return not tensor.is_cuda and tensor.dtype in SUFFIXES

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

    def broadcast(self, tensor: Tensor, source_index: int) -> SharedMemoryWork:
        """See `collectives.broadcast`."""
        pieces = tensor.detach().view(-1).split(SLOT // tensor.itemsize)
        return self._launch([Broadcast(piece, source_index, self._memory.index) for piece in pieces])

    def barrier(self) -> None:
        """See `collectives.barrier`."""
        self._launch([Transfer()]).wait()

    def _width(self, whole: Tensor) -> int:
        """Columns of a chunk that has one row per member."""
        return max(1, SLOT // whole.itemsize // self._memory.size)

    def _launch(self, transfers: Sequence[Transfer]) -> SharedMemoryWork:
        self._queues[POSTED].extend(transfers)
        self._launched += len(transfers)
        self.advance(POSTED, self._launched)
        while self._step():
            pass
        return SharedMemoryWork(self, self._launched)

    def advance(self, stage: int, until: int) -> None:
        """Do and wait for what is needed until the first `until` chunks are through a stage."""
        while self._done[stage] < until:
            if not self._step():
                self._memory.wait(*self._missing(self._farthest()))

    def _farthest(self) -> int:
        """The last stage in which a chunk is due.

        There is one: what has been launched and not taken is in some queue.
        """
        return max(stage for stage in (POSTED, FOLDED, TAKEN) if self._queues[stage])

    def _step(self) -> bool:
        """Do one thing that can be done without waiting; whether there was one.

        Putting comes first: others may wait for it.
        """
        for stage in (POSTED, FOLDED, TAKEN):
            if self._queues[stage] and self._memory.reached(*self._missing(stage)):
                self._do(stage)
                return True
        return False

    def _missing(self, stage: int) -> tuple[int, int, Sequence[int] | None]:
        """What the next chunk of a stage needs: the stage and count that members must have come to, and which (None:
        all).
        """
        chunk, transfer = self._done[stage], self._queues[stage][0]
        if stage == POSTED:  # the slot is free
            return TAKEN, chunk - SLOTS + 1, None
        if stage == FOLDED:
            return POSTED, chunk + 1, None if transfer.folds else []
        return (FOLDED, chunk + 1, None) if transfer.folds else (POSTED, chunk + 1, transfer.needs)

    def _do(self, stage: int) -> None:
        """The next chunk's part of a stage. Should it fail, the others must not wait for this rank."""
        transfer, slot = self._queues[stage][0], self._done[stage] % SLOTS
        try:
            self._work(stage, transfer, slot)
        except BaseException:
            self._memory.leave()
            raise
        self._queues[stage].popleft()
        self._done[stage] += 1
        if stage != FOLDED or transfer.folds:  # nobody waits for what is not folded
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
