"""Parameters from their owners to all ranks after a step, under way while the next forward already runs."""

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
    state     an optimizer column: where it is not sharded, every rank updates everything and nothing travels
    units     modules in forward order; before each runs, the buckets with its parameters are waited for
    overlap   whether that is left to the units' forward; else `launched_all` waits
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

    def launch(self, index: int) -> None:
        """Start gathering bucket `index`, whose owned range has been updated.

        One all-gather over the bucket's group.
        """
        assert index not in self._gathers
        if self.state.is_sharded:
            bucket = self.buckets[index]
            self._gathers[index] = collectives.all_gather(
                self.column.held(index), self.column.shard(index), bucket.group
            )

    def launched_all(self) -> None:
        """Every bucket has been launched."""
        if not self.overlap:
            self.wait()

    def wait(self) -> None:
        """Until all parameters are those of the last step."""
        for index in list(self._gathers):
            self._gathers.pop(index).wait()

    def _before_forward(self, needed: Sequence[int], *_: Any) -> None:
        for index in needed:
            if index in self._gathers:
                self._gathers.pop(index).wait()
