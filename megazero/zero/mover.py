"""Moves of model state between its tiers, and work on it in host memory, beside the computation.

One mover executes what a step's list says of any column. A copy has one end in host memory (`HostPlace`): where the
piece rests there, or a slot through which it passes on its way between the device and disks. The other end is a tensor
on the device or a piece of the swap files. Every copy, addition and update runs on a lane and waits there for what it
needs. So the program only says what has to happen, and waits for nothing before it reads the parameters (`ready`).

Sums of gradients (--offload-gradients): a step's first gradient of a part is stored as its sum, each later one is
copied to a slot and added. The last addition is followed by a count of the squares, for the norm. An update on the
device has its gradient brought back in a spare buffer for whole gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from fused_ops.norm import sum_of_squares
from megazero.config.tiers import SLOTS, Tier
from megazero.disk.lanes import Need
from megazero.program.instruction import READS, STATE_MOVES, Instruction, Kind, Op, Piece, TierMove
from megazero.program.passes.slots import SLOT_MEMORY, ops_of_part
from megazero.program.shape import PartShape, RankShape
from megazero.zero.gatherer import ParameterGatherer
from megazero.zero.memories import PartSlot, Ring, Tiers
from megazero.zero.parts import Key, Range, Resident, Resting, piece_name
from megazero.zero.reducer import GradientReducer
from megazero.zero.sharding import OPTIMIZER, Column
from megazero.zero.storage import StoredColumn

PartTensors = Mapping[Column, Tensor]
"""The columns of a part in host memory, [stop - start] each."""


class HostPlace(NamedTuple):
    """Host memory that one end of a copy is, and what there is to wait for.

    memory   of the piece, 1-D
    free     before it is overwritten
    arrived  before it is read
    changed  says whether it has anything new; None: it always has
    """

    memory: Tensor
    free: list[Need]
    arrived: list[Need]
    changed: Callable[[], bool] | None = None


class Squares(NamedTuple):
    """Sums of squares, 0-dim float64 in host memory each: of runs that count in the norm here, and of others."""

    counted: list[Tensor]
    others: list[Tensor]


class Mover:
    """Moves the model state of a rank, by number of the bucket in the list of its shape.

    resting    where each bucket rests (`zero.parts`)
    columns    of the trained buckets
    reducer    has reduced gradients, and spare buffers on the device
    gatherer   has the parameters of all buckets, and memory for those that are loaded
    residents  what rests on the device, and passes through slots to disks
    tp         this rank's index
    """

    def __init__(
        self,
        shape: RankShape,
        resting: Sequence[Resting],
        columns: Mapping[Column, StoredColumn],
        tiers: Tiers,
        reducer: GradientReducer,
        gatherer: ParameterGatherer,
        residents: Sequence[Resident],
        tp: int,
    ) -> None:
        self.resting, self.columns, self.tiers = resting, columns, tiers
        self.reducer, self.gatherer = reducer, gatherer
        self.state_dtypes = {column: columns[column].dtype for column in OPTIMIZER if column in columns}
        stays = max((one.stop - one.start for one in residents), default=0)
        self.updates = update_ring(shape, stays * self.state_bytes, tiers)
        """For parts that are updated in host memory, or whose new parameters or sums go to disks."""
        self.loads = load_ring(shape, tiers)
        """For parameters that are read: these may be under way beside late updates."""
        self._runs = [tuple(own.counted_runs(tp, counted=which) for which in (True, False)) for own in reducer.buckets]
        self._updated: dict[int, list[Need]] = defaultdict(list)
        """By bucket: what to wait for before its updated parameters are where they rest, in memory."""
        self._summed: dict[int, list[Need]] = defaultdict(list)
        """By bucket: what to wait for before its sum that rests in host memory is whole."""
        self._readers: dict[Key, list[Need]] = defaultdict(list)
        """Of sums that rest in host memory: what to wait for before they are overwritten."""
        self._squares: dict[int, list[Future[Squares]]] = defaultdict(list)
        self._fetched: dict[Key, tuple[Tensor, list[Need]]] = {}

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer state of one element."""
        return sum(dtype.itemsize for dtype in self.state_dtypes.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, in host memory."""
        return self.updates.nbytes + self.loads.nbytes

    # --- what a step's list says -----------------------------------------------------------------------------------

    def move(self, i: Instruction) -> None:
        """Start what an instruction of `STATE_MOVES` says, on its lane."""
        ACTIONS[i.op](self, i)

    def read(self, i: Instruction) -> None:
        """Start to read a part's piece from disks into its slot."""
        place, name = self._place(i, piece_of(i)), piece_name(piece_of(i), i.key)
        over = self.tiers.disks.read({name: place.memory}, needs=tuple(place.free)).wait
        place.arrived.append(over)
        self._passed(i, over)

    def write(self, i: Instruction) -> None:
        """Start to write a part's piece from its slot to disks."""
        place = self._place(i, piece_of(i))
        assert place.arrived, f"{i} comes before what makes it"
        piece = {piece_name(piece_of(i), i.key): place.memory}
        self._passed(i, self.tiers.disks.write(piece, needs=tuple(place.arrived)).wait)

    def to_host(self, i: Instruction) -> None:
        """Start to copy to host memory: a reduced gradient, or updated weights as parameters."""
        place, source = self._place(i, piece_of(i)), self._source(i)
        over = self.tiers.to_host.copy(place.memory, source, after=tuple(place.free)).result
        place.arrived.append(over)
        if self._leaves(i):
            self.reducer.leaving.leaves(i.buckets[0], source.numel(), over)
        if i.slot < 0:
            place.free.clear()  # else who has read a sum would be waited for in every step to come
        self._passed(i, over)

    def to_device(self, i: Instruction) -> None:
        """Start to copy to the device: parameters for a use or after their update, or a sum for an update there."""
        place, (target, arrived) = self._place(i, piece_of(i)), self._target(i)
        assert i.slot < 0 or place.arrived, f"{i} comes before what makes it"
        after, changed = tuple(place.arrived), place.changed or _always
        over = self.tiers.to_device.copy(target, place.memory, after=after, wanted=changed).result
        arrived.append(over)
        if i.slot < 0:
            place.free.append(over)
        self._passed(i, over)

    def add(self, i: Instruction) -> None:
        """Start to add the gradient of a part that was copied to its sum."""
        gradient, total = self._place(i, Piece.GRADIENTS), self._place(i, Piece.SUMS)
        needs = *gradient.arrived, *total.arrived
        added = self.tiers.updates.submit(_added, needs, total.memory, gradient.memory)
        total.arrived.append(added.result)
        self._passed(i, added.result)

    def count(self, i: Instruction) -> None:
        """Start to count the squares of a bucket's sum (-1), or of a part of it."""
        index, place, (start, stop) = i.buckets[0], self._place(i, Piece.SUMS), self._range(i)
        counted, others = (
            [
                place.memory[max(start, first) - start : min(stop, last) - start]
                for first, last in runs
                if max(start, first) < min(stop, last)
            ]
            for runs in self._runs[index]
        )
        squares = self.tiers.updates.submit(_squares, tuple(place.arrived), counted, others)
        self._squares[index].append(squares)
        if i.part < 0:
            del self._summed[index]
        self._passed(i, squares.result)

    # --- updates ---------------------------------------------------------------------------------------------------

    def part_to_update(self, i: Instruction) -> tuple[list[Need], PartTensors]:
        """What to wait for before a part is updated in host memory, and its columns there."""
        slot, sums = self.updates.slot_of(i), self.resting[i.buckets[0]].sums
        tensors = {
            **self.state_of(i.key, slot),
            Column.GRADIENT: self._place(i, Piece.GRADIENTS if sums is Tier.DEVICE else Piece.SUMS).memory,
            Column.PARAMETER: self._place(i, Piece.PARAMETERS).memory,
        }
        return [*slot.free, *slot.arrived], tensors

    def updating(self, i: Instruction, changed: Callable[[], bool]) -> None:
        """The update of a part in host memory is under way. changed: waits for it, and says whether it has changed
        anything.
        """
        index, slot = i.buckets[0], self.updates.slot_of(i)
        slot.changed = changed
        slot.arrived.append(changed)
        if self.resting[index].sums is Tier.HOST:
            self._readers[i.key].append(changed)
        if self.resting[index].rests is Tier.HOST:
            self._updated[index].append(changed)
        self.updates.passed(i, changed)

    def squares(self, index: int) -> Squares:
        """The squares of a bucket's gradient. Waits for the count. Raises what has gone wrong on the way of the sum."""
        counts = [count.result() for count in self._squares.pop(index, [])]
        return Squares(
            [one for each in counts for one in each.counted], [one for each in counts for one in each.others]
        )

    def fetched(self, key: Key, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the bucket of a gradient that was brought back. Waits for it."""
        buffer, arrived = self._fetched[key]
        for copied in arrived:
            copied()
        first = self.resting[key[0]].parts[key[1]].start
        return buffer[start - first : stop - first]

    def used(self, key: Key) -> None:
        """The update on the device has been given its gradient."""
        self.reducer.pool.give(self._fetched.pop(key)[0])

    # --- waiting ---------------------------------------------------------------------------------------------------

    def ready(self, buckets: Iterable[int]) -> None:
        """Return once the updated parameters of these buckets are there. Raises what has gone wrong on their way."""
        for index in buckets:
            for arrived in self._updated.pop(index, ()):
                arrived()

    def wait(self) -> None:
        """Return once all parts have come to the end of their way. Raises what has gone wrong on it."""
        self.updates.assert_idle()
        self.ready(list(self._updated))
        self.updates.wait()

    def discard(self) -> None:
        """Forget the sums of a step. Waits for what is under way."""
        for index in list(self._squares):
            self.squares(index)
        self._summed.clear()
        self.wait()

    # --- the ends of a copy ----------------------------------------------------------------------------------------

    def state_of(self, key: Key, slot: PartSlot) -> dict[Column, Tensor]:
        """The optimizer state of a part that is in host memory: where it rests, or in its slot."""
        start, stop, tier = self.resting[key[0]].parts[key[1]]
        if tier is Tier.DISK:
            return self.state_in(slot, stop - start)
        return {column: self.columns[column].view(key[0], start, stop) for column in self.state_dtypes}

    def state_in(self, slot: PartSlot, numel: int) -> dict[Column, Tensor]:
        """The optimizer state of so many elements in a slot, one column behind the other."""
        memory, sizes = slot.of(Piece.STATE, numel * self.state_bytes), self.state_dtypes.values()
        pieces = memory.split([numel * dtype.itemsize for dtype in sizes])
        return {
            column: piece.view(dtype) for (column, dtype), piece in zip(self.state_dtypes.items(), pieces, strict=True)
        }

    def _range(self, i: Instruction) -> Range:
        """The elements [start, stop) of its bucket that an instruction moves. All of them (-1) are what the rank stores
        of a bucket that is loaded, else what the rank updates.
        """
        index, part = i.key
        if part >= 0:
            return self.resting[index].parts[part][:2]
        at = self.gatherer.parameters[index]
        return at.column.range_of(at.index) if i.op in READS else self.columns[Column.EXP_AVG].range_of(index)

    def _place(self, i: Instruction, piece: Piece) -> HostPlace:
        """Where a piece of a part is in host memory: at rest or in the slot of the instruction."""
        index, (start, stop), rests = i.buckets[0], self._range(i), self.resting[i.buckets[0]]
        at, gradients = self.gatherer.parameters[index], self.columns[Column.GRADIENT]
        if piece is Piece.PARAMETERS and rests.rests is Tier.HOST:
            return HostPlace(at.column.view(at.index, start, stop), [], self._updated[index])
        if piece is Piece.SUMS and rests.sums is Tier.HOST:
            return HostPlace(gradients.view(index, start, stop), self._readers[i.key], self._summed[index])
        slot = self._ring(i).slot_of(i)
        if piece is Piece.STATE:
            memory = slot.of(piece, (stop - start) * self.state_bytes)
        else:
            memory = slot.of(piece, stop - start, (at.column if piece is Piece.PARAMETERS else gradients).dtype)
        return HostPlace(memory, slot.free, slot.arrived, slot.changed)

    def _leaves(self, i: Instruction) -> bool:
        """Whether a copy to host memory takes a reduced gradient whose sum is not on the device."""
        return piece_of(i) is not Piece.PARAMETERS and self.resting[i.buckets[0]].sums is not Tier.DEVICE

    def _source(self, i: Instruction) -> Tensor:
        """What a copy to host memory reads on the device."""
        index, (start, stop) = i.buckets[0], self._range(i)
        if self._leaves(i):
            return self.reducer.reduced(index, start, stop)
        column = Column.MASTER if piece_of(i) is Piece.PARAMETERS else Column.GRADIENT
        return self.columns[column].view(index, start, stop)

    def _target(self, i: Instruction) -> tuple[Tensor, list[Need]]:
        """Where a copy to the device goes, and the list of what there is to wait for before that is read."""
        index, (start, stop) = i.buckets[0], self._range(i)
        if piece_of(i) is Piece.SUMS:
            self._fetched[i.key] = buffer, arrived = self.reducer.pool.take(stop - start), list[Need]()
            return buffer[: stop - start], arrived
        if self.resting[index].rests is Tier.DEVICE:
            return self.columns[Column.PARAMETER].view(index, start, stop), self._updated[index]
        return self.gatherer.loading(index, start, stop)

    def _ring(self, i: Instruction) -> Ring:
        return self.loads if i.op in READS else self.updates

    def _passed(self, i: Instruction, over: Need) -> None:
        """An instruction has begun. over: waits for its end."""
        if i.slot >= 0:
            self._ring(i).passed(i, over)


def piece_of(i: Instruction) -> Piece:
    """What the host's end of a copy holds: an update's gradient that does not come from the device is a sum."""
    assert isinstance(i.op, TierMove)
    if i.op.piece is Piece.GRADIENTS:
        return Piece.GRADIENTS if i.op.source is Tier.DEVICE else Piece.SUMS
    return _HOLDS.get(i.op.piece, i.op.piece)


_HOLDS = {Piece.REDUCED: Piece.GRADIENTS, Piece.UPDATED: Piece.PARAMETERS}


_COPIES: Mapping[tuple[Tier, Tier], Callable[[Mover, Instruction], None]] = MappingProxyType(
    {
        (Tier.DISK, Tier.HOST): lambda mover, i: mover.read(i),
        (Tier.HOST, Tier.DISK): lambda mover, i: mover.write(i),
        (Tier.DEVICE, Tier.HOST): lambda mover, i: mover.to_host(i),
        (Tier.HOST, Tier.DEVICE): lambda mover, i: mover.to_device(i),
    }
)
ACTIONS: Mapping[Kind, Callable[[Mover, Instruction], None]] = MappingProxyType(
    {
        **{move: _COPIES[move.source, move.destination] for move in STATE_MOVES if isinstance(move, TierMove)},
        Op.ADD_GRADIENT: lambda mover, i: mover.add(i),
        Op.COUNT_GRADIENT: lambda mover, i: mover.count(i),
    }
)
"""What the instructions of `STATE_MOVES` do."""


def update_ring(shape: RankShape, resident_bytes: int, tiers: Tiers) -> Ring:
    """The slots of parts that are updated or written, each as large as the largest part that needs it.
    resident_bytes: of the largest piece of state that rests on the device and passes through a slot.
    """
    ways = [
        (part, ops_of_part(part.tier, bucket.rests, bucket.sums))
        for bucket in shape.buckets
        if bucket.trained
        for part in bucket.parts
    ]

    def most(piece: Piece, size: Callable[[PartShape], int]) -> int:
        return max((size(part) for part, way in ways if not SLOT_MEMORY[piece].isdisjoint(way)), default=0)

    gradient = most(Piece.GRADIENTS, lambda part: part.gradient_bytes)
    parameters = most(Piece.PARAMETERS, lambda part: part.parameter_bytes)
    state = max(most(Piece.STATE, lambda part: part.state_bytes), resident_bytes)
    sums = most(Piece.SUMS, lambda part: part.gradient_bytes)
    flag = "--offload-optimizer"
    return Ring(
        [
            PartSlot(
                {
                    Piece.GRADIENTS: tiers.in_host_memory(gradient, torch.uint8, flag),
                    Piece.PARAMETERS: tiers.in_host_memory(parameters, torch.uint8, flag),
                    Piece.STATE: tiers.beside_disks(state),
                    Piece.SUMS: tiers.beside_disks(sums),
                }
            )
            for _ in range(SLOTS)
        ]
    )


def load_ring(shape: RankShape, tiers: Tiers) -> Ring:
    """The slots of parameters that are read from disks; none where none rest there."""
    parts = (part for bucket in shape.buckets if bucket.rests is Tier.DISK for part in bucket.parts)
    most = max((part.parameter_bytes for part in parts), default=0)
    return Ring([PartSlot({Piece.PARAMETERS: tiers.beside_disks(most)}) for _ in range(SLOTS if most else 0)])


def _always() -> bool:
    return True


@torch.no_grad()
def _added(needs: Sequence[Need], total: Tensor, gradient: Tensor) -> None:
    """Executed on the lane of updates."""
    for arrived in needs:
        arrived()
    total.add_(gradient)


@torch.no_grad()
def _squares(needs: Sequence[Need], counted: Sequence[Tensor], others: Sequence[Tensor]) -> Squares:
    """Executed on the lane of updates."""
    for arrived in needs:
        arrived()
    return Squares([sum_of_squares(view) for view in counted], [sum_of_squares(view) for view in others])
