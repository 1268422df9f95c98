"""Accumulation of gradients in buckets and their reduction to the owners.

Gradients are summed in the bucket's flat buffer (fp32 for 16-bit parameters). A layer's backward writes or adds its
part there itself (`mpu.gradient`). A gradient that autograd accumulates is added when it is complete, and freed. The
step's list says when a bucket is reduced over its group; meanwhile backward goes on. All ranks of a group have the same
list, so they launch the same buckets in the same order.

With hybrid shards a reduction has two halves: `reduce` over the neighbours that share out the state, and once per step
`reduce_across` over the ranks that store the same shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fused_ops.linear import write_or_add
from megazero.config.tiers import Tier
from megazero.mpu import collectives
from megazero.mpu.collectives import CommunicationHandle
from megazero.mpu.gradient import Write
from megazero.mpu.grid import Group
from megazero.mpu.parameter import ParameterKind
from megazero.program.instruction import ComputationKey
from megazero.program.shape import IN_FLIGHT
from megazero.zero.across import AcrossSum
from megazero.zero.leaving import LeavingGradients, sum_over
from megazero.zero.messages import GradientMessages
from megazero.zero.storage import Bucket, BufferPool, StoredColumn

Arrived = tuple[frozenset[int], ...]


@dataclass
class _BucketReduction:
    """A launched reduction of a bucket: the tensor that is reduced, the buffer to return to the pool, if any, and
    whether it holds memory beside the column.
    """

    index: int
    handle: CommunicationHandle
    travelling: Tensor
    borrowed: Tensor | None
    holds_memory: bool


class GradientReducer:
    """Accumulates and reduces the gradients of all buckets of a rank.

    buckets   in forward order
    column    the gradient column. If it is sharded (ZeRO-2), a bucket's whole gradient is in a buffer of the pool from
              its first part to its reduction, whose result is added to the shard
    sums      where each bucket's gradients are summed. If not on the device, the whole gradient is in such a buffer
              too, and the result leaves from there (`zero.leaving`)
    state     an optimizer column. A reduction delivers the range that this column stores: by a reduce-scatter if it is
              sharded, else by an all-reduce (with hybrid shards by a reduce-scatter and `AcrossSum`'s all-gather)
    dtype     dtype in which gradients are communicated, or from which they are quantised
    messages  how they travel
    overlap   a reduction goes on while backward does; else its launch waits for it. The results have the same bits
    tp        group over which tp_partial gradients are summed
    taken     number of gradients that have been taken so far

    Communicates per reduction: one reduce-scatter (or all-reduce) of the bucket over its neighbours. Per step: for each
    bucket what `AcrossSum` does, and one all-reduce over tp of all tp_partial gradients that this rank updates. Sums
    over ranks, micro-batches and tp commute, so these two come last: once per step, and of few elements.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        column: StoredColumn,
        state: StoredColumn,
        *,
        dtype: torch.dtype,
        messages: GradientMessages,
        overlap: bool,
        tp: Group,
        sums: Sequence[Tier],
    ) -> None:
        self._leaves = [tier is not Tier.DEVICE for tier in sums]
        self.taken = 0
        self.buckets, self.column, self.state, self.dtype = buckets, column, state, dtype
        self.messages, self.overlap, self.tp = messages, overlap, tp
        self.pool = BufferPool(column.dtype, column.memory)
        self.across = AcrossSum(buckets, column, state, dtype, messages)
        self.leaving = LeavingGradients(buckets, column, state, messages, self.across, self.pool, tp)
        self._borrowed: dict[int, Tensor] = {}
        self._arrived: list[set[int]] = [set() for _ in buckets]
        self._launched = [False] * len(buckets)
        self._completed = [False] * len(buckets)
        self._deferred: dict[ComputationKey, list[tuple[int, int, Write]]] = {}
        """Deferred gradients of each (micro-batch, chunk, unit): (bucket, entry, write) in order of arrival."""
        self._deferring: list[tuple[int, int, Write]] | None = None
        self._reductions: list[_BucketReduction] = []
        for index, bucket in enumerate(buckets):
            for entry, parameter in enumerate(bucket.parameters):
                parameter.gradient_target = target = BucketTarget(self, index, entry)
                parameter.register_post_accumulate_grad_hook(target.take_from)
        self._partials = [
            column.view(index, fragment.offset, fragment.offset + fragment.numel)
            for index, bucket in enumerate(buckets)
            if not self._leaves[index]
            for fragment in bucket.layout.fragments(*state.range_of(index))
            if fragment.spec.tp_partial
        ]

    # --- what the engine calls -------------------------------------------------------------------------------------

    def before_backward(self, defer: ComputationKey | None) -> None:
        """Called before a backward.

        defer: its micro-batch, chunk and first unit, if gradients that can wait are made by `run_deferred`.
        """
        assert self._deferring is None, "one backward at a time"
        if defer is not None:
            assert defer not in self._deferred, f"the backward {defer} is deferred already"
            self._deferring = self._deferred[defer] = []

    def after_backward(self) -> None:
        """Called after a backward."""
        self._deferring = None

    @torch.no_grad()
    def run_deferred(self, key: ComputationKey) -> None:
        """Make and add the gradients that a backward deferred; free the tensors that they needed."""
        held = self._deferred.pop(key)
        held.reverse()
        while held:
            self.accumulate(*held.pop())

    def complete(self) -> None:
        """Wait for all reductions. All ranks call this at the end of a step."""
        assert not self._deferred, "a backward is still under way"
        late = [index for index, arrived in enumerate(self._arrived) if arrived]
        assert not late, f"gradients of buckets {late} are not reduced"
        self._end_all(whole=True)

    def _end_all(self, *, whole: bool) -> None:
        while self._reductions or self.leaving:
            self._end_oldest(whole=whole)
        self.across.complete()

    def sum_partials(self, buckets: Sequence[int]) -> None:
        """Sum tp_partial gradients over tp: of reduced buckets that leave the device, or (none named) of all others,
        after `complete`. All ranks call this.
        """
        for index in buckets:
            self._complete(index)
            self.leaving.sum_partials(index)
        if not buckets:
            self.complete()
            sum_over(self._partials, self.tp)

    def reset(self) -> None:
        """Forget the gradients: the next ones begin a new sum."""
        self._launched = [False] * len(self.buckets)
        self._completed = [False] * len(self.buckets)
        self.across.reset()

    def discard(self) -> None:
        """Forget all gradients, and those that are being reduced: wait for the reductions, give buffers back."""
        assert self._deferring is None and not self._deferred, "a backward is under way"
        self._end_all(whole=False)
        for arrived in self._arrived:
            arrived.clear()
        while self._borrowed:
            self.pool.give(self._borrowed.popitem()[1])
        self.messages.forget()
        self.reset()

    def arrived(self) -> Arrived:
        """For each bucket, the entries of which a gradient has arrived since its last reduction."""
        return tuple(map(frozenset, self._arrived))

    def say_arrived(self, arrived: Arrived) -> None:
        """Set what `arrived` returns, after a CUDA graph has written or added gradients without calling `take`."""
        self._arrived = [set(entries) for entries in arrived]

    # --- one gradient ----------------------------------------------------------------------------------------------

    def take(self, index: int, entry: int, write: Write) -> None:
        """Add the gradient that `write` makes: now, or in `run_deferred` if this backward defers.

        Gradients of an embedding or head are never deferred: they would keep a whole table, or the logits, for every
        waiting micro-batch. Vectors are cheap to add now, but are deferred with the matrices of their bucket: added
        now, they would occupy the bucket's buffer until then (ZeRO-2).
        """
        self.taken += 1
        if self._deferring is None or self.buckets[index].layout.entries[entry].spec.kind is ParameterKind.EMBEDDING:
            self.accumulate(index, entry, write)
        else:
            self._deferring.append((index, entry, write))

    def accumulate(self, index: int, entry: int, write: Write) -> None:
        """Add a gradient to its bucket."""
        assert self._lends(index) or not self._launched[index], "a gradient arrived after its bucket was reduced"
        spec = self.buckets[index].layout.entries[entry]
        into = self._whole(index)[spec.offset : spec.stop].view(spec.spec.local_shape)
        # An entry that has not arrived yet still has the previous step's gradient, or undefined content.
        write(into, entry in self._arrived[index])
        self._arrived[index].add(entry)

    def _whole(self, index: int) -> Tensor:
        """The whole gradient of a bucket, [numel]."""
        if not self._lends(index):
            return self.column.held(index)
        numel = self.buckets[index].layout.numel
        if index not in self._borrowed:
            self._borrowed[index] = self.pool.take(numel)
        return self._borrowed[index][:numel]

    def _lends(self, index: int) -> bool:
        """Whether a bucket's whole gradient is in a buffer of the pool."""
        return self.column.is_sharded or self._leaves[index]

    # --- one bucket ------------------------------------------------------------------------------------------------

    def reduce(self, index: int) -> None:
        """Start to reduce a bucket over its neighbours; a gradient that has not arrived counts as zero."""
        assert index not in self.across.launched, "a bucket is reduced before it is summed across"
        bucket, whole = self.buckets[index], self._whole(index)
        for number, entry in enumerate(bucket.layout.entries):
            if number not in self._arrived[index]:
                whole[entry.offset : entry.stop].zero_()
        for start, stop in bucket.layout.gaps():
            whole[start:stop].zero_()
        self._arrived[index].clear()
        self._launched[index] = True
        borrowed = self._borrowed.pop(index, None)
        travelling = whole
        if self.dtype != whole.dtype:
            travelling = whole.to(self.dtype)
            if borrowed is not None:
                self.pool.give(borrowed)
                borrowed = None
        if self._scatters(index):
            handle = self.messages.reduce_scatter(index, travelling[slice(*bucket.shard)], travelling)
        else:
            handle = collectives.all_reduce(travelling, bucket.groups.inner)
        in_blocks = self.messages.bits is not None and bucket.groups.inner.handle is not None
        holds_memory = self._lends(index) or travelling is not whole or in_blocks
        self._reductions.append(_BucketReduction(index, handle, travelling, borrowed, holds_memory))
        most = IN_FLIGHT if self.overlap else int(self._leaves[index])  # what leaves has still to do so
        while (holds_memory or not self.overlap) and self._holding > most:
            self._end_oldest()
        while self._reductions and not self.overlap:
            self._complete_oldest()

    def reduce_across(self, index: int) -> None:
        """Start to sum a bucket's shard across the sets of neighbours: once per step, after the bucket's last `reduce`.

        Waits for that.
        """
        self._complete(index)
        if self._leaves[index]:
            self.leaving.launch_across(index)
        else:
            self.across.launch(index)

    def wait(self, index: int) -> None:
        """Return once the gradient of a bucket is in the column, reduced by all that has been launched for it."""
        self._complete(index)
        if index in self.across.launched:
            self.across.complete()

    def reduced(self, index: int, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a bucket whose reduced gradient leaves the device, of what this rank updates. Waits
        for the reduction. `leaving.leaves` has to be told of the copy.
        """
        self._complete(index)
        return self.leaving.view(index, start, stop)

    @property
    def _holding(self) -> int:
        """Number of reductions that hold memory of their own."""
        return sum(reduction.holds_memory for reduction in self._reductions) + len(self.leaving)

    def _scatters(self, index: int) -> bool:
        """Whether a reduction leaves this rank its shard, not the whole bucket."""
        return self.state.is_sharded or self.across.gathers(index)

    def _complete(self, index: int) -> None:
        """Wait for a bucket's reductions, and those before them."""
        while any(reduction.index == index for reduction in self._reductions):
            self._complete_oldest()

    def _end_oldest(self, *, whole: bool = True) -> None:
        """Wait for the oldest reduction; if it leaves the device, until it has left. whole: see there."""
        if self.leaving:
            self.leaving.end_oldest(whole=whole)
        else:
            self._complete_oldest()

    def _complete_oldest(self) -> None:
        """Wait for the oldest reduction, and put its result into the column, or where it leaves from."""
        reduction = self._reductions.pop(0)
        reduction.handle.wait()
        index = reduction.index
        if self._leaves[index]:
            self.leaving.take(index, reduction.travelling, reduction.borrowed)
            return
        start, stop = self.buckets[index].shard if self._scatters(index) else self.state.range_of(index)
        result, target = reduction.travelling[start:stop], self.column.view(index, start, stop)
        if self.column.is_sharded and self._completed[index]:
            _add(target, result)
        elif result.data_ptr() != target.data_ptr():
            target.copy_(result)
        self._completed[index] = True
        if self.across.gathers(index) and self.buckets[index].groups.across.handle is None:
            self.across.launch(index)
        if reduction.borrowed is not None:
            self.pool.give(reduction.borrowed)


class BucketTarget:
    """The gradient target of one parameter.

    It has a weak reference to the reducer. The garbage collector cannot see torch's hooks: with a strong reference the
    cycle of parameter, hook, reducer, bucket and parameter, and the process groups in it, would never be freed.
    """

    def __init__(self, reducer: GradientReducer, index: int, entry: int) -> None:
        self._reducer, self._at = weakref.ref(reducer), (index, entry)

    def add(self, write: Write) -> None:
        """See `mpu.gradient.GradientTarget`."""
        reducer = self._reducer()
        assert reducer is not None, "the model state of this parameter is gone"
        reducer.take(*self._at, write)

    def take_from(self, parameter: Tensor) -> None:
        """Add `parameter.grad`, which autograd has completed. It is None where a layer has used the target itself."""
        gradient = parameter.grad
        if gradient is not None:
            self.add(partial(write_or_add, gradient))
            parameter.grad = None


def _add(target: Tensor, result: Tensor) -> None:
    """Add `result` in pieces. On a CPU torch first copies a tensor of another dtype, and a whole shard takes memory."""
    pieces = (1 << 14) if result.dtype != target.dtype and not target.is_cuda else max(1, target.numel())
    for into, part in zip(target.split(pieces), result.split(pieces), strict=True):
        into.add_(part)
