"""The second half of a reduction where state has hybrid shards: the sum over the ranks that store the same shard.

A bucket's gradient is first reduced over the K neighbours that share out its state, which leaves each with a shard of
the neighbours' sum. The shard is then summed over one rank of each set of neighbours. (Hybrid shards: PyTorch FSDP,
arXiv:2304.11277; MiCS, arXiv:2205.00119.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.mpu.collectives import CommunicationHandle
from megazero.zero.messages import GradientMessages
from megazero.zero.storage import Bucket, StoredColumn


class AcrossSum:
    """Sums the shards of the gradient column, each once per step.

    column  the gradient column, with the neighbours' sums in this rank's shards
    state   an optimizer column. If it is not sharded (ZeRO-0), the neighbours gather the summed shards, because each
            updates the whole bucket
    dtype   dtype in which gradients are communicated, or from which they are quantised

    Communicates per bucket: an all-reduce of the shard, and under ZeRO-0 an all-gather of the bucket over the
    neighbours. Where all ranks that hold the bucket are neighbours: nothing, or the gather alone if gradients are
    quantised, because codes cannot be summed on their way.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        column: StoredColumn,
        state: StoredColumn,
        dtype: torch.dtype,
        messages: GradientMessages,
    ) -> None:
        self.buckets, self.column, self.state, self.dtype, self.messages = buckets, column, state, dtype, messages
        self.launched: set[int] = set()
        """The buckets whose sum has been launched in this step."""
        self._travelling: list[tuple[int, CommunicationHandle, Tensor]] = []

    def gathers(self, index: int) -> bool:
        """Whether neighbours who update the whole bucket (ZeRO-0) reduce a shard each, and then gather them."""
        groups = self.buckets[index].groups
        quantised = self.messages.bits is not None and groups.inner.handle is not None
        return not self.state.is_sharded and (groups.across.handle is not None or quantised)

    def launch(self, index: int) -> None:
        """Start to sum the shard of bucket `index`, which the neighbours have reduced."""
        assert index not in self.launched, "a shard is summed once per step"
        self.launched.add(index)
        if self.buckets[index].groups.across.handle is not None or self.gathers(index):
            travelling = self.column.shard(index).to(self.dtype)
            self._travelling.append((index, self.messages.all_reduce_across(index, travelling), travelling))

    def complete(self) -> None:
        """Return once all launched sums are in the column, whole buckets under ZeRO-0."""
        gathers = []
        for index, handle, travelling in self._travelling:
            handle.wait()
            if self.state.is_sharded:
                _put(self.column.shard(index), travelling)
                continue
            whole = self.column.held(index)
            if self.dtype != whole.dtype:
                whole = torch.empty_like(whole, dtype=self.dtype)
            gathers.append((index, self.messages.all_gather(index, whole, travelling), whole))
        self._travelling.clear()
        for index, handle, whole in gathers:
            handle.wait()
            _put(self.column.held(index), whole)

    def reset(self) -> None:
        """Begin the next step."""
        assert not self._travelling, "a sum is still under way"
        self.launched.clear()


def _put(target: Tensor, result: Tensor) -> None:
    if result.data_ptr() != target.data_ptr():
        target.copy_(result)
