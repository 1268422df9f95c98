"""Bytes alive on a rank at every instruction of its list.

What a list allocates follows from its instructions: a gather allocates a bucket's parameters and a release frees them;
a backward frees what its forward has kept; under ZeRO-2 and 3, and where sums of gradients leave the device, the first
gradient of a bucket borrows a buffer for the whole of it from a pool, and its reduction gives it back when it is over.
How much that is follows from the buckets' shapes and from `StepBytes`. Activations that leave the device are in a
buffer of host memory from the copy there to their backward, or to the end of a write and from the read on. They are on
the device until they are freed, and from the copy back on.

Within an instruction memory comes and goes: a chunk's backward frees one unit after the other. The walk looks at every
such moment, and an instruction's sample is the moment with most bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from megazero.program.effects import effects
from megazero.program.instruction import ACTIVATION_MOVES, LOAD, RELEASE, UPDATE, Instruction, Op
from megazero.program.memory import (
    PASSING,
    BufferSizes,
    DetailedAccount,
    MemoryAccount,
    MemoryColumn,
    Place,
    Sample,
    StepBytes,
    kept_place,
)
from megazero.program.memory_state import FETCH, LEAVING, ActivationCopies, StateMemory
from megazero.program.scope import Scope
from megazero.program.values import Effects, Thing, Value


def spare_buffers(instructions: Sequence[Instruction], scope: Scope, sizes: StepBytes) -> tuple[int, ...]:
    """The bytes of each spare buffer that the pool has after a step, and keeps: it does not grow any more."""
    if not any(bucket.lends_gradient for bucket in scope.shape.buckets):
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
        walk = _Walk(scope, sizes, (), _Counts(scope))
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
    moments = _Samples(scope, with_places=False)
    walk = _Walk(scope, sizes, spare, moments)
    for number, i in enumerate(instructions):
        moments.forget()
        walk.run(number, i)
        yield moments.sample


def peak(instructions: Sequence[Instruction], scope: Scope, sizes: StepBytes, spare: Sequence[int] = ()) -> Sample:
    """The first instruction at which most bytes are alive, with every allocation. spare: as in `samples`."""
    assert instructions, "a list without instructions"
    moments = _Samples(scope, with_places=True)
    walk = _Walk(scope, sizes, spare, moments)
    for number, i in enumerate(instructions):
        walk.run(number, i)
    return moments.sample


class Fullest(NamedTuple):
    """The most bytes on the device, the instruction at which they are there, bytes of buffers in host memory, and of
    the most bytes those that come and go (`memory.PASSING`).
    """

    nbytes: int
    instruction: Instruction
    host: int
    passing: int


def fullest(instructions: Sequence[Instruction], scope: Scope, sizes: StepBytes) -> Fullest:
    """What `peak` and `host_buffers` say of a step whose pools do not grow any more, in fewer walks, and without what
    the peak is made of.
    """
    does = [effects(i, scope) for i in instructions]
    spare: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    while True:
        counts = _Counts(scope)
        walk = _Walk(scope, sizes, spare[0], counts)
        walk.account.host.spare += spare[1]
        for number, i in enumerate(instructions):
            walk.run(number, i, does[number])
        before = spare
        spare = tuple(sorted(walk.account.pool.spare)), tuple(sorted(walk.account.host.spare))
        if spare == before:
            return Fullest(counts.most, instructions[counts.fullest], sum(spare[1]), counts.passing)


class _Moments:
    """The moments at which a walk looks at its account, and of these the one with most bytes.

    They are no part of the walk. Else what looks for it, such as `StateMemory`, would be in a cycle with the walk,
    which only a collection frees.

    account    that of the walk
    at         number of the instruction that runs, and itself
    most       bytes of the fullest moment; -1: there was none
    """

    def __init__(self, account: MemoryAccount) -> None:
        self.account, self.most = account, -1
        self.at: tuple[int, Instruction] | None = None

    def look(self, working: int = 0) -> None:
        """A moment, with the bytes that exist at this moment only."""
        total = self.account.total(working)
        if total > self.most:
            self.most = total
            self._keep(working)
        elif total == self.most:
            self._compare(working)

    def _compare(self, working: int) -> None:
        """Another moment with as many bytes as the fullest one."""

    def _keep(self, working: int) -> None:
        """Keep what there is at this moment."""
        raise NotImplementedError


class _Samples(_Moments):
    """Moments that are kept whole."""

    def __init__(self, scope: Scope, *, with_places: bool) -> None:
        self._detailed, self._with_places = DetailedAccount(scope.shape), with_places
        super().__init__(self._detailed)
        self._sample: Sample | None = None

    def forget(self) -> None:
        """Forget the moment with most bytes."""
        self.most, self._sample = -1, None

    @property
    def sample(self) -> Sample:
        """The moment with most bytes since `forget`."""
        assert self._sample is not None
        return self._sample.trimmed  # only the fullest moment of many that were the fullest so far

    def _keep(self, working: int) -> None:
        assert self.at is not None, "no instruction runs yet"
        self._sample = self._detailed.sample(*self.at, working, with_places=self._with_places)


class _Counts(_Moments):
    """Moments of which bytes alone are kept, and the number of the instruction."""

    fullest = passing = 0

    def __init__(self, scope: Scope) -> None:
        super().__init__(MemoryAccount(scope.shape))

    def _compare(self, working: int) -> None:
        self.passing = max(self.passing, self._passing(working))  # which of equal moments comes first means nothing

    def _keep(self, working: int) -> None:
        assert self.at is not None, "no instruction runs yet"
        self.fullest, self.passing = self.at[0], self._passing(working)

    def _passing(self, working: int) -> int:
        return working + sum(self.account.totals[column] for column in PASSING)


class _Walk:
    """The account of one rank on its way through its list."""

    def __init__(self, scope: Scope, sizes: StepBytes, spare: Sequence[int], moments: _Moments) -> None:
        self.scope, self.shape, self.sizes = scope, scope.shape, sizes
        self.moments, self._look, self.account = moments, moments.look, moments.account
        account = self.account
        account.pool.spare += spare
        self.copies = ActivationCopies(account, scope, sizes)
        self.state = StateMemory(account, sizes, moments.look)
        for number, bucket in enumerate(self.shape.buckets):
            stored = 0 if bucket.is_loaded else bucket.stored_bytes
            account.hold(account.of_bucket(MemoryColumn.PARAMETERS, number), stored)
            if bucket.trained and not bucket.sums_leave:
                parts = bucket.shards if bucket.sharded_gradient else 1
                account.hold(account.of_bucket(MemoryColumn.GRADIENTS, number), bucket.gradient_bytes // parts)
            if bucket.gathered_after_update and scope.trains and not scope.border.owed:
                # The gather that follows the last step's update arrives in this step.
                self.state.hold_blocks(number)
        account.hold(Place(MemoryColumn.GRADIENTS, part="error feedback"), sizes.feedback)
        account.hold(Place(MemoryColumn.PARAMETERS, part="FP8 copies"), sizes.copies)
        account.hold(Place(MemoryColumn.OPTIMIZER), sizes.optimizer)
        account.hold(Place(MemoryColumn.OFFLOADED), sizes.host)
        account.hold(Place(MemoryColumn.LOGITS), sizes.logits)

    def run(self, number: int, i: Instruction, does: Effects | None = None) -> None:
        """Allocate and free what an instruction does. does: its effects, if they are known."""
        self.moments.at = number, i
        does = does or effects(i, self.scope)
        if self.state.arrives:
            for value in does.needs:
                if value[0] is Thing.PARAMETERS:
                    self.state.arrived(value[1])
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
        elif i.op == LOAD:
            self.state.load(*i.buckets)
        elif i.op is Op.GATHER or i.op == RELEASE:
            self.state.gather(i)
        elif i.op is Op.REDUCE:
            self.state.reduce(i)
        elif i.op is Op.REDUCE_ACROSS:
            self.state.reduce_across(i)
        elif i.op is Op.NORM or (i.op is Op.REDUCE_PARTIAL and not i.buckets):
            self.state.complete()
        elif i.op in LEAVING:
            self.state.leave(i)
        elif i.op == FETCH or i.op == UPDATE:
            self.state.fetch(i)
        elif i.op in ACTIVATION_MOVES:
            self.copies.run(i)
        self._look()

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
                if keeps < self.sizes.entering(i.model_chunk, units.start).states:
                    part = keeps  # a copy, which its forward makes
                else:
                    account.drop(self._border(value))
                account.hold(kept_place(i, units.start, "input"), keeps)
        for unit in units:
            if self.scope.trains:
                for bucket in self.shape.units[i.chunk][unit].in_forward:
                    self.state.borrow(bucket)
            later = unit > units.start
            kept = (sizes[unit].kept + sizes[unit].input * later) if self.scope.trains else 0
            account.hold(kept_place(i, unit), kept)
            entering = self.sizes.entering(i.model_chunk, unit).states if later else -part
            self._look(max(0, sizes[unit].forward + entering - kept))
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
                self.state.borrow(bucket)
            self._look(self.sizes.backward(i, unit, units) - sizes[unit].kept)
            account.drop(kept_place(i, unit))
            if unit == units.start:
                account.drop(kept_place(i, unit, "input"))
            if split:
                if unit == units.stop - 1 and self.sizes.graphs is None:
                    self._take(does)  # what is deferred has it
                account.hold(kept_place(i, unit, "deferred"), sizes[unit].deferred)
        self._take(does)
        self._make(does)

    def _weights(self, i: Instruction) -> None:
        """The weights' half: free what the input's half has kept for it."""
        for unit in reversed(self._units(i)):
            for bucket in reversed(self.shape.units[i.chunk][unit].gradients):
                self.state.borrow(bucket)
            self._look()
            self.account.drop(kept_place(i, unit, "deferred"))

    # --- hidden states and their gradients -------------------------------------------------------------------------

    def _make(self, does: Effects) -> None:
        """Hold those that an instruction makes. The gradient of the loss is a number."""
        for value in does.makes:
            if value[0] in (Thing.HIDDEN, Thing.HIDDEN_GRADIENT) and value[2] < self.scope.model_chunks:
                entering = self.sizes.entering(value[2], value[3])
                size = entering.gradients if value[0] is Thing.HIDDEN_GRADIENT else entering.states
                self.account.hold(self._border(value), size)

    def _take(self, does: Effects) -> None:
        """Drop those that an instruction takes."""
        for value in does.takes:
            if value[0] in (Thing.HIDDEN, Thing.HIDDEN_GRADIENT):
                self.account.drop(self._border(value))

    @staticmethod
    def _border(value: Value) -> Place:
        part = "gradient" if value[0] is Thing.HIDDEN_GRADIENT else ""
        return Place(MemoryColumn.HIDDEN, value[1], value[2], value[3], -1, part)
