"""The memory of a model state: a column's tensors for every bucket of this rank, and a pool of spare buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.config.tiers import Tier
from megazero.mpu.grid import StateGroups
from megazero.mpu.parameter import Parameter
from megazero.program.instruction import Piece
from megazero.zero.layout import BucketLayout
from megazero.zero.memories import DeviceMemory, Tiers
from megazero.zero.parts import Part, Range, Resting, piece_name
from megazero.zero.sharding import Column, Sharding


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

    def counted_runs(self, tp: int, *, counted: bool) -> list[Range]:
        """The ranges [start, stop) of its own gradients that count in the norm here (or do not). Adjacent ones are
        merged.

        The owner of a range counts it, and of parameters that are replicated over tp its index 0 does. tp: this rank's.
        """
        runs: list[Range] = []
        for fragment in self.layout.fragments(*self.owned):
            if counted == (fragment.spec.tp_sharded or tp == 0):
                stop = fragment.offset + fragment.numel
                if runs and runs[-1][1] == fragment.offset:
                    runs[-1] = runs[-1][0], stop
                else:
                    runs.append((fragment.offset, stop))
        return runs


def update_range(bucket: Bucket, row: Mapping[Column, Sharding]) -> Range:
    """The range of a bucket that this rank updates."""
    return bucket.shard if row[Column.EXP_AVG] is Sharding.SHARDED else (0, bucket.layout.numel)


def stored_range(bucket: Bucket, sharding: Sharding, *, whole: bool = False) -> Range:
    """The range (start, stop) of a bucket that this rank stores. whole: all of it although others are sharded."""
    sharded = sharding is Sharding.SHARDED and not whole and bucket.groups.inner.size > 1
    return bucket.shard if sharded else (0, bucket.layout.numel)


class StoredColumn:
    """One column of a model state on this rank: per bucket a 1-D tensor, whole or this rank's shard.

    dtype     of its values, but for parameters whose bucket has another one (`dtype_in`)
    tiers     the memories in which it rests
    name      of the column in the account of the device
    flag      what needs host memory, for errors
    make      `torch.zeros` or `torch.empty`
    parts     for each bucket the parts in which it rests in several places (`zero.parts`); none: it is on the device.
              A part on a disk has no tensor here
    whole     numbers of buckets that are stored whole although the column is sharded
    first     of parameters that rest on disks: the number of the column's first bucket among all of the rank
    """

    def __init__(
        self,
        sharding: Sharding,
        dtype: torch.dtype,
        buckets: Sequence[Bucket],
        tiers: Tiers,
        name: str,
        flag: str = "--offload-optimizer",
        make: Callable[..., Tensor] = torch.zeros,
        parts: Sequence[Sequence[Part]] = (),
        whole: Collection[int] = (),
        first: int = 0,
    ) -> None:
        self.sharding, self.dtype, self.name, self._whole = sharding, dtype, name, frozenset(whole)
        self._buckets, self._tiers, self._flag, self._make, self._first = buckets, tiers, flag, make, first
        self._parts = [
            tuple(parts[index]) if parts and parts[index] else (Part(*self.range_of(index), Tier.DEVICE),)
            for index in range(len(buckets))
        ]
        self._held = [[self._allocated(part, index) for part in own] for index, own in enumerate(self._parts)]

    def dtype_in(self, index: int) -> torch.dtype:
        """That of bucket `index`."""
        return self.dtype

    @property
    def memory(self) -> DeviceMemory:
        """The device's memory."""
        return self._tiers.device

    @property
    def device(self) -> torch.device:
        return self.memory.device

    @property
    def is_sharded(self) -> bool:
        return self.sharding is Sharding.SHARDED

    def is_sharded_in(self, index: int) -> bool:
        """Whether this rank stores only its shard of bucket `index`, and that is not the whole bucket."""
        return self.is_sharded and index not in self._whole and self._buckets[index].groups.inner.size > 1

    def is_on_device(self, index: int) -> bool:
        """Whether all that this rank stores of bucket `index` is on the device."""
        return all(part.tier is Tier.DEVICE for part in self._parts[index])

    @property
    def nbytes(self) -> int:
        """Bytes of the column's storages, on the device and in host memory."""
        return self.nbytes_in(Tier.DEVICE) + self.nbytes_in(Tier.HOST)

    def nbytes_in(self, tier: Tier) -> int:
        """Bytes of the column's storages in a tier that is memory."""
        places = (
            (part, held) for own in zip(self._parts, self._held, strict=True) for part, held in zip(*own, strict=True)
        )
        return sum(held.untyped_storage().nbytes() for part, held in places if held is not None and part.tier is tier)

    def range_of(self, index: int) -> Range:
        """The range (start, stop) of bucket `index` that this rank stores."""
        return stored_range(self._buckets[index], self.sharding, whole=index in self._whole)

    def held(self, index: int) -> Tensor:
        """All that this rank stores of bucket `index`, [stop - start]. It must rest in one place."""
        (held,) = self._held[index]
        assert held is not None, f"bucket {index} rests in files"
        return held

    def keep(self, index: int, values: Tensor, start: int | None = None) -> None:
        """Store elements of bucket `index` from `start` on wherever they rest, rounded to its dtype there; None: all
        that this rank stores. values: [n]. What rests in files is stored in whole parts.
        """
        start = self.range_of(index)[0] if start is None else start
        stop = start + values.numel()
        for number, (part, held) in enumerate(zip(self._parts[index], self._held[index], strict=True)):
            first, last = max(start, part.start), min(stop, part.stop)
            if first >= last:
                continue
            part_values = values[first - start : last - start]
            if held is not None:
                held[first - part.start : last - part.start].copy_(part_values)
            else:
                assert (first, last) == part[:2], f"bucket {index} rests in files"
                piece = piece_name(Piece.PARAMETERS, (self._first + index, number))
                # has a name here, so that this thread frees the copy
                written = part_values.to(self.dtype_in(index)).cpu().contiguous()
                self._tiers.stores[part.tier].write({piece: written}).wait()

    def _allocated(self, part: Part, index: int) -> Tensor | None:
        numel, dtype = part.stop - part.start, self.dtype_in(index)
        if part.tier.in_files:
            return None
        if part.tier is Tier.HOST:
            return self._tiers.in_host_memory(numel, dtype, self._flag)
        return self.memory.allocate(numel, dtype, self.name, f"a part of the {self.name} column", self._make)

    def view(self, index: int, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of bucket `index`, which this rank must store, in memory and in one part."""
        for part, held in zip(self._parts[index], self._held[index], strict=True):
            if part.start <= start <= stop <= part.stop and held is not None:
                return held[start - part.start : stop - part.start]
        places = ", ".join(f"[{part.start}, {part.stop}) {part.tier.name.lower()}" for part in self._parts[index])
        raise AssertionError(f"[{start}, {stop}) of bucket {index} is not held, but {places}")

    def shard(self, index: int) -> Tensor:
        """This rank's shard of bucket `index`."""
        return self.view(index, *self._buckets[index].shard)

    def owned(self, index: int) -> Tensor:
        """The elements of bucket `index` that this rank owns."""
        return self.view(index, *self._buckets[index].owned)


class ParameterColumn(StoredColumn):
    """That of parameters, which have the dtypes of their buckets."""

    def dtype_in(self, index: int) -> torch.dtype:
        return self._buckets[index].layout.dtype or self.dtype


def parameter_column(
    sharding: Sharding,
    dtype: torch.dtype,
    buckets: Sequence[Bucket],
    tiers: Tiers,
    name: str,
    resting: Sequence[Resting],
    first: int = 0,
) -> ParameterColumn:
    """A column of parameters, zeros in memory, each bucket where it rests. Arguments as of `StoredColumn`.

    Buckets that are kept whole are so where the others are sharded.
    """
    whole = [number for number, bucket in enumerate(buckets) if bucket.layout.kept_whole]
    parts: list[tuple[Part, ...]] = []
    for number, (bucket, own) in enumerate(zip(buckets, resting, strict=True)):
        stored = stored_range(bucket, sharding, whole=number in whole)
        ranges = [part[:2] for part in own.parts] if own.rests.in_files else [stored]
        parts.append(tuple(Part(start, stop, own.rests) for start, stop in ranges))
    return ParameterColumn(
        sharding, dtype, buckets, tiers, name, "--offload-params", parts=parts, whole=whole, first=first
    )


class BufferPool:
    """Spare flat buffers for whole gradients that live for part of a step, so that they are not allocated each time.

    A buffer's content is undefined.
    """

    def __init__(self, dtype: torch.dtype, memory: DeviceMemory) -> None:
        self.dtype, self.memory = dtype, memory
        self.free: list[Tensor] = []
        self.nbytes = 0

    def take(self, numel: int) -> Tensor:
        """A buffer of at least `numel` elements: the smallest spare one that is large enough, else a new one."""
        fitting = [i for i, buffer in enumerate(self.free) if buffer.numel() >= numel]
        if fitting:
            return self.free.pop(min(fitting, key=lambda i: self.free[i].numel()))
        what = "a buffer for the whole gradient of a bucket"
        buffer = self.memory.allocate(numel, self.dtype, "whole gradients", what)
        self.nbytes += buffer.nbytes
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Return a buffer of `take` to the pool."""
        self.free.append(buffer)
