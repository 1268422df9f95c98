"""Bytes alive on a rank at every instruction of its list, by column, micro-batch, unit and bucket.

What a list allocates follows from its instructions: a gather allocates a bucket's parameters and a release frees them;
a backward frees what its forward has kept; under ZeRO-2 and 3 the first backward that adds to a gradient borrows a
buffer for the whole of it from a pool, and its reduction gives it back when it is over. How much that is follows from
the buckets' shapes and from `StepBytes`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from megazero.program.effects import Effects, Scope, Thing, effects
from megazero.program.instruction import Instruction, Op
from megazero.program.step_bytes import StepBytes


class MemoryColumn(Enum):
    """What memory is for."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    GATHERED = "gathered parameters"
    BUFFERS = "whole gradients"
    TRAVELLING = "gradients in flight"
    SPARE = "spare buffers"
    ACTIVATIONS = "activations"
    HIDDEN = "hidden states and messages"
    WORKING = "working memory"

    __hash__ = object.__hash__


class Place(NamedTuple):
    """One allocation: its column, and the numbers that apply to it; -1 for others."""

    column: MemoryColumn
    micro_batch: int = -1
    chunk: int = -1
    unit: int = -1
    bucket: int = -1
    half: str = ""


@dataclass(frozen=True)
class Sample:
    """The memory while an instruction runs.

    number       of the instruction in the list
    instruction  itself
    columns      bytes by column, where there are any
    places       bytes by allocation
    """

    number: int
    instruction: Instruction
    columns: Mapping[MemoryColumn, int]
    places: Mapping[Place, int]

    @property
    def total(self) -> int:
        return sum(self.columns.values())


def samples(instructions: Sequence[Instruction], scope: Scope, sizes: StepBytes) -> Iterator[Sample]:
    """The memory at every instruction of a list: the most while it runs, before what it ends is freed."""
    walk = _Walk(scope, sizes)
    for number, i in enumerate(instructions):
        working = walk.run(i)
        yield Sample(number, i, walk.columns(working), walk.places(working))
        walk.free()


def peak(instructions: Sequence[Instruction], scope: Scope, sizes: StepBytes) -> Sample:
    """The first instruction at which most bytes are alive."""
    walk, most, found = _Walk(scope, sizes), -1, None
    for number, i in enumerate(instructions):
        working = walk.run(i)
        total = sum(walk.totals.values()) + sum(walk.pool.spare) + working
        if total > most:
            most, found = total, Sample(number, i, walk.columns(working), walk.places(working))
        walk.free()
    assert found is not None, "a list without instructions"
    return found


@dataclass
class _Pool:
    """Buffers that are borrowed and given back, as `zero.storage.BufferPool` has them. Sizes in bytes."""

    spare: list[int] = field(default_factory=list)

    def take(self, size: int) -> int:
        """The size of the smallest spare buffer that is large enough, else of a new one."""
        fitting = min((buffer for buffer in self.spare if buffer >= size), default=None)
        if fitting is None:
            return size
        self.spare.remove(fitting)
        return fitting


@dataclass
class _Walk:
    """alive: bytes by allocation. totals: by column. ending: what is freed when the instruction is over."""

    scope: Scope
    sizes: StepBytes
    alive: dict[Place, int] = field(default_factory=dict)
    totals: dict[MemoryColumn, int] = field(default_factory=lambda: dict.fromkeys(MemoryColumn, 0))
    ending: list[Place] = field(default_factory=list)
    pool: _Pool = field(default_factory=_Pool)
    in_flight: deque[Place] = field(default_factory=deque)
    launched: int = 0

    def __post_init__(self) -> None:
        for number, bucket in enumerate(self.scope.shape.buckets):
            whole, gradient = bucket.parameter_bytes, bucket.gradient_bytes
            parameter = whole // bucket.shards if bucket.gathered else whole
            self._hold(Place(MemoryColumn.PARAMETERS, chunk=bucket.chunk, bucket=number), parameter)
            if bucket.trained:
                kept = gradient // bucket.shards if bucket.sharded_gradient else gradient
                self._hold(Place(MemoryColumn.GRADIENTS, chunk=bucket.chunk, bucket=number), kept)
        self._hold(Place(MemoryColumn.OPTIMIZER), self.sizes.optimizer)

    def columns(self, working: int) -> dict[MemoryColumn, int]:
        spare = sum(self.pool.spare)
        found = self.totals | {MemoryColumn.SPARE: spare, MemoryColumn.WORKING: working}
        return {column: size for column, size in found.items() if size}

    def places(self, working: int) -> Mapping[Place, int]:
        extra = {Place(MemoryColumn.SPARE): sum(self.pool.spare), Place(MemoryColumn.WORKING): working}
        return {place: size for place, size in (self.alive | extra).items() if size}

    def _hold(self, place: Place, size: int) -> None:
        self.alive[place] = size
        self.totals[place.column] += size

    def free(self) -> None:
        """The end of an instruction."""
        for place in self.ending:
            self.totals[place.column] -= self.alive.pop(place)
        self.ending.clear()

    def run(self, i: Instruction) -> int:
        """Allocate what an instruction makes; returns the working memory that it needs beside."""
        does = effects(i, self.scope)
        working = 0
        if i.op is Op.FORWARD:
            working = self._forward(i)
        elif i.is_compute:
            working = self._backward(i, does)
        self._hand_over(i, does)
        if i.op is Op.GATHER or i.op is Op.RELEASE:
            self._gather(i)
        elif i.op is Op.REDUCE:
            self._reduce(i)
        elif i.op is Op.REDUCE_ACROSS:
            while any(place.bucket in i.buckets for place in self.in_flight):
                self._end_oldest()
        elif i.op in (Op.REDUCE_PARTIAL, Op.NORM):
            while self.in_flight:
                self._end_oldest()
        return working

    def _units(self, i: Instruction) -> range:
        return range(*self.scope.units_of(i))

    def _forward(self, i: Instruction) -> int:
        """Hold what the units keep; returns the most that they hold beside what is kept in the end."""
        units, kept, most = self.sizes.units[i.chunk], 0, 0
        for unit in self._units(i):
            most = max(most, kept + units[unit].forward)
            if self.scope.trains:
                kept += units[unit].kept
                self._hold(Place(MemoryColumn.ACTIVATIONS, i.micro_batch, i.chunk, unit), self._kept(i, unit))
        return max(0, most - kept - self._output(i))

    def _kept(self, i: Instruction, unit: int) -> int:
        """What a unit keeps. The input of a graph's first unit is kept in any case."""
        own, first = self.sizes.units[i.chunk][unit], self.scope.units_of(i)[0]
        if unit > first:
            return own.kept + own.input
        reads_tokens = i.model_chunk == 0 and unit == 0
        return own.kept + (0 if reads_tokens else max(own.input, self.sizes.hidden))

    def _output(self, i: Instruction) -> int:
        ends_model = self.scope.units_of(i)[1] == len(self.scope.shape.units[i.chunk])
        return 0 if ends_model and i.model_chunk + 1 == self.scope.model_chunks else self.sizes.hidden

    def _backward(self, i: Instruction, does: Effects) -> int:
        """Free what the units have kept; returns the most that they hold beside it."""
        units, freed, most = self.sizes.units[i.chunk], 0, 0
        for unit in reversed(self._units(i)):
            own = units[unit]
            if i.op is not Op.BACKWARD_WEIGHT:
                kept = Place(MemoryColumn.ACTIVATIONS, i.micro_batch, i.chunk, unit)
                self.ending.append(kept)
                most = max(most, own.backward - own.kept - freed)
                freed += self.alive[kept]
            else:
                self.ending.append(Place(MemoryColumn.ACTIVATIONS, i.micro_batch, i.chunk, unit, half="deferred"))
        for value in dict.fromkeys(does.adds):
            self._borrow(value[1])
        if i.op is Op.BACKWARD_INPUT:
            for unit in self._units(i):
                place = Place(MemoryColumn.ACTIVATIONS, i.micro_batch, i.chunk, unit, half="deferred")
                self._hold(place, units[unit].deferred)
                most -= units[unit].deferred
        made = self.sizes.hidden * sum(value[0] is Thing.HIDDEN_GRADIENT for value in does.makes)
        return max(0, most - made)

    def _hand_over(self, i: Instruction, does: Effects) -> None:
        """Hidden states and their gradients that come and go. The gradient of the loss is a number."""
        for value in does.takes:
            if value[0] is Thing.HIDDEN or value[0] is Thing.HIDDEN_GRADIENT:
                self.ending.append(self._border(value))
        for value in does.makes:
            if value[0] is Thing.HIDDEN or value[0] is Thing.HIDDEN_GRADIENT:
                self._hold(self._border(value), 0 if value[2] == self.scope.model_chunks else self.sizes.hidden)
        # What a forward keeps of its input is counted with the activations from here on.
        if i.op is Op.FORWARD and self.scope.trains:
            for place in [place for place in self.ending if place.column is MemoryColumn.HIDDEN]:
                self.totals[place.column] -= self.alive.pop(place)
                self.ending.remove(place)

    @staticmethod
    def _border(value: tuple[Thing, int, int, int, int]) -> Place:
        half = "gradient" if value[0] is Thing.HIDDEN_GRADIENT else ""
        return Place(MemoryColumn.HIDDEN, value[1], value[2], value[3], half=half)

    def _gather(self, i: Instruction) -> None:
        for number in i.buckets:
            bucket = self.scope.shape.buckets[number]
            place = Place(MemoryColumn.GATHERED, chunk=bucket.chunk, bucket=number)
            if not bucket.gathered:
                continue
            if i.op is Op.GATHER:
                self._hold(place, bucket.parameter_bytes)
            else:
                self.ending.append(place)

    def _borrow(self, number: int) -> None:
        """A buffer for the whole gradient of a bucket, unless it is in its column, or has one."""
        bucket = self.scope.shape.buckets[number]
        place = Place(MemoryColumn.BUFFERS, chunk=bucket.chunk, bucket=number)
        if bucket.sharded_gradient and place not in self.alive:
            self._hold(place, self.pool.take(bucket.gradient_bytes))

    def _reduce(self, i: Instruction) -> None:
        """What travels is held until the second reduction after it is launched: the buffer, or a copy of it."""
        for number in i.buckets:
            bucket = self.scope.shape.buckets[number]
            held = Place(MemoryColumn.BUFFERS, chunk=bucket.chunk, bucket=number)
            borrowed = self.alive.pop(held, 0)
            self.totals[held.column] -= borrowed
            if borrowed and self.sizes.cast:
                self.pool.spare.append(borrowed)
            size = round(bucket.gradient_bytes * self.sizes.cast) or borrowed
            if size:
                self.launched += 1
                travelling = held._replace(column=MemoryColumn.TRAVELLING, half=str(self.launched))
                self._hold(travelling, size)
                self.in_flight.append(travelling)
            while size and len(self.in_flight) > self.sizes.in_flight:
                self._end_oldest()

    def _end_oldest(self) -> None:
        """The oldest reduction is over. Its buffer goes back to the pool, a copy is freed."""
        place = self.in_flight.popleft()
        size = self.alive.pop(place)
        self.totals[place.column] -= size
        if not self.sizes.cast:
            self.pool.spare.append(size)
