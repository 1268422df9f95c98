"""The memory of a model state: a column's tensors for every bucket of this rank, and a pool of spare buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.mpu.grid import StateGroups
from megazero.mpu.parameter import Parameter
from megazero.zero.layout import BucketLayout
from megazero.zero.placement import Placement


@dataclass(frozen=True)
class Bucket:
    """A bucket on this rank.

    parameters  the parameters in the order of the layout's entries
    groups      the ranks that reduce the bucket and shard its state
    """

    layout: BucketLayout
    parameters: tuple[Parameter, ...]
    groups: StateGroups

    @property
    def shard(self) -> tuple[int, int]:
        """The range of the bucket that this rank stores of a sharded column."""
        return self.layout.shard(self.groups.inner.index, self.groups.inner.size)

    @property
    def owned(self) -> tuple[int, int]:
        """The range of the bucket that no other rank owns: it counts in the norm here, and is saved from here."""
        inner, across = self.groups.inner, self.groups.across
        return self.layout.owned((inner.index, inner.size), (across.index, across.size))


class StoredColumn:
    """One column of a model state on this rank: per bucket a 1-D tensor of `dtype`, whole or this rank's shard.

    allocate  `torch.zeros` or `torch.empty`
    whole     numbers of buckets that are stored whole although the column is sharded
    """

    def __init__(
        self,
        placement: Placement,
        dtype: torch.dtype,
        buckets: Sequence[Bucket],
        device: torch.device,
        allocate: Callable[..., Tensor] = torch.zeros,
        whole: Collection[int] = (),
    ) -> None:
        self.placement, self.dtype, self.device, self._whole = placement, dtype, device, frozenset(whole)
        self._buckets = buckets
        self._held = [
            allocate(stop - start, dtype=dtype, device=device)
            for start, stop in map(self.range_of, range(len(buckets)))
        ]

    @property
    def is_sharded(self) -> bool:
        return self.placement is Placement.SHARDED

    def is_sharded_in(self, index: int) -> bool:
        """Whether this rank stores only its shard of bucket `index`, and that is not the whole bucket."""
        return self.is_sharded and index not in self._whole and self._buckets[index].groups.inner.size > 1

    @property
    def nbytes(self) -> int:
        """Bytes of the column's storages."""
        return sum(held.untyped_storage().nbytes() for held in self._held)

    def range_of(self, index: int) -> tuple[int, int]:
        """The range (start, stop) of bucket `index` that this rank stores."""
        bucket = self._buckets[index]
        return bucket.shard if self.is_sharded_in(index) else (0, bucket.layout.numel)

    def held(self, index: int) -> Tensor:
        """All that this rank stores of bucket `index`, [stop - start]."""
        return self._held[index]

    def view(self, index: int, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of bucket `index`, which this rank must store."""
        first, last = self.range_of(index)
        assert first <= start <= stop <= last, f"[{start}, {stop}) of bucket {index} is not held, [{first}, {last}) is"
        return self._held[index][start - first : stop - first]

    def shard(self, index: int) -> Tensor:
        """This rank's shard of bucket `index`."""
        return self.view(index, *self._buckets[index].shard)

    def owned(self, index: int) -> Tensor:
        """The elements of bucket `index` that this rank owns."""
        return self.view(index, *self._buckets[index].owned)


class BufferPool:
    """Spare flat buffers for whole gradients that live for part of a step, so that they are not allocated each time.

    A buffer's content is undefined.
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
        """Return a buffer of `take` to the pool."""
        self.free.append(buffer)
