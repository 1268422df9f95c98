"""Whole parameters: where they are, and the all-gathers that bring them there.

There are two kinds of buckets. A kept bucket is whole on every rank; after a step in which the ranks have updated
different shards it is gathered once (ZeRO-1, 2). The parameters of a sharded bucket (ZeRO-3) are gathered for each use
and freed afterwards: their tensors stay, and only the memory behind them comes and goes, so a view that autograd has
saved reads the right values in backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.mpu import collectives
from megazero.mpu.collectives import CommunicationHandle
from megazero.mpu.quantized import all_gather_quantized
from megazero.zero.storage import Bucket, StoredColumn


@dataclass(frozen=True)
class WholeParameters:
    """The whole parameters of one bucket.

    column    the parameter column, in which the bucket has the number `index`
    whole     [numel], of which the parameters are views; without memory while a sharded bucket is not gathered
    sharded   whether the column holds a shard only
    """

    bucket: Bucket
    column: StoredColumn
    index: int
    whole: Tensor
    sharded: bool

    @classmethod
    def adopt(cls, column: StoredColumn, index: int, bucket: Bucket) -> WholeParameters:
        """Make the bucket's parameters views of one flat tensor. Their values are undefined."""
        sharded, numel = column.is_sharded_in(index), bucket.layout.numel
        whole = torch.empty(numel, dtype=column.dtype, device=column.device) if sharded else column.held(index)
        for entry, parameter in zip(bucket.layout.entries, bucket.parameters, strict=True):
            assert parameter.dtype == column.dtype, f"{entry.spec.name} is {parameter.dtype}, not {column.dtype}"
            parameter.data = whole[entry.offset : entry.stop].view(entry.spec.local_shape)
        found = cls(bucket, column, index, whole, sharded)
        if sharded:
            found.free()
        return found

    @property
    def nbytes(self) -> int:
        return self.bucket.layout.numel * self.whole.element_size()

    def allocate(self) -> None:
        """Give a sharded bucket's tensor memory. Its content is undefined."""
        storage = self.whole.untyped_storage()
        assert storage.nbytes() == 0, f"parameters of bucket {self.index} are gathered already"
        storage.resize_(self.nbytes)

    def free(self) -> None:
        """Free the memory of a sharded bucket's tensor. Raises RuntimeError if something outside torch has a view."""
        storage = self.whole.untyped_storage()
        if not storage.resizable():
            names = [entry.spec.name for entry in self.bucket.layout.entries]
            several = f"one of the {len(names)} parameters from {names[0]} to {names[-1]}"
            raise RuntimeError(
                f"the memory of {several if len(names) > 1 else names[0]} cannot be freed: something outside torch, "
                "such as an array of .numpy(), was made from it while it was whole (ZeRO-3); make it from a copy: "
                "parameter.detach().clone().numpy()"
            )
        storage.resize_(0)

    def keep_shard(self) -> None:
        """Copy this rank's range of the whole values into the column."""
        if self.sharded:
            self.column.held(self.index).copy_(self.whole[slice(*self.bucket.shard)])

    @contextmanager
    def filling(self) -> Iterator[None]:
        """A context in which all values of the bucket are written; then only what this rank stores is kept.

        Padding becomes zero: a block of int8 at its edge reads it.
        """
        if self.sharded:
            self.allocate()
            for start, stop in self.bucket.layout.gaps():
                self.whole[start:stop].zero_()
        yield
        self.keep_shard()
        if self.sharded:
            self.free()


class ParameterGatherer:
    """Gathers whole parameters and frees them.

    parameters  by number of the bucket, the trained buckets first
    masters     None, or gathers are in blocks of int8 (ZeRO++). Then: the column of exact weights from which a kept
                bucket is quantised, since its own shard is overwritten with what all ranks get. A sharded bucket is
                quantised from its shard, and one that is kept whole beside such (--zero3-persist-below) is gathered
                exactly
    overlap     a gather goes on until the parameters are read; else its launch waits for it
    """

    def __init__(
        self, parameters: Sequence[WholeParameters], *, masters: StoredColumn | None = None, overlap: bool
    ) -> None:
        self.parameters, self.masters, self.overlap = parameters, masters, overlap
        self._gathers: dict[int, CommunicationHandle] = {}

    def gather(self, index: int) -> None:
        """Start to gather bucket `index`. Communicates an all-gather over the ranks that share out its state."""
        assert index not in self._gathers, f"bucket {index} is being gathered"
        at = self.parameters[index]
        if at.sharded:
            at.allocate()
        group = at.bucket.groups.inner
        if self.masters is None or (at.column.is_sharded and not at.sharded):
            handle = collectives.all_gather(at.whole, at.column.shard(at.index), group)
        else:
            exact = at.column if at.sharded else self.masters
            handle = all_gather_quantized(at.whole, exact.shard(at.index), group)
        self._gathers[index] = handle
        if not self.overlap:
            self.ready([index])

    def release(self, index: int) -> None:
        """Free the whole parameters of a sharded bucket."""
        self.ready([index])
        self.parameters[index].free()

    def ready(self, indices: Sequence[int]) -> None:
        """Return once these buckets have been gathered, if they are being."""
        for index in indices:
            if index in self._gathers:
                self._gathers.pop(index).wait()

    def wait(self) -> None:
        """Return once all launched buckets have been gathered."""
        self.ready(list(self._gathers))

    @contextmanager
    def reading(self, indices: Sequence[int]) -> Iterator[None]:
        """A context in which these buckets are whole. A collective of the ranks that share out their state.

        Sharded ones are gathered at its begin and freed at its end.
        """
        sharded = [index for index in indices if self.parameters[index].sharded]
        for index in sharded:
            self.gather(index)
        self.ready(indices)
        try:
            yield
        finally:
            for index in sharded:
                self.release(index)
