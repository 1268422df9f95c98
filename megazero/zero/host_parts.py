"""Parts of buckets that are updated in host memory, beside the computation.

A part on its way has a slot: host memory for its gradient and its new parameters, and for its optimizer state where
that rests on disks. There are a few slots, and an instruction says which one its part has. Every step of the way runs
on a lane of its own and waits there for what it needs, the slot included. So the program only says what has to happen,
and waits for nothing before it reads the parameters (`ready`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megazero.config.tiers import SLOTS, Tier
from megazero.disk.lanes import DiskRequest, Need
from megazero.disk.swap import SwapSpace
from megazero.program.instruction import Instruction
from megazero.zero.host_lanes import HostLanes
from megazero.zero.part_slots import PartSlot, PartTensors, part_slots
from megazero.zero.parts import Key, Part, Resident, Resting, parameters_piece, resident_piece, state_piece
from megazero.zero.sharding import OPTIMIZER, Column
from megazero.zero.storage import StoredColumn


class HostParts:
    """The parts of a rank's buckets that are updated in host memory, and updated parameters that are to rest there or
    on disks.

    columns  the model state
    resting  where each trained bucket rests (`zero.parts`)
    swap     where state rests on disks, a piece for each part; None where none does
    residents  what rests on the device, and is written to disks with each whole step; nobody reads it in training
    """

    def __init__(
        self,
        columns: Mapping[Column, StoredColumn],
        resting: Sequence[Resting],
        swap: SwapSpace | None,
        lanes: HostLanes,
        device: torch.device,
        residents: Sequence[Resident] = (),
    ) -> None:
        self.columns, self.swap, self.lanes, self.residents = columns, swap, lanes, residents
        self.parts, self.rests = [own.parts for own in resting], [own.rests for own in resting]
        self.sums, self.state_parts = [own.sums for own in resting], [own.state_parts for own in resting]
        self.state = {column: columns[column].dtype for column in OPTIMIZER if column in columns}
        self._slots = part_slots(columns, resting, residents, self.state_bytes, swap, device)
        self._under_way: dict[Key, PartSlot] = {}
        self._arriving: dict[int, list[Need]] = defaultdict(list)
        self.readers: dict[Key, list[Need]] = defaultdict(list)
        """Of gradients that rest in host memory: what is to wait for before they are overwritten."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer state of one element."""
        return sum(dtype.itemsize for dtype in self.state.values())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all slots, in host memory."""
        return sum(slot.nbytes for slot in self._slots)

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory for what is on its way: all slots, and the swap files' own buffers."""
        return self.buffer_bytes + (0 if self.swap is None else self.swap.memory_bytes)

    # --- what a step's list says -----------------------------------------------------------------------------------

    def read(self, i: Instruction) -> None:
        """Start to read a part's optimizer state from disks."""
        slot = self.taken(i)
        request = self.disks.read({state_piece(i.key): self._memory(i.key, slot)}, needs=slot.free)
        slot.arrived.append(request.wait)
        self.passed(i, request.wait)

    def copy_gradient(self, i: Instruction) -> None:
        """Start to copy a part's reduced gradient to host memory."""
        slot, part = self.taken(i), self._part(i.key)
        source = self.columns[Column.GRADIENT].view(i.buckets[0], part.start, part.stop)
        copied = self.lanes.to_host.copy(slot.gradient[: source.numel()], source, after=slot.free)
        slot.arrived.append(copied.result)

    def update(self, i: Instruction, make: Callable[[Part, PartTensors], bool]) -> None:
        """Start to update a part.

        make: updates these tensors of the part, its parameters among them, and returns whether it has changed any.
        """
        slot, key, part = self.taken(i), i.key, self._part(i.key)
        tensors = {
            **self._state(key, slot),
            Column.GRADIENT: self._gradient(key, slot),
            Column.PARAMETER: self._new_parameters(key, slot),
        }
        rounds = self.rests[key[0]] is Tier.DISK  # what is written there is written in a skipped step too
        needs = *slot.free, *slot.arrived
        updated = self.lanes.updates.submit(_updated, needs, part, tensors, make, rounds=rounds)
        slot.made = updated.result
        if self.sums[key[0]] is Tier.HOST:
            self.readers[key].append(updated.result)
        self.passed(i, updated.result)
        if self.rests[key[0]] is Tier.HOST:
            self._arriving[key[0]].append(updated.result)

    def copy_parameters(self, i: Instruction) -> None:
        """Start to copy a part's updated parameters to the device."""
        slot, part = self.taken(i), self._part(i.key)
        assert slot.made is not None, "parameters are copied before their update"
        target = self.columns[Column.PARAMETER].view(i.buckets[0], part.start, part.stop)
        copied = self.lanes.to_device.copy(target, slot.parameters[: target.numel()], wanted=slot.made)
        self._arriving[i.buckets[0]].append(copied.result)
        self.passed(i, copied.result)

    def store(self, i: Instruction) -> None:
        """Start to copy weights that were updated on the device to where the parameters rest, or to a slot on their way
        to disks. A part of -1 is the whole bucket.
        """
        index, number = i.key
        weights, parameters = self.columns[Column.MASTER], self.columns[Column.PARAMETER]
        if self.rests[index] is Tier.HOST:
            own = weights.range_of(index) if number < 0 else self._part(i.key)[:2]
            target = parameters.view(index, *own)
            copied = self.lanes.to_host.copy(target, weights.view(index, *own))
            self._arriving[index].append(copied.result)
            return
        slot, part = self.taken(i), self._part(i.key)
        source = weights.view(index, part.start, part.stop)
        copied = self.lanes.to_host.copy(self._new_parameters(i.key, slot), source, after=slot.free)

        def made() -> bool:
            copied.result()
            return True

        slot.made = made
        self.passed(i, copied.result)

    def write_parameters(self, i: Instruction) -> None:
        """Start to write a part's updated parameters to disks."""
        slot = self.taken(i)
        assert slot.made is not None, "parameters are written before their update"
        piece = {parameters_piece(i.key): self._new_parameters(i.key, slot)}
        request = self.disks.write(piece, needs=[slot.made])
        self.passed(i, request.wait)

    def write(self, i: Instruction) -> None:
        """Start to write a part's optimizer state to disks."""
        slot = self.taken(i)
        assert slot.made is not None, "state is written before its update"
        request = self.disks.write({state_piece(i.key): self._memory(i.key, slot)}, needs=[slot.made])
        self.passed(i, request.wait)

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
        if on_disk and reads and self.disks.has(state_piece(key)):
            self.disks.read({state_piece(key): self._memory(key, slot)}).wait()
        elif on_disk and reads:
            slot.memory.zero_()
        yield self._state(key, slot)
        if on_disk and writes:
            self.disks.write({state_piece(key): self._memory(key, slot)}).wait()

    def flip(self, step: int, about: Mapping[str, Any]) -> DiskRequest:
        """Start to make what all parts have become a whole step on disks (`disk.swap`), with what is kept about it."""
        assert not self._under_way, f"{', '.join(map(state_piece, self._under_way))} is under way"
        for number, one in enumerate(self.residents):
            slot = self._slots[number % SLOTS]
            for end in slot.ends:
                end()
            for held, there in self._copies(one, slot):
                there.copy_(held)
            request = self.disks.write({resident_piece(one): self._state_memory(slot, one.stop - one.start)})
            slot.ends = [request.wait]
        return self.disks.flip(step, about)

    def read_residents(self) -> None:
        """Set what rests on the device from the swap files. Nothing may be under way. Raises DiskError."""
        slot = self._slots[0]
        for one in self.residents:
            self.disks.read({resident_piece(one): self._state_memory(slot, one.stop - one.start)}).wait()
            for held, there in self._copies(one, slot):
                held.copy_(there)

    def close(self, *, remove: bool = True) -> None:
        """End the lanes. remove: delete the swap files too."""
        self.lanes.close()
        if self.swap is not None:
            self.swap.close(remove=remove)

    # --- one part --------------------------------------------------------------------------------------------------

    @property
    def disks(self) -> SwapSpace:
        assert self.swap is not None, "no part rests on a disk"
        return self.swap

    def _part(self, key: Key) -> Part:
        return self.parts[key[0]][key[1]]

    def taken(self, i: Instruction) -> PartSlot:
        """The slot of an instruction. Its part has taken the slot already, or takes it now: what is to wait for before
        is in `free`.
        """
        assert i.slot >= 0, f"{i} has no slot"
        slot = self._slots[i.slot]
        if i.key not in self._under_way:
            self._under_way[i.key] = slot
            slot.free, slot.arrived, slot.made, slot.ends = slot.ends, [], None, []
        assert self._under_way[i.key] is slot, f"{i} has another slot than its part"
        return slot

    def passed(self, i: Instruction, over: Need) -> None:
        """An instruction has begun that uses a slot. over: waits for its end. The last one gives the slot to others."""
        self._under_way[i.key].ends.append(over)
        if i.frees_slot:
            del self._under_way[i.key]

    def _new_parameters(self, key: Key, slot: PartSlot) -> Tensor:
        part = self._part(key)
        if self.rests[key[0]] is Tier.HOST:
            return self.columns[Column.PARAMETER].view(key[0], part.start, part.stop)
        return slot.parameters[: part.stop - part.start]

    def _gradient(self, key: Key, slot: PartSlot) -> Tensor:
        """The gradient of a part: where it rests, or in its slot."""
        start, stop, _ = self._part(key)
        if self.sums[key[0]] is Tier.HOST:
            return self.columns[Column.GRADIENT].view(key[0], start, stop)
        return self.sum_in(slot, key) if self.sums[key[0]] is Tier.DISK else slot.gradient[: stop - start]

    def sum_in(self, slot: PartSlot, key: Key) -> Tensor:
        """The sum of a part's gradients in a slot, [stop - start], where it rests on disks."""
        part = self._part(key)
        return slot.sums.view(self.columns[Column.GRADIENT].dtype)[: part.stop - part.start]

    def _memory(self, key: Key, slot: PartSlot) -> Tensor:
        part = self._part(key)
        return self._state_memory(slot, part.stop - part.start)

    def _state_memory(self, slot: PartSlot, numel: int) -> Tensor:
        return slot.memory[: numel * self.state_bytes]

    def _state(self, key: Key, slot: PartSlot) -> dict[Column, Tensor]:
        """The optimizer state of a part: where it rests, or in its slot."""
        part = self._part(key)
        if part.tier is Tier.DISK:
            return slot.state(self.state, part.stop - part.start)
        return {column: self.columns[column].view(key[0], part.start, part.stop) for column in self.state}

    def _copies(self, one: Resident, slot: PartSlot) -> list[tuple[Tensor, Tensor]]:
        """For each column what rests on the device, and its place in a slot."""
        there = slot.state(self.state, one.stop - one.start)
        return [(self.columns[c].view(one.bucket, one.start, one.stop), there[c]) for c in self.state]


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
