"""Sums of gradients in host memory and on disks, beside the computation (--offload-gradients).

A step's first gradient of a part is stored as its sum. Each later one is copied to a slot (`zero.part_slots`), and
added.
In host memory the sum rests in the gradient column. On disks it passes through a slot too: it is read, added to, and
written. The last addition is followed by a count of the squares, for the norm. An update on the device has its gradient
brought back in a spare buffer for whole gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from fused_ops.norm import sum_of_squares
from megazero.config.tiers import Tier
from megazero.disk.lanes import Need
from megazero.program.instruction import Instruction
from megazero.zero.counted import counted_runs
from megazero.zero.host_parts import HostParts
from megazero.zero.parts import Key, Resting, gradient_piece
from megazero.zero.reducer import GradientReducer
from megazero.zero.sharding import Column
from megazero.zero.storage import Bucket


class Squares(NamedTuple):
    """Sums of squares, 0-dim float64 in host memory each: of runs that count in the norm here, and of others."""

    counted: list[Tensor]
    others: list[Tensor]


class HostGradients:
    """The summed gradients of a rank that are not on the device.

    resting  where each trained bucket rests
    reducer  has what is reduced, and spare buffers on the device
    host     has slots and lanes
    tp       this rank's index
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        resting: Sequence[Resting],
        reducer: GradientReducer,
        host: HostParts,
        tp: int,
    ) -> None:
        self.reducer, self.leaving, self.pool, self.host = reducer, reducer.leaving, reducer.pool, host
        self.column = host.columns[Column.GRADIENT]
        self.tiers = [own.sums for own in resting]
        self._runs = [tuple(counted_runs(own, tp, counted=which) for which in (True, False)) for own in buckets]
        self._stored: dict[int, list[Need]] = defaultdict(list)
        """By bucket: copies to where its sum rests in host memory."""
        self._squares: dict[int, list[Future[Squares]]] = defaultdict(list)
        self._fetched: dict[Key, tuple[Tensor, Need]] = {}

    # --- sums ------------------------------------------------------------------------------------------------------

    def store(self, i: Instruction) -> None:
        """Start to copy a step's first gradient of a part to host memory, where it is the sum."""
        key, source, to_host = i.key, self._leaving(i.key), self.host.lanes.to_host
        if self.tiers[key[0]] is Tier.HOST:
            copied = to_host.copy(self._resting(key), source, after=self.host.readers.pop(key, ()))
            self._stored[key[0]].append(copied.result)
        else:
            slot = self.host.taken(i)
            copied = to_host.copy(self.host.sum_in(slot, key), source, after=slot.free)
            slot.arrived.append(copied.result)
            self.host.passed(i, copied.result)
        self.leaving.leaves(key[0], source.numel(), copied.result)

    def copy_gradient(self, i: Instruction) -> None:
        """Start to copy a later gradient of a part to its slot."""
        source, slot = self._leaving(i.key), self.host.taken(i)
        copied = self.host.lanes.to_host.copy(slot.gradient[: source.numel()], source, after=slot.free)
        slot.arrived.append(copied.result)
        self.host.passed(i, copied.result)
        self.leaving.leaves(i.buckets[0], source.numel(), copied.result)

    def read(self, i: Instruction) -> None:
        """Start to read the sum of a part from disks, to add to it or for its update."""
        slot = self.host.taken(i)
        request = self.host.disks.read({gradient_piece(i.key): self.host.sum_in(slot, i.key)}, needs=slot.free)
        slot.arrived.append(request.wait)
        self.host.passed(i, request.wait)

    def add(self, i: Instruction) -> None:
        """Start to add the gradient of a part that was copied to its sum."""
        slot, key = self.host.taken(i), i.key
        total = self._resting(key) if self.tiers[key[0]] is Tier.HOST else self.host.sum_in(slot, key)
        needs = *slot.arrived, *self._stored[key[0]]
        added = self.host.lanes.updates.submit(_added, needs, total, slot.gradient[: total.numel()])
        slot.arrived = [added.result]
        self.host.passed(i, added.result)
        if self.tiers[key[0]] is Tier.HOST:
            self._stored[key[0]].append(added.result)

    def count(self, i: Instruction) -> None:
        """Start to count the squares of a bucket's sum (-1), or of a part of it."""
        index, part = i.key
        counted, others = self._runs[index]
        if part < 0:
            views = [[self.column.view(index, *run) for run in runs] for runs in (counted, others)]
            needs = self._stored.pop(index, [])
            self._squares[index].append(self.host.lanes.updates.submit(_squares, needs, *views))
            return
        slot = self.host.taken(i)
        start, stop = self._part(i.key)
        total = self.host.sum_in(slot, i.key)
        views = [
            [
                total[max(start, first) - start : min(stop, last) - start]
                for first, last in runs
                if max(start, first) < min(stop, last)
            ]
            for runs in (counted, others)
        ]
        made = self.host.lanes.updates.submit(_squares, tuple(slot.arrived), *views)
        self._squares[index].append(made)
        self.host.passed(i, made.result)

    def write_sum(self, i: Instruction) -> None:
        """Start to write the sum of a part to disks."""
        slot = self.host.taken(i)
        request = self.host.disks.write({gradient_piece(i.key): self.host.sum_in(slot, i.key)}, needs=slot.arrived)
        self.host.passed(i, request.wait)

    def squares(self, index: int) -> Squares:
        """The squares of a bucket's gradient. Waits for the count. Raises what has gone wrong on the way of the sum."""
        found = [made.result() for made in self._squares.pop(index, [])]
        return Squares([one for each in found for one in each.counted], [one for each in found for one in each.others])

    # --- updates ---------------------------------------------------------------------------------------------------

    def fetch(self, i: Instruction) -> None:
        """Start to copy the gradient of a part to the device for its update."""
        key = i.key
        start, stop = self._part(key)
        buffer = self.pool.take(stop - start)
        if self.tiers[key[0]] is Tier.HOST:
            copied = self.host.lanes.to_device.copy(buffer[: stop - start], self._resting(key))
            self.host.readers[key].append(copied.result)
        else:
            slot = self.host.taken(i)
            source = self.host.sum_in(slot, key)
            copied = self.host.lanes.to_device.copy(buffer[: stop - start], source, after=tuple(slot.arrived))
            self.host.passed(i, copied.result)
        self._fetched[key] = buffer, copied.result

    def fetched(self, key: Key, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the bucket of a gradient that was brought back. Waits for it."""
        buffer, copied = self._fetched[key]
        copied()
        first = self._part(key)[0]
        return buffer[start - first : stop - first]

    def used(self, key: Key) -> None:
        """The update on the device has been given its gradient."""
        self.pool.give(self._fetched.pop(key)[0])

    def discard(self) -> None:
        """Forget the sums of a step. Waits for what is under way."""
        for index in list(self._squares):
            self.squares(index)
        self._stored.clear()
        self.host.wait()

    # --- one part --------------------------------------------------------------------------------------------------

    def _part(self, key: Key) -> tuple[int, int]:
        return self.host.parts[key[0]][key[1]][:2]

    def _leaving(self, key: Key) -> Tensor:
        return self.reducer.reduced(key[0], *self._part(key))

    def _resting(self, key: Key) -> Tensor:
        return self.column.view(key[0], *self._part(key))


@torch.no_grad()
def _added(needs: Sequence[Need], total: Tensor, gradient: Tensor) -> None:
    """Executed on the host's lane."""
    for there in needs:
        there()
    total.add_(gradient)


@torch.no_grad()
def _squares(needs: Sequence[Need], counted: Sequence[Tensor], others: Sequence[Tensor]) -> Squares:
    """Executed on the host's lane."""
    for there in needs:
        there()
    return Squares([sum_of_squares(view) for view in counted], [sum_of_squares(view) for view in others])
