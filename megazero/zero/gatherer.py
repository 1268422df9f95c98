"""All-gather of updated parameters after a step, overlapped with the next forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from megazero.mpu import collectives
from megazero.mpu.collectives import CommunicationHandle
from megazero.zero.storage import Bucket, StoredColumn


class ParameterGatherer:
    """Gathers the parameter column bucket by bucket, in forward order.

    column    the parameter column, whole on every rank
    state     an optimizer column: if it is not sharded, every rank updates everything and nothing is communicated
    units     modules in forward order. A hook waits, before a unit's forward, for the buckets with its parameters
    overlap   wait only in these hooks; else `launched_all` waits for all buckets
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        column: StoredColumn,
        state: StoredColumn,
        units: Sequence[nn.Module],
        *,
        overlap: bool,
    ) -> None:
        self.buckets, self.column, self.state, self.overlap = buckets, column, state, overlap
        self._gathers: dict[int, CommunicationHandle] = {}
        bucket_of = {id(parameter): index for index, bucket in enumerate(buckets) for parameter in bucket.parameters}
        for unit in units:
            needed = sorted({bucket_of[id(parameter)] for parameter in unit.parameters() if parameter.requires_grad})
            unit.register_forward_pre_hook(partial(self._before_forward, needed))

    @property
    def communicates(self) -> bool:
        """Whether `launch` gathers buckets. In a group of one rank nothing travels then."""
        return self.state.is_sharded

    def launch(self, index: int) -> None:
        """Start to gather bucket `index` after this rank has updated its shard. Communicates an all-gather over the
        neighbours that share out its state.
        """
        assert index not in self._gathers
        if self.communicates:
            bucket = self.buckets[index]
            self._gathers[index] = collectives.all_gather(
                self.column.held(index), self.column.shard(index), bucket.groups.inner
            )

    def launched_all(self) -> None:
        """Called after every bucket has been launched. Without overlap it waits for all of them."""
        if not self.overlap:
            self.wait()

    def wait(self) -> None:
        """Return once all launched buckets have been gathered."""
        for index in list(self._gathers):
            self._gathers.pop(index).wait()

    def _before_forward(self, needed: Sequence[int], *_: Any) -> None:
        for index in needed:
            if index in self._gathers:
                self._gathers.pop(index).wait()
