"""Gradients from backward to their owners.

Gradients are summed in the bucket's flat buffer (fp32 for 16-bit parameters). A layer's backward writes or adds its
part there itself (`mpu.gradient`); what autograd accumulates is added when it has finished, and freed. When a bucket of
the armed chunk is complete it is reduced over its group while backward goes on. All ranks of a group launch the same
buckets in the same order: last bucket of the chunk first, each once those before it have been launched, whatever
arrives when.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fused_ops.linear import put
from megazero.mpu import collectives
from megazero.mpu.collectives import CommunicationHandle
from megazero.mpu.gradient import Write
from megazero.mpu.grid import Group
from megazero.mpu.parameter import ParameterKind
from megazero.zero.storage import Bucket, BufferPool, StoredColumn

IN_FLIGHT = 2
"""Reductions under way at once where each holds memory of its own (sharded gradients, or a cast copy)."""

Arrived = tuple[frozenset[int], ...]


@dataclass
class _BucketReduction:
    """The reduction of a bucket under way: the tensor that travels, and the pool's buffer to be given back, if any."""

    index: int
    handle: CommunicationHandle
    travelling: Tensor
    borrowed: Tensor | None


class _Target:
    """The gradient target of one parameter.

    It does not keep the reducer alive: torch's hooks are invisible to the garbage collector, so the ring of parameter,
    hook, reducer, bucket and parameter would never be freed, nor the process groups in it.
    """

    def __init__(self, reducer: GradientReducer, index: int, entry: int) -> None:
        self._reducer, self._at = weakref.ref(reducer), (index, entry)

    def add(self, write: Write) -> None:
        """See `mpu.gradient.GradientTarget`."""
        reducer = self._reducer()
        assert reducer is not None, "the model state of this parameter is gone"
        reducer.take(*self._at, write)

    def take_from(self, parameter: Tensor) -> None:
        """Autograd has finished `parameter.grad`; None where a layer has handed the gradient to the target instead."""
        gradient = parameter.grad
        if gradient is not None:
            self.add(partial(put, gradient))
            parameter.grad = None


class GradientReducer:
    """Accumulates and reduces the gradients of all buckets of a rank; a `pipeline.engine.GradientSink`.

    buckets   in forward order
    column    the gradient column. Sharded (ZeRO-2): a bucket's whole gradient lives in a buffer of the pool from its
              first arrival to its reduction, whose result is added to the shard
    state     an optimizer column: what it holds of a bucket is what a reduction has to deliver. Sharded:
              reduce-scatter, else all-reduce
    dtype     dtype that travels
    overlap   reduce during backward, else when it is over; the results are the same bits
    tp        group over which tp_partial gradients are summed

    Communicates per reduction: one reduce-scatter (or all-reduce) of the bucket over its group; per step: one
    all-reduce over tp of this rank's share of all tp_partial gradients together. Sums over dp and tp commute, so tp
    goes last: once per step, and only over what this rank updates.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        column: StoredColumn,
        state: StoredColumn,
        *,
        dtype: torch.dtype,
        overlap: bool,
        tp: Group,
    ) -> None:
        self.buckets, self.column, self.state, self.dtype, self.overlap, self.tp = (
            buckets,
            column,
            state,
            dtype,
            overlap,
            tp,
        )
        self.pool = BufferPool(column.dtype, column.device)
        self._borrowed: dict[int, Tensor] = {}
        self._arrived: list[set[int]] = [set() for _ in buckets]
        self._launched = [False] * len(buckets)
        self._completed = [False] * len(buckets)
        self._armed: int | None = None
        self._deferred: dict[tuple[int, int], list[tuple[int, int, Write]]] = {}
        """What backwards of (chunk, micro-batch) left for `run_deferred`: (bucket, entry, write), in the order of
        arrival.
        """
        self._deferring: list[tuple[int, int, Write]] | None = None
        self._missing: dict[int, Counter[int]] = {}
        self._queue: list[int] = []
        self._reductions: list[_BucketReduction] = []
        for index, bucket in enumerate(buckets):
            for entry, parameter in enumerate(bucket.parameters):
                parameter.gradient_target = target = _Target(self, index, entry)
                parameter.register_post_accumulate_grad_hook(target.take_from)
        self._partials = [
            column.view(index, fragment.offset, fragment.offset + fragment.numel)
            for index, bucket in enumerate(buckets)
            for fragment in bucket.layout.fragments(*state.range_of(index))
            if fragment.spec.tp_partial
        ]

    # --- what the engine calls -------------------------------------------------------------------------------------

    def before_backward(self, chunk: int, reduce: bool, defer: int | None = None) -> None:
        """A backward of model chunk `chunk` begins. reduce: its buckets are reduced with what has arrived by its end.
        defer: number of its micro-batch; what can wait does, for `run_deferred`.

        A bucket whose group spans stages (a tied embedding's) is left for `finish`: the first stage's part is complete
        only with the step's last backward, and the last stage would hold one buffer per micro-batch that is under way.
        """
        assert self._armed is None and self._deferring is None, "one backward at a time"
        if defer is not None:
            assert not reduce, "a chunk is reduced with what was deferred"
            self._deferring = self._deferred.setdefault((chunk, defer), [])
        if reduce:
            self._armed = chunk
            self._queue = [i for i in reversed(range(len(self.buckets))) if self._is_in(i, chunk)]
            self._missing = {i: Counter(dict(enumerate(self.buckets[i].uses))) for i in self._queue}

    def after_backward(self, chunk: int) -> None:
        """The backward is over: what is not reduced yet is now, parameters without a gradient counting as zero."""
        self._deferring = None
        if self._armed == chunk:
            while self._queue:
                self._launch(self._queue.pop(0))
            self._armed = None

    @torch.no_grad()
    def run_deferred(self, chunk: int, micro_batch: int, reduce: bool) -> None:
        """Make and add the gradients that this backward left; each frees what it was made from. reduce: as in
        `before_backward`.
        """
        held = self._deferred.pop((chunk, micro_batch))
        self.before_backward(chunk, reduce)
        if reduce:  # nothing else comes any more
            self._missing = {i: Counter(entry for index, entry, _ in held if index == i) for i in self._queue}
        held.reverse()
        while held:
            self.accumulate(*held.pop())
        self.after_backward(chunk)

    def finish(self) -> None:
        """Wait until every gradient is reduced: the column's shards (or the replicated column) hold the sum over dp and
        tp.
        """
        assert self._armed is None and not self._deferred, "a backward is still under way"
        for index in reversed(range(len(self.buckets))):
            if self._arrived[index] or not self._launched[index]:
                self._launch(index)
        while self._reductions:
            self._complete_oldest()
        self._sum_partials()

    def reset(self) -> None:
        """Forget the gradients: the next ones start a new sum."""
        self._launched = [False] * len(self.buckets)
        self._completed = [False] * len(self.buckets)

    def arrived(self) -> Arrived:
        """Which entries of each bucket hold a part of the sum that is being made."""
        return tuple(map(frozenset, self._arrived))

    def say_arrived(self, arrived: Arrived) -> None:
        """Gradients have been written or added without `take`, by a graph that was captured when they
        came through it.
        """
        self._arrived = [set(entries) for entries in arrived]

    # --- one gradient ----------------------------------------------------------------------------------------------

    def take(self, index: int, entry: int, write: Write) -> None:
        """A gradient can be made: it is made and added now, unless the backward defers and it can wait.

        Those of an embedding or head cannot: they would hold a whole table, or the logits, of every micro-batch that
        waits. Vectors could be added now, but they wait for the matrices of their bucket, whose buffer they would hold
        (ZeRO-2).
        """
        if self._deferring is None or self.buckets[index].layout.entries[entry].spec.kind is ParameterKind.EMBEDDING:
            self.accumulate(index, entry, write)
        else:
            self._deferring.append((index, entry, write))

    def accumulate(self, index: int, entry: int, write: Write) -> None:
        """Add to the gradient of a bucket's parameter. One of another chunk than the armed one only accumulates."""
        assert self.column.is_sharded or not self._launched[index], "a gradient arrived after its bucket was reduced"
        spec = self.buckets[index].layout.entries[entry]
        into = self._whole(index)[spec.offset : spec.stop].view(spec.spec.local_shape)
        # What has not arrived yet holds the previous step's gradient, or anything.
        write(into, entry in self._arrived[index])
        self._arrived[index].add(entry)
        if self._armed is None or index not in self._missing:
            return
        self._missing[index][entry] -= 1
        if self._missing[index][entry] == 0:
            del self._missing[index][entry]
        while self.overlap and self._queue and not self._missing[self._queue[0]]:
            self._launch(self._queue.pop(0))

    def _whole(self, index: int) -> Tensor:
        """The whole gradient of a bucket, [numel]."""
        if not self.column.is_sharded:
            return self.column.held(index)
        numel = self.buckets[index].layout.numel
        if index not in self._borrowed:
            self._borrowed[index] = self.pool.take(numel)
        return self._borrowed[index][:numel]

    # --- one bucket ------------------------------------------------------------------------------------------------

    def _is_in(self, index: int, chunk: int) -> bool:
        layout = self.buckets[index].layout
        return layout.chunk == chunk and not layout.group.spans_stages

    def _launch(self, index: int) -> None:
        """Start the reduction of a bucket."""
        bucket, whole = self.buckets[index], self._whole(index)
        for number, entry in enumerate(bucket.layout.entries):
            if number not in self._arrived[index]:
                whole[entry.offset : entry.stop].zero_()
        whole[bucket.layout.used :].zero_()
        self._arrived[index].clear()
        self._launched[index] = True
        borrowed = self._borrowed.pop(index, None)
        travelling = whole
        if self.dtype != whole.dtype:
            travelling = whole.to(self.dtype)
            if borrowed is not None:
                self.pool.give(borrowed)
                borrowed = None
        if self.state.is_sharded:
            handle = collectives.reduce_scatter(travelling[slice(*bucket.shard)], travelling, bucket.group)
        else:
            handle = collectives.all_reduce(travelling, bucket.group)
        self._reductions.append(_BucketReduction(index, handle, travelling, borrowed))
        holds_memory = self.column.is_sharded or travelling is not whole
        while holds_memory and len(self._reductions) > IN_FLIGHT:
            self._complete_oldest()

    def _complete_oldest(self) -> None:
        """Wait for the oldest reduction and put its result into the column."""
        reduction = self._reductions.pop(0)
        reduction.handle.wait()
        index = reduction.index
        start, stop = self.state.range_of(index)
        result, target = reduction.travelling[start:stop], self.column.view(index, start, stop)
        if self.column.is_sharded and self._completed[index]:
            target.add_(result)
        elif result.data_ptr() != target.data_ptr():
            target.copy_(result)
        self._completed[index] = True
        if reduction.borrowed is not None:
            self.pool.give(reduction.borrowed)

    # --- partial sums over tp --------------------------------------------------------------------------------------

    def _sum_partials(self) -> None:
        if self.tp.size == 1 or not self._partials:
            return
        packed = torch.cat(self._partials)
        collectives.all_reduce(packed, self.tp).wait()
        for view, total in zip(self._partials, packed.split([view.numel() for view in self._partials]), strict=True):
            view.copy_(total)
