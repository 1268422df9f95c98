"""Moves of model state between its tiers, and work on it in host memory, beside the computation.

One mover executes what a step's list says of any column. A copy has one end in host memory (`HostPlace`): where the
piece rests there, or a slot through which it passes on its way between the device and disks. The other end is a tensor
on the device or a piece of the swap files. Every copy, addition and update runs on a lane and waits there for what it
needs. So the program only says what has to happen, and waits for nothing before it reads the parameters (`ready`), or
gathers a shard of them that is on its way (`ParameterGatherer.gather`).
`program.passes` places the instructions in the list, and the engine calls `move` for each by the table of
`zero.actions`.

Sums of gradients (--offload-gradients): a step's first gradient of a part is stored as its sum, each later one is
copied to a slot and added. The last addition is followed by a count of the squares, for the norm. An update on the
device has its gradient brought back in a spare buffer for whole gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from fused_ops.norm import sum_of_squares
from megazero.config.tiers import FILE_TIERS, Tier
from megazero.disk.lanes import Need
from megazero.program.instruction import Instruction, Op, Piece, TierMove
from megazero.program.passes.slots import slot_bytes
from megazero.program.shape import RankShape
from megazero.system.copy_thread import Copies
from megazero.zero.gatherer import ParameterGatherer
from megazero.zero.memories import PartSlot, Ring, Tiers
from megazero.zero.parts import Key, Range, Resting, piece_name
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
        tp: int,
    ) -> None:
        self.resting, self.columns, self.tiers = resting, columns, tiers
        self.reducer, self.gatherer = reducer, gatherer
        self._early, self._shares_memory = shape.early, shape.shares_memory
        self.state_dtypes = {column: columns[column].dtype for column in OPTIMIZER if column in columns}
        sizes = slot_bytes(shape)
        self.update_slots = _ring_of(shape.slots, sizes.updates, tiers, copied=(Piece.GRADIENTS, Piece.PARAMETERS))
        """For parts that are updated in host memory, or whose new parameters or sums go to disks."""
        self.load_slots = _ring_of(shape.slots, sizes.loads, tiers)
        """For parameters that are read: these may be under way beside late updates."""
        self._runs = [
            tuple(bucket.counted_runs(tp, counted=which) for which in (True, False)) for bucket in reducer.buckets
        ]
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
        return self.update_slots.nbytes + self.load_slots.nbytes

    # --- what a step's list says -----------------------------------------------------------------------------------

    def move(self, i: Instruction) -> None:
        """Start what an instruction of `STATE_MOVES` says, on its lane."""
        if isinstance(i.op, TierMove):
            _COPIES[i.op.source, i.op.destination](self, i, i.op.piece)
        elif i.op is Op.ADD_GRADIENT:
            self.add(i)
        else:
            self.count(i)

    def read(self, i: Instruction, piece: Piece) -> None:
        """Start to read a piece of a part from files into its slot."""
        place, store = self._place(i, piece), self.tiers.stores[_move_of(i).source]
        over = store.read({piece_name(piece, i.key): place.memory}, needs=tuple(place.free)).wait
        place.arrived.append(over)
        self._passed(i, piece, over)

    def write(self, i: Instruction, piece: Piece) -> None:
        """Start to write a piece of a part from its slot to files."""
        place, store = self._place(i, piece), self.tiers.stores[_move_of(i).destination]
        assert place.arrived, f"{i} comes before what makes it"
        over = store.write({piece_name(piece, i.key): place.memory}, needs=tuple(place.arrived)).wait
        self._passed(i, piece, over)

    def to_host(self, i: Instruction, piece: Piece) -> None:
        """Start to copy to host memory: a reduced gradient, or updated weights as parameters."""
        place, source = self._place(i, piece), self._source(i, piece)
        over = _copied(self.tiers.to_host, place.memory, source, tuple(place.free))
        place.arrived.append(over)
        if piece in _LEAVING:
            self.reducer.leaving.leaves(i.buckets[0], source.numel(), over)
        if i.slot < 0:
            place.free.clear()  # else each reader of a sum would be waited for in all steps to come
        self._passed(i, piece, over)

    def to_device(self, i: Instruction, piece: Piece) -> None:
        """Start to copy to the device: parameters for a use or after their update, or a sum for an update there."""
        place, (target, arrived) = self._place(i, piece), self._target(i, piece)
        assert i.slot < 0 or place.arrived, f"{i} comes before what makes it"
        over = _copied(self.tiers.to_device, target, place.memory, tuple(place.arrived), place.changed or _always)
        arrived.append(over)
        if i.slot < 0:
            place.free.append(over)  # the next step's first sum is stored over what is read here
        self._passed(i, piece, over)

    def add(self, i: Instruction) -> None:
        """Start to add the gradient of a part that was copied to its sum."""
        gradient, total = self._place(i, Piece.REDUCED), self._place(i, Piece.SUMS)
        needs = *gradient.arrived, *total.arrived  # a copy of both lists: the sum's grows by this addition
        over = self.tiers.host_updates.submit(_added, needs, total.memory, gradient.memory).result
        total.arrived.append(over)
        self._passed(i, Piece.SUMS, over)

    def count(self, i: Instruction) -> None:
        """Start to count the squares of a bucket's sum (-1), or of a part of it."""
        index, place, (start, stop) = i.buckets[0], self._place(i, Piece.SUMS), self._range(i, Piece.SUMS)
        counted, others = (
            [
                place.memory[max(start, first) - start : min(stop, last) - start]
                for first, last in runs
                if max(start, first) < min(stop, last)
            ]
            for runs in self._runs[index]
        )
        squares = self.tiers.host_updates.submit(_squares, tuple(place.arrived), counted, others)
        self._squares[index].append(squares)
        if i.part < 0:
            del self._summed[index]
        self._passed(i, Piece.SUMS, squares.result)

    # --- updates ---------------------------------------------------------------------------------------------------

    def part_to_update(self, i: Instruction) -> tuple[list[Need], PartTensors]:
        """What to wait for before a part is updated in host memory, and its columns there."""
        slot = self.update_slots.slot_of(i)
        tensors = {
            **self.state_of(i.key, slot),
            Column.GRADIENT: self._place(i, Piece.GRADIENTS).memory,
            Column.PARAMETER: self._place(i, Piece.UPDATED).memory,
        }
        return [*slot.free, *slot.arrived], tensors

    def updating(self, i: Instruction, changed: Callable[[], bool]) -> None:
        """The update of a part in host memory is under way. changed: waits for it, and says whether it has changed
        anything.
        """
        index, slot = i.buckets[0], self.update_slots.slot_of(i)
        slot.changed = changed  # a skipped step's copy to the device must not take what the slot had before
        slot.arrived.append(changed)
        if self.resting[index].sums is Tier.HOST:
            self._readers[i.key].append(changed)
        if self.resting[index].rests is Tier.HOST:
            self._updated[index].append(changed)
        self.update_slots.passed(i, changed)

    def squares(self, index: int) -> Squares:
        """The squares of a bucket's gradient. Waits for the count. Raises what has gone wrong on the way of the sum."""
        counts = [count.result() for count in self._squares.pop(index, [])]
        counted, others = ([square for count in counts for square in count[which]] for which in (0, 1))
        return Squares(counted, others)

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
        """Return once the updated parameters of these buckets are there, as far as they rest in memory. Those on disks
        are not waited for: the read of a piece waits for the write of it (`disk.swap.SwapSpace.read`). Raises what has
        gone wrong on their way.
        """
        for index in buckets:
            for arrived in self._updated.pop(index, ()):
                arrived()

    def wait(self) -> None:
        """Return once all parts have come to the end of their way. Raises what has gone wrong on it."""
        self.update_slots.assert_idle()
        self.ready(list(self._updated))
        self.update_slots.wait()

    def go_back(self) -> None:
        """Have the optimizer state of the early parts be what it was before the last writes, which are over."""
        for key in self._early:
            self.tiers.disks.go_back(piece_name(Piece.STATE, key))

    def discard(self) -> None:
        """Forget the sums of a step. Waits for what is under way."""
        for index in list(self._squares):
            self.squares(index)  # which else would count in the next step's norm
        self._summed.clear()
        self.wait()

    # --- the ends of a copy ----------------------------------------------------------------------------------------

    def state_of(self, key: Key, slot: PartSlot) -> dict[Column, Tensor]:
        """The optimizer state of a part that is in host memory: where it rests, or in its slot."""
        start, stop, tier = self.resting[key[0]].parts[key[1]]
        if tier.in_files:
            return self.state_in(slot, stop - start)
        return {column: self.columns[column].view(key[0], start, stop) for column in self.state_dtypes}

    def state_in(self, slot: PartSlot, numel: int) -> dict[Column, Tensor]:
        """The optimizer state of so many elements in a slot, one column behind the other."""
        memory, sizes = slot.of(Piece.STATE, numel * self.state_bytes), self.state_dtypes.values()
        pieces = memory.split([numel * dtype.itemsize for dtype in sizes])
        return {
            column: piece.view(dtype) for (column, dtype), piece in zip(self.state_dtypes.items(), pieces, strict=True)
        }

    def _range(self, i: Instruction, piece: Piece) -> Range:
        """The elements [start, stop) of its bucket that an instruction moves. All of them (-1) are what the rank stores
        of a bucket that is loaded, else what the rank updates.
        """
        index, part = i.key
        if part >= 0:
            return self.resting[index].parts[part][:2]
        if piece is Piece.PARAMETERS:
            parameters = self.gatherer.parameters[index]
            return parameters.column.range_of(parameters.index)
        return self.columns[Column.EXP_AVG].range_of(index)

    def _place(self, i: Instruction, piece: Piece) -> HostPlace:
        """Where a piece of a part is in host memory: at rest or in the slot of the instruction."""
        index, (start, stop), resting = i.buckets[0], self._range(i, piece), self.resting[i.buckets[0]]
        parameters, gradients = self.gatherer.parameters[index], self.columns[Column.GRADIENT]
        if piece in (Piece.PARAMETERS, Piece.UPDATED) and resting.rests is Tier.HOST:
            # Nobody is waited for before they are overwritten: all uses of a step are over when its updates begin.
            return HostPlace(parameters.column.view(parameters.index, start, stop), [], self._updated[index])
        if piece is Piece.GRADIENTS and resting.sums is not Tier.DEVICE:
            piece = Piece.SUMS
        if piece is Piece.SUMS and resting.sums is Tier.HOST:
            return HostPlace(gradients.view(index, start, stop), self._readers[i.key], self._summed[index])
        slot, kept_as = self._ring(piece).slot_of(i), _KEPT_AS.get(piece, piece)
        home = resting.rests if piece is Piece.UPDATED else resting.sums
        if piece is Piece.STATE:
            memory = slot.of(piece, (stop - start) * self.state_bytes)
        elif piece in _BESIDE_UPDATE and home is Tier.DEVICE and self._shares_memory:
            memory = self.columns[_BESIDE_UPDATE[piece]].view(index, start, stop)
        else:
            is_weight = kept_as is Piece.PARAMETERS
            dtype = parameters.column.dtype_in(parameters.index) if is_weight else gradients.dtype
            memory = slot.of(kept_as, stop - start, dtype)
        return HostPlace(memory, slot.free, slot.arrived, slot.changed)

    def _source(self, i: Instruction, piece: Piece) -> Tensor:
        """What a copy to host memory reads on the device."""
        index, (start, stop) = i.buckets[0], self._range(i, piece)
        if piece in _LEAVING:
            return self.reducer.reduced(index, start, stop)
        if piece is Piece.GRADIENTS:
            self.reducer.wait(index)  # behind the norm it has been reduced, for an early update maybe not
        return self.columns[Column.MASTER if piece is Piece.UPDATED else Column.GRADIENT].view(index, start, stop)

    def _target(self, i: Instruction, piece: Piece) -> tuple[Tensor, list[Need]]:
        """Where a copy to the device goes, and the list of what there is to wait for before that is read."""
        index, (start, stop) = i.buckets[0], self._range(i, piece)
        if piece is Piece.PARAMETERS:
            return self.gatherer.loading(index, start, stop)
        if piece is Piece.UPDATED:
            return self.columns[Column.PARAMETER].view(index, start, stop), self._updated[index]
        self._fetched[i.key] = buffer, arrived = self.reducer.pool.take(stop - start), list[Need]()
        return buffer[: stop - start], arrived

    def _ring(self, piece: Piece) -> Ring:
        return self.load_slots if piece is Piece.PARAMETERS else self.update_slots

    def _passed(self, i: Instruction, piece: Piece, over: Need) -> None:
        """An instruction has begun. over: waits for its end."""
        if i.slot >= 0:
            self._ring(piece).passed(i, over)


_KEPT_AS = {Piece.REDUCED: Piece.GRADIENTS, Piece.UPDATED: Piece.PARAMETERS}
"""The memory of a slot in which a piece is that has none of its own name."""
_BESIDE_UPDATE = {Piece.GRADIENTS: Column.GRADIENT, Piece.UPDATED: Column.PARAMETER}
"""What an update in host memory exchanges with the device, by its column there: nothing is copied within one memory."""
_LEAVING = Piece.REDUCED, Piece.SUMS
"""What is copied to host memory from the buffer of a reduction, and not from a column."""
_COPIES: Mapping[tuple[Tier, Tier], Callable[[Mover, Instruction, Piece], None]] = MappingProxyType(
    {
        **{(tier, Tier.HOST): lambda mover, i, piece: mover.read(i, piece) for tier in FILE_TIERS},
        **{(Tier.HOST, tier): lambda mover, i, piece: mover.write(i, piece) for tier in FILE_TIERS},
        (Tier.DEVICE, Tier.HOST): lambda mover, i, piece: mover.to_host(i, piece),
        (Tier.HOST, Tier.DEVICE): lambda mover, i, piece: mover.to_device(i, piece),
    }
)


def _move_of(i: Instruction) -> TierMove:
    assert isinstance(i.op, TierMove), f"{i} is no copy"
    return i.op


def _ring_of(count: int, sizes: Mapping[Piece, int], tiers: Tiers, copied: Collection[Piece] = ()) -> Ring:
    """So many slots with these bytes each, in memory that disks read into. copied: pieces between the device and a
    slot, whose memory the device copies at full speed.
    """

    def allocated(piece: Piece) -> Tensor:
        if piece in copied:
            return tiers.in_host_memory(sizes[piece], torch.uint8, "--offload-optimizer")
        return tiers.beside_files(sizes[piece])

    return Ring([PartSlot({piece: allocated(piece) for piece in sizes}) for _ in range(count)])


def _always() -> bool:
    return True


def _copied(
    copies: Copies,
    target: Tensor,
    source: Tensor,
    after: tuple[Need, ...],
    wanted: Callable[[], bool] = lambda: True,
) -> Need:
    """Start a copy, and return what waits for its end. From a memory to itself nothing is copied, and what is to wait
    for is the update alone, which `wanted` does.
    """
    if target.data_ptr() == source.data_ptr():
        return wanted
    return copies.copy(target, source, after=after, wanted=wanted).result


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
