"""Parts of buckets that are updated in host memory, beside the computation.

A part on its way has a slot: host memory for its gradient and its new parameters, and for its optimizer state where
that rests on disks. There are a few slots, which the parts take in turn. Every step of the way runs on a lane of its
own and waits there for what it needs, the slot included. So the program only says what has to happen, and waits for
nothing before it reads the parameters (`ready`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.config.tiers import SLOTS, Tier
from megazero.disk.lanes import Need
from megazero.disk.swap import SwapSpace
from megazero.program.instruction import Op
from megazero.program.passes.updates import way_of
from megazero.system.streams import host_tensor
from megazero.zero.host_lanes import HostLanes
from megazero.zero.parts import Key, Part, Resting, parameters_piece, state_piece
from megazero.zero.placement import OPTIMIZER, Column
from megazero.zero.storage import StoredColumn

FLAG = "--offload-optimizer"
"""What needs host memory, for errors."""

PartTensors = Mapping[Column, Tensor]
"""The columns of a part in host memory, [stop - start] each."""


@dataclass
class _Slot:
    """The memory of a part on its way, and what there is to wait for. A kind of memory that no part needs is empty.

    gradient    of a part that is updated in host memory
    parameters  its new ones, unless they rest in host memory
    memory      bytes for optimizer state that rests on disks
    free        before the part may use it
    arrived     for its state and its gradient
    made        for its new parameters; the result says whether anything has changed
    ends        before another part takes the slot
    """

    gradient: Tensor
    parameters: Tensor
    memory: Tensor
    free: list[Need] = field(default_factory=list)
    arrived: list[Need] = field(default_factory=list)
    made: Callable[[], bool] | None = None
    ends: list[Need] = field(default_factory=list)


class HostParts:
    """The parts of a rank's buckets that are updated in host memory, and updated parameters that are to rest there or
    on disks.

    columns  the model state
    resting  where each trained bucket rests (`zero.parts`)
    swap     where state rests on disks, a piece for each part; None where none does
    """

    def __init__(
        self,
        columns: Mapping[Column, StoredColumn],
        resting: Sequence[Resting],
        swap: SwapSpace | None,
        lanes: HostLanes,
        device: torch.device,
    ) -> None:
        self.columns, self.swap, self.lanes = columns, swap, lanes
        self.parts, self.rests = [own.parts for own in resting], [own.rests for own in resting]
        self.state = {column: columns[column].dtype for column in OPTIMIZER if column in columns}
        self._slots = self._made_slots(device)
        self._turns = 0
        self._written = set[Key]()
        self._under_way: dict[Key, _Slot] = {}
        self._arriving: dict[int, list[Need]] = defaultdict(list)

    def _made_slots(self, device: torch.device) -> list[_Slot]:
        """As large as the largest part that needs them."""
        every = [(part, rests) for rests, parts in zip(self.rests, self.parts, strict=True) for part in parts]
        ways = [(part.stop - part.start, way_of(part.tier, rests)) for part, rests in every]

        def most(*ops: Op) -> int:
            return max((numel for numel, way in ways if not {*ops}.isdisjoint(way)), default=0)

        updated, state = most(Op.UPDATE_HOST), most(Op.READ_STATE) * self.state_bytes
        moved = most(Op.COPY_PARAMETERS, Op.WRITE_PARAMETERS)
        dtypes = {column: self.columns[column].dtype for column in (Column.GRADIENT, Column.PARAMETER)}
        return [
            _Slot(
                host_tensor(updated, dtypes[Column.GRADIENT], device, FLAG),
                host_tensor(moved, dtypes[Column.PARAMETER], device, FLAG),
                torch.empty(0, dtype=torch.uint8) if self.swap is None else self.swap.allocate(state),
            )
            for _ in range(SLOTS)
        ]

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer state of one element."""
        return sum(dtype.itemsize for dtype in self.state.values())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all slots, in host memory."""
        return sum(slot.gradient.nbytes + slot.parameters.nbytes + slot.memory.nbytes for slot in self._slots)

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory for what is on its way: all slots, and the swap files' own buffers."""
        return self.buffer_bytes + (0 if self.swap is None else self.swap.memory_bytes)

    # --- what a step's list says -----------------------------------------------------------------------------------

    def read(self, key: Key) -> None:
        """Start to read a part's optimizer state from disks."""
        slot = self._taken(key)
        request = self._swap.read({state_piece(key): self._memory(key, slot)}, needs=slot.free)
        slot.arrived.append(request.wait)
        slot.ends.append(request.wait)

    def copy_gradient(self, key: Key) -> None:
        """Start to copy a part's reduced gradient to host memory."""
        slot, part = self._taken(key), self._part(key)
        source = self.columns[Column.GRADIENT].view(key[0], part.start, part.stop)
        copied = self.lanes.to_host.copy(slot.gradient[: source.numel()], source, after=slot.free)
        slot.arrived.append(copied.result)

    def update(self, key: Key, make: Callable[[Part, PartTensors], bool]) -> None:
        """Start to update a part.

        make: updates these tensors of the part, its parameters among them, and returns whether it has changed any.
        """
        slot, part = self._under_way[key], self._part(key)
        tensors = {
            **self._state(key, slot),
            Column.GRADIENT: slot.gradient[: part.stop - part.start],
            Column.PARAMETER: self._new_parameters(key, slot),
        }
        rounds = self.rests[key[0]] is Tier.DISK  # what is written there is written in a skipped step too
        updated = self.lanes.updates.submit(_updated, tuple(slot.arrived), part, tensors, make, rounds=rounds)
        slot.made = updated.result
        self._passed(key, Op.UPDATE_HOST, updated.result)
        if self.rests[key[0]] is Tier.HOST:
            self._arriving[key[0]].append(updated.result)

    def copy_parameters(self, key: Key) -> None:
        """Start to copy a part's updated parameters to the device."""
        slot, part = self._under_way[key], self._part(key)
        assert slot.made is not None, "parameters are copied before their update"
        target = self.columns[Column.PARAMETER].view(key[0], part.start, part.stop)
        copied = self.lanes.to_device.copy(target, slot.parameters[: target.numel()], wanted=slot.made)
        self._arriving[key[0]].append(copied.result)
        self._passed(key, Op.COPY_PARAMETERS, copied.result)

    def store(self, key: Key) -> None:
        """Start to copy weights that were updated on the device to where the parameters rest, or to a slot on their way
        to disks. A part of -1 is the whole bucket.
        """
        index, number = key
        weights, parameters = self.columns[Column.MASTER], self.columns[Column.PARAMETER]
        if self.rests[index] is Tier.HOST:
            own = weights.range_of(index) if number < 0 else self._part(key)[:2]
            target = parameters.view(index, *own)
            copied = self.lanes.to_host.copy(target, weights.view(index, *own))
            self._arriving[index].append(copied.result)
            return
        slot, part = self._taken(key), self._part(key)
        source = weights.view(index, part.start, part.stop)
        copied = self.lanes.to_host.copy(self._new_parameters(key, slot), source, after=slot.free)

        def made() -> bool:
            copied.result()
            return True

        slot.made = made
        self._passed(key, Op.STORE, copied.result)

    def write_parameters(self, key: Key) -> None:
        """Start to write a part's updated parameters to disks."""
        slot = self._under_way[key]
        assert slot.made is not None, "parameters are written before their update"
        piece = {parameters_piece(key): self._new_parameters(key, slot)}
        request = self._swap.write(piece, needs=[slot.made])
        self._passed(key, Op.WRITE_PARAMETERS, request.wait)

    def write(self, key: Key) -> None:
        """Start to write a part's optimizer state to disks."""
        slot = self._under_way[key]
        assert slot.made is not None, "state is written before its update"
        request = self._swap.write({state_piece(key): self._memory(key, slot)}, needs=[slot.made])
        self._passed(key, Op.WRITE_STATE, request.wait)

    def arriving(self, index: int) -> tuple[Need, ...]:
        """What to wait for before the updated parameters of a bucket are where they rest."""
        return tuple(self._arriving.get(index, ()))

    def ready(self, buckets: Iterable[int]) -> None:
        """Return once the updated parameters of these buckets are there. Raises what has gone wrong on their way."""
        for index in buckets:
            for there in self._arriving.pop(index, ()):
                there()

    def wait(self) -> None:
        """Return once all parts have come to the end of their way. Raises what has gone wrong on it."""
        assert not self._under_way, f"{', '.join(map(state_piece, self._under_way))} is under way"
        self.ready(list(self._arriving))
        for slot in self._slots:
            for end in slot.ends:
                end()

    # --- for others ------------------------------------------------------------------------------------------------

    @contextmanager
    def looking(self, key: Key, *, reads: bool = True, writes: bool = False) -> Iterator[PartTensors]:
        """A context in which the optimizer state of a part is in host memory: zeros at first. Nothing may be under way.

        reads: whether it has the state's values; else its content is undefined. writes: whether it is stored at the
        end. Raises DiskError.
        """
        slot, on_disk = self._slots[0], self._part(key).tier is Tier.DISK
        if on_disk and reads and key in self._written:
            self._swap.read({state_piece(key): self._memory(key, slot)}).wait()
        elif on_disk and reads:
            slot.memory.zero_()
        yield self._state(key, slot)
        if on_disk and writes:
            self._written.add(key)
            self._swap.write({state_piece(key): self._memory(key, slot)}).wait()

    @contextmanager
    def weights(self, index: int) -> Iterator[Tensor]:
        """A context in which all weights that this rank updates of a bucket are written, [stop - start]. Moments in
        parts become zero.
        """
        column = self.columns.get(Column.MASTER, self.columns[Column.PARAMETER])
        if not self.parts[index]:
            yield column.held(index)
            return
        first, last = column.range_of(index)
        whole = torch.zeros(last - first, dtype=column.dtype)
        yield whole
        for number, part in enumerate(self.parts[index]):
            with self.looking((index, number), reads=False, writes=True) as state:
                for moments in state.values():
                    moments.zero_()
                state[Column.MASTER].copy_(whole[part.start - first : part.stop - first])

    def close(self) -> None:
        """End the lanes, and remove the swap files."""
        self.lanes.close()
        if self.swap is not None:
            self.swap.close(remove=True)

    # --- one part --------------------------------------------------------------------------------------------------

    @property
    def _swap(self) -> SwapSpace:
        assert self.swap is not None, "no part rests on a disk"
        return self.swap

    def _part(self, key: Key) -> Part:
        return self.parts[key[0]][key[1]]

    def _taken(self, key: Key) -> _Slot:
        """The slot of a part under way, or else the next one."""
        if key not in self._under_way:
            self._under_way[key] = slot = self._slots[self._turns % SLOTS]
            self._turns += 1
            slot.free, slot.arrived, slot.ends = slot.ends, [], []
        return self._under_way[key]

    def _passed(self, key: Key, op: Op, over: Need) -> None:
        """A step of a part's way has begun. over: waits for its end. The last one gives the slot to the next part."""
        if key in self._under_way:
            self._under_way[key].ends.append(over)
            if op is way_of(self._part(key).tier, self.rests[key[0]])[-1]:
                del self._under_way[key]

    def _new_parameters(self, key: Key, slot: _Slot) -> Tensor:
        part = self._part(key)
        if self.rests[key[0]] is Tier.HOST:
            return self.columns[Column.PARAMETER].view(key[0], part.start, part.stop)
        return slot.parameters[: part.stop - part.start]

    def _memory(self, key: Key, slot: _Slot) -> Tensor:
        part = self._part(key)
        return slot.memory[: (part.stop - part.start) * self.state_bytes]

    def _state(self, key: Key, slot: _Slot) -> dict[Column, Tensor]:
        """The optimizer state of a part: where it rests, or in its slot."""
        part, found, at = self._part(key), dict[Column, Tensor](), 0
        for column, dtype in self.state.items():
            if part.tier is Tier.DISK:
                stop = at + (part.stop - part.start) * dtype.itemsize
                found[column], at = slot.memory[at:stop].view(dtype), stop
            else:
                found[column] = self.columns[column].view(key[0], part.start, part.stop)
        return found


def _updated(
    arrived: Sequence[Need],
    part: Part,
    tensors: PartTensors,
    make: Callable[[Part, PartTensors], bool],
    *,
    rounds: bool,
) -> bool:
    """Executed on the host's lane. rounds: whether parameters are needed where nothing has changed."""
    for there in arrived:
        there()
    changed = make(part, tensors)
    if rounds and not changed:
        tensors[Column.PARAMETER].copy_(tensors[Column.MASTER])
    return changed
