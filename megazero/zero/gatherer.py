"""Whole parameters: where they are, and the all-gathers that bring them there.

There are two kinds of buckets. A kept bucket is whole on every rank; after a step in which the ranks have updated
different shards it is gathered once (ZeRO-1, 2). The parameters of a gathered bucket are there for each use only, and
freed afterwards: their tensors stay, and only the memory behind them comes and goes, so a view that autograd has saved
reads the right values in backward. Such are sharded buckets (ZeRO-3), those that do not rest on the device, which are
loaded first (`zero.mover`), and frozen matrices that are stored as codes (`zero.coded`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.disk.lanes import Need
from megazero.mpu import collectives
from megazero.mpu.collectives import CommunicationHandle
from megazero.mpu.parameter import ParameterSpec, own_box, spec_of
from megazero.mpu.quantized import all_gather_quantized
from megazero.zero.storage import Bucket, StoredColumn

GATHERED = "gathered parameters"
"""The name of what is whole for a use only, in the device's account."""


@dataclass(frozen=True)
class WholeParameters:
    """The whole parameters of one bucket.

    column    the parameter column, in which the bucket has the number `index`
    whole     [numel], of which the parameters are views; without memory from a release to the next gather
    gathered  whether they are whole between a gather and a release only: the column holds a shard (or codes)
    """

    bucket: Bucket
    column: StoredColumn
    index: int
    whole: Tensor
    gathered: bool

    @classmethod
    def adopt(cls, column: StoredColumn, index: int, bucket: Bucket) -> WholeParameters:
        """Make the bucket's parameters views of one flat tensor. Their values are undefined."""
        gathered, numel = column.is_sharded_in(index) or not column.is_on_device(index), bucket.layout.numel
        dtype = column.dtype_in(index)
        if gathered:
            column.memory.take(GATHERED, numel * dtype.itemsize, f"the parameters of bucket {index}")
        whole = torch.empty(numel, dtype=dtype, device=column.device) if gathered else column.held(index)
        make_views(bucket, whole)
        found = cls(bucket, column, index, whole, gathered)
        if gathered:
            found.free()
        return found

    @property
    def nbytes(self) -> int:
        return self.bucket.layout.numel * self.whole.element_size()

    def allocate(self) -> None:
        """Give a gathered bucket's tensor memory. Its content is undefined."""
        storage = self.whole.untyped_storage()
        assert storage.nbytes() == 0, f"parameters of bucket {self.index} are gathered already"
        self.column.memory.take(GATHERED, self.nbytes, f"the whole parameters of bucket {self.index}, gathered,")
        storage.resize_(self.nbytes)
        self._set_away(False)

    def free(self) -> None:
        """Free the memory of a gathered bucket's tensor. Raises RuntimeError if something outside torch has a view."""
        storage = self.whole.untyped_storage()
        if not storage.resizable():
            names = [entry.spec.name for entry in self.bucket.layout.entries]
            several = f"one of the {len(names)} parameters from {names[0]} to {names[-1]}"
            raise RuntimeError(
                f"the memory of {several if len(names) > 1 else names[0]} cannot be freed: something outside torch, "
                "such as an array of .numpy(), was made from it while it was whole (ZeRO-3); make it from a copy: "
                "parameter.detach().clone().numpy()"
            )
        self.column.memory.give(GATHERED, storage.nbytes())
        storage.resize_(0)
        self._set_away(True)

    def _set_away(self, is_away: bool) -> None:
        for parameter in self.bucket.parameters:
            parameter.set_away(is_away)

    @property
    def loaded_in_place(self) -> bool:
        """Whether what this rank stores, when it is brought to the device, is all of the bucket's parameters."""
        return not self.column.is_sharded_in(self.index)

    def gather(self, masters: StoredColumn | None, own: Tensor | None = None) -> CommunicationHandle:
        """Start to gather. masters: as in `ParameterGatherer`. own: what this rank stores, where that does not rest on
        the device. Communicates an all-gather.
        """
        if self.gathered:
            self.allocate()
        group = self.bucket.groups.inner
        if masters is None or (self.column.is_sharded and not self.gathered):
            return collectives.all_gather(self.whole, self.column.shard(self.index) if own is None else own, group)
        if own is None:
            # Where masters rest elsewhere, the parameters have just been rounded from them and are not overwritten yet.
            exact = self.column if self.gathered or not masters.is_on_device(self.index) else masters
            own = exact.shard(self.index)
        return all_gather_quantized(self.whole, own, group)

    def fill(self, read: Callable[[ParameterSpec], Tensor]) -> None:
        """Set the values from the global tensors that `read` returns, of which this rank takes its boxes."""
        with self.filling():
            for parameter in self.bucket.parameters:
                box = own_box(read(spec_of(parameter)), spec_of(parameter))
                parameter.data.zero_().view(-1)[: box.numel()].view(box.shape).copy_(box)

    @contextmanager
    def filling(self) -> Iterator[None]:
        """A context in which all values of the bucket are written; then only what this rank stores is kept.

        Padding becomes zero: a block of int8 at its edge reads it.
        """
        if self.gathered:
            self.allocate()
            for start, stop in self.bucket.layout.gaps():
                self.whole[start:stop].zero_()
        yield
        if self.gathered:
            self.column.keep(self.index, self.whole[slice(*self.column.range_of(self.index))])
            self.free()


def make_views(bucket: Bucket, whole: Tensor) -> None:
    """Make the bucket's parameters views of `whole` [numel]."""
    for entry, parameter in zip(bucket.layout.entries, bucket.parameters, strict=True):
        assert parameter.dtype == whole.dtype, f"{entry.spec.name} is {parameter.dtype}, not {whole.dtype}"
        parameter.data = whole[entry.offset : entry.stop].view(entry.spec.local_shape)


class _Loading:
    """A bucket that is being brought to the device. own: what the rank stores of it. arrived: waits for each copy."""

    def __init__(self, own: Tensor) -> None:
        self.own, self.arrived = own, list[Need]()

    def wait(self) -> None:
        """Return once it is there. Raises what has gone wrong on the way."""
        for copied in self.arrived:
            copied()

    def clear(self) -> None:
        """Let go of the memory."""
        del self.own


class ParameterGatherer:
    """Gathers whole parameters and frees them.

    parameters  by number of the bucket, the trained buckets first
    masters     None, or gathers are in blocks of int8 (ZeRO++). Then: the column of exact weights from which a kept
                bucket is quantised, since its own shard is overwritten with what all ranks get. Where some of them rest
                elsewhere it is quantised from the parameters. A sharded bucket is quantised from its shard, and one
                that is kept whole beside such (--zero3-persist-below) is gathered exactly. So are codes
    overlap     a gather goes on until the parameters are read; else its launch waits for it
    """

    def __init__(self, parameters: Sequence[WholeParameters], *, masters: StoredColumn | None, overlap: bool) -> None:
        self.parameters, self.masters, self.overlap = parameters, masters, overlap
        self._gathers: dict[int, CommunicationHandle] = {}
        self._loads: dict[int, _Loading] = {}

    def loading(self, index: int, start: int, stop: int) -> tuple[Tensor, list[Need]]:
        """Memory on the device for elements [start, stop) of what this rank stores of bucket `index`, and the list of
        what there is to wait for before it is read. The first call takes memory for all of them.
        """
        parameters = self.parameters[index]
        first, last = parameters.column.range_of(parameters.index)
        if index not in self._loads:
            self._loads[index] = _Loading(_room(parameters, last - first))
        return self._loads[index].own[start - first : stop - first], self._loads[index].arrived

    def gather(self, index: int) -> None:
        """Start to gather bucket `index`. Communicates over the ranks that share out its state, if these do.

        What does not rest on the device has been loaded, or is being.
        """
        assert index not in self._gathers, f"bucket {index} is being gathered"
        parameters, loading = self.parameters[index], self._loads.pop(index, None)
        if loading is None:
            self._gathers[index] = parameters.gather(self.masters)
        elif loading.own is parameters.whole:
            self._gathers[index] = CommunicationHandle(after=loading.wait)
        else:
            loading.wait()  # the program waits here: a message cannot wait for a lane of this rank
            # What is sent stays until the gather is over: whoever waits for it lets go of it.
            self._gathers[index] = CommunicationHandle(parameters.gather(self.masters, loading.own), loading.clear)
        if not self.overlap:
            self.ready([index])

    def release(self, index: int) -> None:
        """Free the whole parameters of a gathered bucket."""
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


def _room(parameters: WholeParameters, stored: int) -> Tensor:
    """Memory for what a rank stores of a bucket, on the device: where it is used, or on its own if it is gathered."""
    if parameters.loaded_in_place:
        parameters.allocate()
        return parameters.whole
    dtype = parameters.column.dtype_in(parameters.index)
    return torch.empty(stored, dtype=dtype, device=parameters.column.device)
