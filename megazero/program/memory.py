"""The memory of a rank at a moment, by column, micro-batch, unit and bucket, and the sizes that a step is given:
`memory_walk` goes through a list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from megazero.program.instruction import Instruction
from megazero.program.shape import IN_FLIGHT, RankShape


class UnitMemory(Protocol):
    """Bytes of one unit for one micro-batch (`plan.activations`).

    input     of its input that the unit keeps until backward: all, a tp rank's part, or 0
    kept      all else that it keeps from its forward to its backward
    forward   the most that its forward holds, its output included and its input not
    backward  the most that its backward holds, what it keeps and its input's gradient included, and its output's
              gradient and its input not
    deferred  what it keeps from the input's half of a split backward to the weights' half
    stays     of its input and of what it keeps: on the device where the rest leaves it, as somebody else has it too
    """

    @property
    def input(self) -> int: ...
    @property
    def kept(self) -> int: ...
    @property
    def forward(self) -> int: ...
    @property
    def backward(self) -> int: ...
    @property
    def deferred(self) -> int: ...
    @property
    def stays(self) -> int: ...


@dataclass(frozen=True)
class UnitSizes:
    """`UnitMemory` as plain numbers."""

    input: int = 0
    kept: int = 0
    forward: int = 0
    backward: int = 0
    deferred: int = 0
    stays: int = 0


class GraphMemory(Protocol):
    """The backward of units that are one graph, where it is not that of each unit and the gradient of its output. What
    a split one defers are gradients of parameters alone.
    """

    def backward(self, chunk: int, unit: int, units: range) -> int:
        """The most that the backward of a unit of these holds: what it keeps, its input's gradient and, but for the
        last one, its output's gradient included, and its input not. chunk: the rank's own number.
        """


class HiddenBytes(NamedTuple):
    """Bytes of the hidden states between two units of one micro-batch, and of their gradients. What an earlier unit of
    the chunk keeps of them counts there.
    """

    states: int
    gradients: int


@dataclass(frozen=True)
class StepBytes:
    """The sizes of what a rank holds, beside its buckets' columns.

    hidden     of the hidden states between two units of one micro-batch, and of a message between stages
    uneven     of those that differ from `hidden`, by model chunk and by the unit that they enter
    graphs     of units in one graph; None: the gradient of a unit's output is there until the unit is done
    units      by the rank's own number of a chunk and by unit
    optimizer  of all optimizer columns on the device: master weights and moments
    host       of what is not there, in host memory, where that is the device's own: on a CPU
    copies     of weights in FP8 that stay from step to step
    feedback   of what error feedback keeps of gradients
    logits     of a block of logits that is kept from step to step, as on a CPU
    host_buffer
               of each host buffer through which activations go on to disks; 0: each is as large as what it holds
    in_flight  number of reductions with a buffer of their own that are on their way at a time; 0 without overlap
    cast       of the copy that is reduced, for each byte of a gradient, where gradients travel in another dtype
    """

    hidden: int
    units: tuple[tuple[UnitMemory, ...], ...]
    optimizer: int = 0
    host: int = 0
    copies: int = 0
    feedback: int = 0
    logits: int = 0
    host_buffer: int = 0
    in_flight: int = IN_FLIGHT
    cast: float = 0.0
    uneven: Mapping[tuple[int, int], HiddenBytes] = field(default_factory=dict)
    graphs: GraphMemory | None = None

    def backward(self, i: Instruction, unit: int, units: range) -> int:
        """The most that the backward of a unit of these holds, as of `GraphMemory`."""
        if self.graphs is not None:
            return self.graphs.backward(i.chunk, unit, units)
        is_inner = unit < units.stop - 1
        between = self.entering(i.model_chunk, unit + 1).gradients if is_inner else 0
        return self.units[i.chunk][unit].backward + between

    def entering(self, model_chunk: int, unit: int) -> HiddenBytes:
        """Of what enters a unit."""
        return self.uneven.get((model_chunk, unit)) or HiddenBytes(self.hidden, self.hidden)


UnitKey = tuple[int, int]
"""The rank's own number of a chunk, and a unit of it."""


class MemoryColumn(Enum):
    """What memory is for. All of it is the device's but HOST; OFFLOADED is where both are the same."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    OFFLOADED = "offloaded state in host memory"
    GRADIENTS = "gradients"
    LOGITS = "logits"
    GATHERED = "gathered parameters"
    BUFFERS = "whole gradients"
    TRAVELLING = "messages on model state"
    SPARE = "spare buffers"
    ACTIVATIONS = "activations"
    HIDDEN = "hidden states and messages"
    WORKING = "working memory"
    HOST = "host memory"

    __hash__ = object.__hash__


PASSING = (MemoryColumn.GATHERED, MemoryColumn.TRAVELLING, MemoryColumn.ACTIVATIONS, MemoryColumn.HIDDEN)
"""What is allocated and freed again in every step, beside WORKING. Model state is not, and neither is what the first
step makes and later ones have: blocks of logits, and the buffers of a pool.
"""


class Place(NamedTuple):
    """One allocation: its column, and the numbers that apply to it; -1 for others."""

    column: MemoryColumn
    micro_batch: int = -1
    chunk: int = -1
    unit: int = -1
    bucket: int = -1
    part: str = ""


def kept_place(i: Instruction, unit: int, part: str = "") -> Place:
    """The place of what a unit keeps of a micro-batch, `i` being a computation of it or a copy of that."""
    return Place(MemoryColumn.ACTIVATIONS, i.micro_batch, i.chunk, unit, -1, part)


@dataclass(frozen=True)
class Sample:
    """The memory while an instruction runs, at the moment with most bytes.

    number         of the instruction in the list
    instruction    itself
    columns        bytes by column, where there are any. `total` is their sum without the host's
    micro_batches  bytes of activations and hidden states by micro-batch
    units          bytes of activations and of its buckets by unit. A bucket counts for the first unit that reads it
    places         bytes by allocation; only where they are asked for, since a list can have millions of them
    """

    number: int
    instruction: Instruction
    columns: Mapping[MemoryColumn, int]
    micro_batches: Mapping[int, int]
    units: Mapping[UnitKey, int]
    places: Mapping[Place, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(size for column, size in self.columns.items() if column is not MemoryColumn.HOST)

    @property
    def trimmed(self) -> Sample:
        """The same without entries that have no bytes."""
        return Sample(
            self.number,
            self.instruction,
            {column: size for column, size in self.columns.items() if size},
            {micro_batch: size for micro_batch, size in self.micro_batches.items() if size},
            {unit: size for unit, size in self.units.items() if size},
            {place: size for place, size in self.places.items() if size},
        )


@dataclass
class BufferSizes:
    """Buffers that are borrowed and given back, as `zero.storage.BufferPool` and `system.host_copies.HostBuffers` have
    them. Sizes in bytes.
    """

    spare: list[int] = field(default_factory=list)

    def take(self, size: int) -> int:
        """The size of the smallest spare buffer that is large enough, else of a new one."""
        fitting = min((buffer for buffer in self.spare if buffer >= size), default=None)
        if fitting is None:
            return size
        self.spare.remove(fitting)
        return fitting


class MemoryAccount:
    """What is alive on a rank.

    alive   bytes by allocation; totals and held, the bytes on the device, are sums of it
    pool    the spare buffers
    host    the spare buffers in host memory
    """

    def __init__(self, shape: RankShape) -> None:
        self.shape = shape
        self.alive: dict[Place, int] = {}
        self.totals, self.held = dict.fromkeys(MemoryColumn, 0), 0
        self.pool, self.host = BufferSizes(), BufferSizes()
        self._wholes: dict[tuple[MemoryColumn, int], Place] = {}
        """The places of whole buckets: each micro-batch comes to them again."""

    def of_bucket(self, column: MemoryColumn, number: int, part: str = "") -> Place:
        """The place of a bucket in a column."""
        if part:
            return Place(column, -1, self.shape.buckets[number].chunk, -1, number, part)
        key = column, number
        if key not in self._wholes:
            self._wholes[key] = Place(column, -1, self.shape.buckets[number].chunk, -1, number)
        return self._wholes[key]

    def hold(self, place: Place, size: int) -> None:
        """Allocate. Nothing that is alive may have the same place."""
        assert place not in self.alive, f"{place} is held twice"
        if size:
            self.alive[place] = size
            self._count(place, size)

    def drop(self, place: Place) -> int:
        """Free; returns the bytes, 0 if there are none."""
        size = self.alive.pop(place, 0)
        if size:
            self._count(place, -size)
        return size

    def total(self, working: int) -> int:
        """All bytes on the device, with those that exist at this moment only."""
        return self.held + sum(self.pool.spare) + working

    def _count(self, place: Place, size: int) -> None:
        self.totals[place.column] += size
        if place.column is not MemoryColumn.HOST:
            self.held += size


class DetailedAccount(MemoryAccount):
    """An account that also has the bytes by micro-batch and by unit (`Sample`)."""

    def __init__(self, shape: RankShape) -> None:
        super().__init__(shape)
        self.micro_batches: Counter[int] = Counter()
        self.units: Counter[UnitKey] = Counter()
        self._readers: dict[int, UnitKey] = {}
        for chunk, units in enumerate(shape.units):
            for number, unit in enumerate(units):
                for bucket in unit.forward:
                    self._readers.setdefault(bucket, (chunk, number))

    def sample(self, number: int, i: Instruction, working: int, *, with_places: bool) -> Sample:
        """This moment, with entries that have no bytes (`Sample.trimmed`)."""
        extra = {Place(MemoryColumn.SPARE): sum(self.pool.spare), Place(MemoryColumn.WORKING): working}
        return Sample(
            number,
            i,
            self.totals | {place.column: size for place, size in extra.items()},
            dict(self.micro_batches),
            dict(self.units),
            self.alive | extra if with_places else {},
        )

    def _count(self, place: Place, size: int) -> None:
        super()._count(place, size)
        if place.column is MemoryColumn.HOST:
            return
        if place.micro_batch >= 0:
            self.micro_batches[place.micro_batch] += size
        if place.bucket in self._readers:
            self.units[self._readers[place.bucket]] += size
        elif place.column is MemoryColumn.ACTIVATIONS:
            self.units[place.chunk, place.unit] += size
