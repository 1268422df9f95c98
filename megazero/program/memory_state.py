"""Gathers, loads, reductions and copies of activations, in the account of a walk through a list (`memory_walk`)."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from megazero.config.tiers import Tier
from megazero.program.effects import Scope
from megazero.program.instruction import (
    ACTIVATION_READS,
    ACTIVATION_WRITES,
    GRADIENTS_LEAVE,
    LEAVE,
    RELEASE,
    Free,
    Instruction,
    Kind,
    Op,
    Piece,
    TierMove,
)
from megazero.program.memory import MemoryAccount, MemoryColumn, Place, StepBytes, kept_place

LEAVING: frozenset[Kind] = GRADIENTS_LEAVE | {Op.REDUCE_PARTIAL}
"""What takes a reduced gradient that leaves the device, in the dtype of the sum."""
FETCH = TierMove(Piece.GRADIENTS, Tier.HOST, Tier.DEVICE)
"""What brings a gradient back to an update on the device."""


class Look(Protocol):
    """Takes note of a moment. working: bytes that exist at this moment only."""

    def __call__(self, working: int = 0) -> None: ...


class StateMemory:
    """What instructions on model state do to an account.

    in_flight  reductions on their way, the oldest first: what each of them holds
    across     what is on its way among the ranks that hold the same shard, until the end of the step's backwards
    loading    where a bucket is being loaded to, until its gather
    sent       from where it is gathered, until it is read
    in_blocks  buckets of which a gather in blocks arrives
    """

    def __init__(self, account: MemoryAccount, sizes: StepBytes, look: Look) -> None:
        self.account, self.shape, self.sizes, self._look = account, account.shape, sizes, look
        self.in_flight: deque[list[Place]] = deque()
        self.across: list[int] = []
        self.launched = self.loads = 0
        self.loading: dict[int, Place] = {}
        self.sent: dict[int, Place] = {}
        self.in_blocks: set[int] = set()

    @property
    def arrives(self) -> bool:
        """Whether some bucket's parameters are on their way: gathered in blocks, or loaded to be gathered."""
        return bool(self.in_blocks or self.sent)

    def arrived(self, number: int) -> None:
        """A bucket's parameters are read: what was gathered in blocks, or loaded to be gathered, has served."""
        if number in self.in_blocks:
            self.in_blocks.remove(number)
            self.account.drop(self._blocks(number))
        if number in self.sent:
            self.account.drop(self.sent.pop(number))

    def _blocks(self, number: int) -> Place:
        return self.account.of_bucket(MemoryColumn.TRAVELLING, number, "parameters in blocks")

    def hold_blocks(self, number: int) -> None:
        """What arrives of a gather in blocks, until it is read."""
        messages = self.shape.buckets[number].messages
        if messages.parameters_in_blocks and self.sizes.in_flight:
            self.account.drop(self._blocks(number))
            self.account.hold(self._blocks(number), messages.parameters)
            self.in_blocks.add(number)

    def load(self, number: int) -> None:
        """The first part of a bucket takes memory for all of it: where it is used, or for what is gathered from it."""
        bucket, place = self.shape.buckets[number], self.account.of_bucket(MemoryColumn.GATHERED, number)
        if number in self.loading:
            return
        if not bucket.is_loaded_in_place:  # the last one may still be on its way to the others
            self.loads += 1
            place = place._replace(part=f"load {self.loads}")
        self.loading[number] = place
        self.account.hold(place, bucket.parameter_bytes if bucket.is_loaded_in_place else bucket.stored_bytes)

    def gather(self, i: Instruction) -> None:
        for number in i.buckets:
            bucket, place = self.shape.buckets[number], self.account.of_bucket(MemoryColumn.GATHERED, number)
            if i.op == RELEASE:
                self._look()
                self.account.drop(place)
                continue
            loaded = self.loading.pop(number, place)
            if bucket.gathered and not bucket.is_loaded_in_place:
                self.account.hold(place, bucket.parameter_bytes)
                if bucket.is_loaded:
                    self.sent[number] = loaded
            self.hold_blocks(number)
            if bucket.messages.parameters_in_blocks:
                arriving = bucket.messages.parameters * (not self.sizes.in_flight)  # without overlap it is read at once
                made = bucket.messages.parameters // bucket.shards  # codes rest as they are sent
                self._look(made if bucket.code_bytes is None else arriving)

    def borrow(self, number: int) -> None:
        """A buffer for the whole gradient of a bucket, unless it is in its column, or has one."""
        bucket = self.shape.buckets[number]
        if not bucket.lends_gradient:
            return
        place = self.account.of_bucket(MemoryColumn.BUFFERS, number)
        if place not in self.account.alive:
            self.account.hold(place, self.account.pool.take(bucket.gradient_bytes))

    def reduce(self, i: Instruction) -> None:
        """What travels is held until the second reduction after it is launched: the buffer, or a copy of it."""
        account = self.account
        for number in i.buckets:
            self.borrow(number)
            bucket, held = self.shape.buckets[number], account.of_bucket(MemoryColumn.BUFFERS, number)
            self.launched += 1
            travelling = account.of_bucket(MemoryColumn.TRAVELLING, number, f"reduction {self.launched}")
            if self.sizes.cast:
                account.hold(travelling, round(bucket.gradient_bytes * self.sizes.cast))
                self._look()
            borrowed = account.drop(held)
            if borrowed and self.sizes.cast:
                account.pool.spare.append(borrowed)
            elif borrowed:
                account.hold(travelling, borrowed)
            places = [travelling] if travelling in account.alive else []
            if bucket.messages.gradients_in_blocks:
                received = travelling._replace(part=f"{travelling.part}, in blocks")
                account.hold(received, bucket.messages.scatter)
                self._look(bucket.messages.scatter)
                places += [received] if received in account.alive else []
            if places:
                self.in_flight.append(places)
            self._look()
            least = 1 if bucket.sums_leave else 0  # it has still to leave
            while len(self.in_flight) > max(least, self.sizes.in_flight):
                self._end_oldest()

    def _end_oldest(self) -> None:
        """The oldest reduction is over. Its buffer goes back to the pool, a copy is freed."""
        travelling, *received = self.in_flight.popleft()
        size = self.account.drop(travelling)
        for place in received:
            self.account.drop(place)
        bucket = self.shape.buckets[travelling.bucket]
        if bucket.lends_gradient and not self.sizes.cast:
            self.account.pool.spare.append(size)

    def leave(self, i: Instruction) -> None:
        """A reduced gradient leaves the device. If it has travelled in another dtype, this rank's own is converted."""
        bucket = self.shape.buckets[i.buckets[0]]
        if not bucket.sums_leave or not self.sizes.cast:
            return
        places = next(places for places in reversed(self.in_flight) if places[0].bucket == i.buckets[0])
        converted = places[0]._replace(part=places[0].part.split(",")[0] + ", converted")
        if converted not in places:
            own = bucket.gradient_bytes // (bucket.shards if bucket.sharded_state else 1)
            self.account.hold(converted, own)
            self._look()
            self.account.drop(places[0])
            places[:] = [converted]

    def fetch(self, i: Instruction) -> None:
        """A gradient that comes back for an update takes a spare buffer until that is made."""
        for number in i.buckets:
            bucket = self.shape.buckets[number]
            if not bucket.sums_leave:
                continue
            place = self.account.of_bucket(MemoryColumn.BUFFERS, number, f"part {i.part}")
            if i.op == FETCH:
                self.account.hold(place, self.account.pool.take(bucket.parts[i.part].gradient_bytes))
            else:
                self._look()
                self.account.pool.spare.append(self.account.drop(place))

    def reduce_across(self, i: Instruction) -> None:
        """The shard travels once its own reduction is over: a copy of it, or what arrives in blocks. One that leaves
        the device travels where it has been reduced.
        """
        leaving = [bucket for bucket in map(self.shape.buckets.__getitem__, i.buckets) if bucket.sums_leave]
        if leaving:
            self._look(sum(2 * own.messages.across_scatter * own.messages.gradients_in_blocks for own in leaving))
            return
        while any(place.bucket in i.buckets for places in self.in_flight for place in places):
            self._end_oldest()
        for number in i.buckets:
            bucket = self.shape.buckets[number]
            size = round(bucket.gradient_bytes // bucket.shards * self.sizes.cast)
            size += bucket.messages.across_scatter * bucket.messages.gradients_in_blocks
            self.account.hold(self.account.of_bucket(MemoryColumn.TRAVELLING, number, "across"), size)
            self._look(bucket.messages.across_scatter * bucket.messages.gradients_in_blocks)
            self.across.append(number)

    def complete(self) -> None:
        """The end of all reductions. Under ZeRO-0 ranks that share the shards now gather the whole gradients."""
        while self.in_flight:
            self._end_oldest()
        gathered = 0
        for number in self.across:
            bucket = self.shape.buckets[number]
            blocks = bucket.messages.gradients_in_blocks
            self._look(bucket.messages.across_gather * blocks)
            if not bucket.sharded_state and bucket.shards > 1:
                gathered += round(bucket.gradient_bytes * self.sizes.cast) + bucket.messages.gather * blocks
        self._look(gathered)
        for number in self.across:
            self.account.drop(self.account.of_bucket(MemoryColumn.TRAVELLING, number, "across"))
        self.across.clear()


class ActivationCopies:
    """What `ACTIVATION_MOVES` do to an account.

    Activations are on the device until they are freed, and from the copy back on. Their host buffer is taken at the
    copy to host memory and given back at their backward, which waits for the copy back. Of those that go on to disks it
    is given back once they are written, and another one is taken at the read.
    """

    def __init__(self, account: MemoryAccount, scope: Scope, sizes: StepBytes) -> None:
        self.account, self.scope, self.sizes = account, scope, sizes

    def run(self, i: Instruction) -> None:
        """One of `ACTIVATION_MOVES`."""
        first, stop = self.scope.units_of(i)
        sizes = self.sizes.units[i.chunk]
        if i.op in ACTIVATION_WRITES:
            return
        if i.op == Free(Piece.ACTIVATIONS, Tier.HOST):
            self.give_back(i)
            return
        if i.op == LEAVE or i.op in ACTIVATION_READS:
            leaves = sum(sizes[unit].kept + sizes[unit].input - sizes[unit].stays for unit in range(first, stop))
            if leaves:  # what keeps nothing takes no buffer
                self.account.hold(self._host(i), self.account.host.take(self.sizes.host_buffer or leaves))
            return
        for unit in range(first, stop):
            kept = sizes[unit].kept + sizes[unit].input * (unit > first)
            self.account.drop(kept_place(i, unit))
            self.account.hold(kept_place(i, unit), sizes[unit].stays if isinstance(i.op, Free) else kept)
        self.account.drop(kept_place(i, first, "input"))
        if not isinstance(i.op, Free):
            self.account.hold(kept_place(i, first, "input"), sizes[first].input)

    def give_back(self, i: Instruction) -> None:
        """The host buffer of what a backward works with, if it has one, is free."""
        if size := self.account.drop(self._host(i)):
            self.account.host.spare.append(size)

    def _host(self, i: Instruction) -> Place:
        return Place(MemoryColumn.HOST, i.micro_batch, i.chunk, self.scope.units_of(i)[0])
