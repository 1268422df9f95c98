"""What the table of model state is made of: a column's memory for every bucket of this rank, and spare buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.mpu.grid import Group
from megazero.mpu.parameter import Parameter
from megazero.zero.layout import BucketLayout
from megazero.zero.placement import Placement


@dataclass(frozen=True)
class Bucket:
    """A bucket on this rank.

    parameters  in the order of the layout's entries
    uses        of each parameter: units of the bucket's model chunk that use it, each of which adds to its gradient
    group       the ranks that share it
    """

    layout: BucketLayout
    parameters: tuple[Parameter, ...]
    uses: tuple[int, ...]
    group: Group

    @property
    def shard(self) -> tuple[int, int]:
        """The range of the bucket that this rank owns."""
        return self.layout.shard(self.group.index, self.group.size)


class StoredColumn:
    """One column of the table on this rank. It owns its memory: one 1-D tensor per bucket, whole or this rank's shard.

    allocate: `torch.zeros` or `torch.empty`.
    """

    def __init__(
        self,
        placement: Placement,
        dtype: torch.dtype,
        buckets: Sequence[Bucket],
        device: torch.device,
        allocate: Callable[..., Tensor] = torch.zeros,
    ) -> None:
        self.placement, self.dtype, self.device = placement, dtype, device
        self._buckets = buckets
        self._held = [
            allocate(stop - start, dtype=dtype, device=device)
            for start, stop in map(self.range_of, range(len(buckets)))
        ]

    @property
    def is_sharded(self) -> bool:
        return self.placement is Placement.SHARDED

    @property
    def nbytes(self) -> int:
        """Bytes of the memory behind the column, as its storages report them."""
        return sum(held.untyped_storage().nbytes() for held in self._held)

    def range_of(self, index: int) -> tuple[int, int]:
        """The range of bucket `index` that is held here."""
        bucket = self._buckets[index]
        return bucket.shard if self.is_sharded else (0, bucket.layout.numel)

    def held(self, index: int) -> Tensor:
        """All that is held of bucket `index`."""
        return self._held[index]

    def view(self, index: int, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of bucket `index`, which must be held."""
        first, last = self.range_of(index)
        assert first <= start <= stop <= last, f"[{start}, {stop}) of bucket {index} is not held, [{first}, {last}) is"
        return self._held[index][start - first : stop - first]

    def shard(self, index: int) -> Tensor:
        """The range that this rank owns."""
        return self.view(index, *self._buckets[index].shard)


class BufferPool:
    """Spare flat buffers, so that whole gradients which live for part of a step do not go through the allocator each
    time.

    A buffer's content is whatever was in it before.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.free: list[Tensor] = []
        self.nbytes = 0

    def take(self, numel: int) -> Tensor:
        """A buffer of at least `numel` elements: the smallest spare one that is large enough, else a new one."""
        fitting = [i for i, buffer in enumerate(self.free) if buffer.numel() >= numel]
        if fitting:
            return self.free.pop(min(fitting, key=lambda i: self.free[i].numel()))
        buffer = torch.empty(numel, dtype=self.dtype, device=self.device)
        self.nbytes += buffer.nbytes
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Return what `take` gave."""
        self.free.append(buffer)
