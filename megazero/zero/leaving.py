"""Reduced gradients on their way off the device (--offload-gradients): what is left to sum, and their buffers.

A gradient whose sum is elsewhere is whole in a borrowed buffer until its reduction is over. Then the shard is summed
over the ranks that hold the same one, and partial sums over tp. Copies take what this rank updates. When they are made,
the buffer goes back to the pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.disk.lanes import Need
from megazero.mpu import collectives
from megazero.mpu.collectives import CommunicationHandle
from megazero.mpu.grid import Group
from megazero.zero.across import AcrossSum
from megazero.zero.messages import GradientMessages
from megazero.zero.storage import Bucket, BufferPool, StoredColumn


@dataclass
class _Leaving:
    """A bucket's reduced gradient.

    travelling  [numel] in the dtype of messages, of which this rank's shard is reduced, or all of it
    borrowed    the buffer that it is in, or None
    across      the sum over the ranks that hold the same shard, once it is launched
    own         what this rank updates, in the dtype of the sum, once something needs it
    copies      of parts, on their way
    left        elements of them
    """

    travelling: Tensor
    borrowed: Tensor | None
    across: CommunicationHandle | None = None
    own: Tensor | None = None
    copies: list[Need] = field(default_factory=list)
    left: int = 0


class LeavingGradients:
    """The reduced gradients of a rank that have not left yet, the oldest first. Arguments as of `GradientReducer`.

    Communicates for each reduction of a bucket: an all-reduce of the shard over the ranks that hold the same one, under
    ZeRO-0 an all-gather of what was reduced in shards, and an all-reduce over tp of its tp_partial gradients.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        column: StoredColumn,
        state: StoredColumn,
        messages: GradientMessages,
        across: AcrossSum,
        pool: BufferPool,
        tp: Group,
    ) -> None:
        self.buckets, self.column, self.state, self.messages = buckets, column, state, messages
        self.across, self.pool, self.tp = across, pool, tp
        self._here: dict[int, _Leaving] = {}
        """The last one of each bucket."""
        self._queue: deque[_Leaving] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def take(self, index: int, travelling: Tensor, borrowed: Tensor | None) -> None:
        """A bucket's reduction over the neighbours is over."""
        self._here[index] = _Leaving(travelling, borrowed)
        self._queue.append(self._here[index])

    def launch_across(self, index: int) -> None:
        """Start to sum a shard over the ranks that hold the same one."""
        leaving = self._here[index]
        shard = leaving.travelling[slice(*self.buckets[index].shard)]
        leaving.across = self.messages.all_reduce_across(index, shard)

    def own(self, index: int) -> Tensor:
        """What this rank updates of the reduced gradient, on the device, in the dtype of the sum. Waits for it."""
        leaving = self._here[index]
        if leaving.own is None:
            if leaving.across is not None:
                leaving.across.wait()
            if self.across.gathers(index):
                shard = leaving.travelling[slice(*self.buckets[index].shard)]
                self.messages.all_gather(index, leaving.travelling, shard).wait()
            own = leaving.travelling[slice(*self.state.range_of(index))]
            leaving.own = own.to(self.column.dtype)
            leaving.travelling = leaving.own
        return leaving.own

    def view(self, index: int, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the bucket of what `own` returns."""
        first, _ = self.state.range_of(index)
        return self.own(index)[start - first : stop - first]

    def sum_partials(self, index: int) -> None:
        """Sum the bucket's partial gradients over tp."""
        views = [
            self.view(index, fragment.offset, fragment.offset + fragment.numel)
            for fragment in self.buckets[index].layout.fragments(*self.state.range_of(index))
            if fragment.spec.tp_partial
        ]
        sum_over(views, self.tp)

    def leaves(self, index: int, numel: int, copied: Need) -> None:
        """So many elements of the bucket are being copied. copied: waits for that."""
        self._here[index].copies.append(copied)
        self._here[index].left += numel

    def end_oldest(self, *, whole: bool) -> None:
        """Wait until the oldest one has left, and give its buffer back. whole: all of it has to have left."""
        leaving = self._queue.popleft()
        assert not whole or (leaving.own is not None and leaving.left == leaving.own.numel()), (
            "a gradient is lost that has not left"
        )
        for copied in leaving.copies:
            copied()
        if leaving.borrowed is not None:
            self.pool.give(leaving.borrowed)


def sum_over(views: Sequence[Tensor], tp: Group) -> None:
    """Sum these tensors over tp, in place: one all-reduce of all of them."""
    if tp.size == 1 or not views:
        return
    packed = torch.cat(list(views))
    collectives.all_reduce(packed, tp).wait()
    for view, total in zip(views, packed.split([view.numel() for view in views]), strict=True):
        view.copy_(total)
