"""Bytes alive on a rank at every instruction of its list.

What a list allocates follows from its instructions: a gather allocates a bucket's parameters and a release frees them;
a backward frees what its forward has kept; under ZeRO-2 and 3 the first gradient of a bucket borrows a buffer for the
whole of it from a pool, and its reduction gives it back when it is over. How much that is follows from the buckets'
shapes and from `StepBytes`. Activations that leave the device are in a buffer of host memory from their LEAVE to their
backward, and on the device until FREE and from RETURN on.

Within an instruction memory comes and goes: a chunk's backward frees one unit after the other. The walk looks at every
such moment, and an instruction's sample is the moment with most bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from megazero.program.effects import Effects, effects
from megazero.program.instruction import Instruction, Op
from megazero.program.memory import BufferSizes, MemoryAccount, MemoryColumn, Place, Sample, kept_place
from megazero.program.memory_copies import ActivationCopies
from megazero.program.scope import Scope
from megazero.program.step_bytes import StepBytes
from megazero.program.values import Thing, Value


def spare_buffers(instructions: Sequence[Instruction], scope: Scope, sizes: StepBytes) -> tuple[int, ...]:
    """The bytes of each spare buffer that the pool has after a step, and keeps: it does not grow any more."""
    if not any(bucket.sharded_gradient for bucket in scope.shape.buckets):
        return ()
    return _settled(instructions, scope, sizes, lambda account: account.pool)


def host_buffers(instructions: Sequence[Instruction], scope: Scope, sizes: StepBytes) -> tuple[int, ...]:
    """The same of the buffers in host memory."""
    return _settled(instructions, scope, sizes, lambda account: account.host)


def _settled(
    instructions: Sequence[Instruction], scope: Scope, sizes: StepBytes, pool_of: Callable[[MemoryAccount], BufferSizes]
) -> tuple[int, ...]:
    """The buffers of a pool after so many steps that it does not grow any more."""
    found: tuple[int, ...] | None = None
    while True:  # the next step borrows in another order: it may need one more
        walk = _Walk(scope, sizes, ())
        pool_of(walk.account).spare += found or ()
        for number, i in enumerate(instructions):
            walk.run(number, i)
        before, found = found, tuple(sorted(pool_of(walk.account).spare))
        if found == before:
            return found


def samples(
    instructions: Sequence[Instruction], scope: Scope, sizes: StepBytes, spare: Sequence[int] = ()
) -> Iterator[Sample]:
    """The memory at every instruction of a list. spare: the pool's buffers at its begin."""
    walk = _Walk(scope, sizes, spare)
    for number, i in enumerate(instructions):
        walk.forget()
        yield walk.run(number, i)


def peak(instructions: Sequence[Instruction], scope: Scope, sizes: StepBytes, spare: Sequence[int] = ()) -> Sample:
    """The first instruction at which most bytes are alive, with every allocation. spare: as in `samples`."""
    walk = _Walk(scope, sizes, spare, with_places=True)
    found = [walk.run(number, i) for number, i in enumerate(instructions)]
    assert found, "a list without instructions"
    return found[-1]


class _Walk:
    """The account of one rank on its way through its list.

    in_flight  reductions on their way, the oldest first: what each of them holds
    across     what is on its way among the ranks that hold the same shard, until the end of the step's backwards
    """

    def __init__(self, scope: Scope, sizes: StepBytes, spare: Sequence[int], *, with_places: bool = False) -> None:
        self.scope, self.shape, self.sizes, self.with_places = scope, scope.shape, sizes, with_places
        self.account = account = MemoryAccount(scope.shape)
        account.pool.spare += spare
        self.copies = ActivationCopies(account, scope, sizes)
        self.in_flight: deque[list[Place]] = deque()
        self.across: list[int] = []
        self.launched = 0
        self.forget()
        for number, bucket in enumerate(self.shape.buckets):
            stored = 0 if bucket.is_loaded else bucket.stored_bytes
            account.hold(account.of_bucket(MemoryColumn.PARAMETERS, number), stored)
            if bucket.trained:
                parts = bucket.shards if bucket.sharded_gradient else 1
                account.hold(account.of_bucket(MemoryColumn.GRADIENTS, number), bucket.gradient_bytes // parts)
            if bucket.gathered_after_update and scope.trains and not scope.border.owed:
                # The gather that follows the last step's update arrives in this step.
                self._hold_blocks(number)
        account.hold(Place(MemoryColumn.GRADIENTS, part="error feedback"), sizes.feedback)
        account.hold(Place(MemoryColumn.OPTIMIZER), sizes.optimizer)
        account.hold(Place(MemoryColumn.OFFLOADED), sizes.host)
        account.hold(Place(MemoryColumn.LOGITS), sizes.logits)

    def forget(self) -> None:
        """Forget the moment with most bytes."""
        self._most = -1
        self._sample: Sample | None = None

    def run(self, number: int, i: Instruction) -> Sample:
        """Allocate and free what an instruction does; returns the moment with most bytes since `forget`."""
        self._at = number, i
        does = effects(i, self.scope)
        for value in does.needs:
            if value[0] is Thing.PARAMETERS:  # what was gathered in blocks, or loaded to be gathered, is read
                self.account.drop(self._blocks(value[1]))
                self.account.drop(self._shard(value[1]))
        if i.op is Op.FORWARD:
            self._forward(i, does)
        elif i.op is Op.BACKWARD_WEIGHT:
            self._weights(i)
        elif i.is_compute:
            self._backward(i, does)
        elif i.is_transfer:
            self._make(does)
            self._look()
            self._take(does)
        elif i.op is Op.LOAD:
            self._load(*i.buckets)
        elif i.op is Op.GATHER or i.op is Op.RELEASE:
            self._gather(i)
        elif i.op is Op.REDUCE:
            self._reduce(i)
        elif i.op is Op.REDUCE_ACROSS:
            self._reduce_across(i)
        elif i.op in (Op.REDUCE_PARTIAL, Op.NORM):
            self._complete()
        elif i.op in (Op.LEAVE, Op.FREE, Op.RETURN):
            self.copies.run(i)
        self._look()
        assert self._sample is not None
        return self._sample

    def _look(self, working: int = 0) -> None:
        """A moment, with the bytes that exist at this moment only."""
        total = self.account.total(working)
        if total > self._most:
            self._most = total
            self._sample = self.account.sample(*self._at, working, with_places=self.with_places)

    # --- computations ----------------------------------------------------------------------------------------------

    def _units(self, i: Instruction) -> range:
        return range(*self.scope.units_of(i))

    def _forward(self, i: Instruction, does: Effects) -> None:
        """Hold what the units keep. A unit has its whole input while it runs, and then what it keeps of it."""
        account, units, sizes = self.account, self._units(i), self.sizes.units[i.chunk]
        part = 0
        for value in does.takes:
            if value[0] is Thing.HIDDEN and self.scope.trains:
                keeps = sizes[units.start].input
                if keeps < self.sizes.hidden:
                    part = keeps  # a copy, which its forward makes
                else:
                    account.drop(self._border(value))
                account.hold(kept_place(i, units.start, "input"), keeps)
        for unit in units:
            if self.scope.trains:
                for bucket in self.shape.units[i.chunk][unit].in_forward:
                    self._borrow(bucket)
            later = unit > units.start
            kept = (sizes[unit].kept + sizes[unit].input * later) if self.scope.trains else 0
            account.hold(kept_place(i, unit), kept)
            self._look(max(0, sizes[unit].forward + (self.sizes.hidden if later else -part) - kept))
        self._take(does)
        self._make(does)

    def _backward(self, i: Instruction, does: Effects) -> None:
        """Free what the units have kept, and hold what a split backward keeps of it.

        The gradient of a graph's output lives to the graph's end, and that of another unit while the unit runs.
        """
        account, units, sizes = self.account, self._units(i), self.sizes.units[i.chunk]
        split = i.op is Op.BACKWARD_INPUT
        self.copies.give_back(i)
        for unit in reversed(units):
            own = self.shape.units[i.chunk][unit]
            for bucket in reversed(own.at_once if split else own.gradients):  # the last layer's gradients come first
                self._borrow(bucket)
            between = self.sizes.hidden * (unit < units.stop - 1)
            self._look(sizes[unit].backward - sizes[unit].kept + between)
            account.drop(kept_place(i, unit))
            if unit == units.start:
                account.drop(kept_place(i, unit, "input"))
            if split:
                if unit == units.stop - 1:
                    self._take(does)  # what is deferred has it
                account.hold(kept_place(i, unit, "deferred"), sizes[unit].deferred)
        self._take(does)
        self._make(does)

    def _weights(self, i: Instruction) -> None:
        """The weights' half: free what the input's half has kept for it."""
        for unit in reversed(self._units(i)):
            for bucket in reversed(self.shape.units[i.chunk][unit].gradients):
                self._borrow(bucket)
            self._look()
            self.account.drop(kept_place(i, unit, "deferred"))

    # --- hidden states and their gradients -------------------------------------------------------------------------

    def _make(self, does: Effects) -> None:
        """Hold those that an instruction makes. The gradient of the loss is a number."""
        for value in does.makes:
            if value[0] in (Thing.HIDDEN, Thing.HIDDEN_GRADIENT) and value[2] < self.scope.model_chunks:
                self.account.hold(self._border(value), self.sizes.hidden)

    def _take(self, does: Effects) -> None:
        """Drop those that an instruction takes."""
        for value in does.takes:
            if value[0] in (Thing.HIDDEN, Thing.HIDDEN_GRADIENT):
                self.account.drop(self._border(value))

    @staticmethod
    def _border(value: Value) -> Place:
        part = "gradient" if value[0] is Thing.HIDDEN_GRADIENT else ""
        return Place(MemoryColumn.HIDDEN, value[1], value[2], value[3], part=part)

    # --- model state -----------------------------------------------------------------------------------------------

    def _blocks(self, number: int) -> Place:
        return self.account.of_bucket(MemoryColumn.TRAVELLING, number, "parameters in blocks")

    def _hold_blocks(self, number: int) -> None:
        """What arrives of a gather in blocks, until it is read."""
        messages = self.shape.buckets[number].messages
        if messages.parameters_in_blocks and self.sizes.in_flight:
            self.account.drop(self._blocks(number))
            self.account.hold(self._blocks(number), messages.parameters)

    def _shard(self, number: int) -> Place:
        return self.account.of_bucket(MemoryColumn.GATHERED, number, "loaded")

    def _load(self, number: int) -> None:
        """The first part of a bucket takes memory for all of it: where it is used, or for what is gathered from it."""
        bucket = self.shape.buckets[number]
        in_place = bucket.is_loaded_in_place
        place = self.account.of_bucket(MemoryColumn.GATHERED, number) if in_place else self._shard(number)
        if place not in self.account.alive:
            self.account.hold(place, bucket.parameter_bytes if in_place else bucket.stored_bytes)

    def _gather(self, i: Instruction) -> None:
        for number in i.buckets:
            bucket, place = self.shape.buckets[number], self.account.of_bucket(MemoryColumn.GATHERED, number)
            if i.op is Op.RELEASE:
                self._look()
                self.account.drop(place)
                continue
            if bucket.gathered and not bucket.is_loaded_in_place:
                self.account.hold(place, bucket.parameter_bytes)
            self._hold_blocks(number)
            if bucket.messages.parameters_in_blocks:
                arriving = bucket.messages.parameters * (not self.sizes.in_flight)  # without overlap it is read at once
                made = bucket.messages.parameters // bucket.shards  # codes rest as they are sent
                self._look(made if bucket.code_bytes is None else arriving)

    def _borrow(self, number: int) -> None:
        """A buffer for the whole gradient of a bucket, unless it is in its column, or has one."""
        bucket, place = self.shape.buckets[number], self.account.of_bucket(MemoryColumn.BUFFERS, number)
        if bucket.sharded_gradient and place not in self.account.alive:
            self.account.hold(place, self.account.pool.take(bucket.gradient_bytes))

    def _reduce(self, i: Instruction) -> None:
        """What travels is held until the second reduction after it is launched: the buffer, or a copy of it."""
        account = self.account
        for number in i.buckets:
            self._borrow(number)
            bucket, held = self.shape.buckets[number], account.of_bucket(MemoryColumn.BUFFERS, number)
            self.launched += 1
            travelling = held._replace(column=MemoryColumn.TRAVELLING, part=f"reduction {self.launched}")
            received = travelling._replace(part=f"reduction {self.launched}, in blocks")
            if self.sizes.cast:
                account.hold(travelling, round(bucket.gradient_bytes * self.sizes.cast))
                self._look()
            borrowed = account.drop(held)
            if borrowed and self.sizes.cast:
                account.pool.spare.append(borrowed)
            elif borrowed:
                account.hold(travelling, borrowed)
            if bucket.messages.gradients_in_blocks:
                account.hold(received, bucket.messages.scatter)
                self._look(bucket.messages.scatter)
            places = [place for place in (travelling, received) if place in account.alive]
            if places:
                self.in_flight.append(places)
            self._look()
            while len(self.in_flight) > self.sizes.in_flight:
                self._end_oldest()

    def _end_oldest(self) -> None:
        """The oldest reduction is over. Its buffer goes back to the pool, a copy is freed."""
        travelling, *received = self.in_flight.popleft()
        size = self.account.drop(travelling)
        for place in received:
            self.account.drop(place)
        bucket = self.shape.buckets[travelling.bucket]
        if bucket.sharded_gradient and not self.sizes.cast:
            self.account.pool.spare.append(size)

    def _reduce_across(self, i: Instruction) -> None:
        """The shard travels once its own reduction is over: a copy of it, or what arrives in blocks."""
        while any(place.bucket in i.buckets for places in self.in_flight for place in places):
            self._end_oldest()
        for number in i.buckets:
            bucket = self.shape.buckets[number]
            size = round(bucket.gradient_bytes // bucket.shards * self.sizes.cast)
            size += bucket.messages.across_scatter * bucket.messages.gradients_in_blocks
            self.account.hold(self.account.of_bucket(MemoryColumn.TRAVELLING, number, "across"), size)
            self._look(bucket.messages.across_scatter * bucket.messages.gradients_in_blocks)
            self.across.append(number)

    def _complete(self) -> None:
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
