"""Parts of buckets that are updated in host memory, beside the computation.

A part on its way has a slot: host memory for its gradient and its new parameters, and for its optimizer state where
that rests on disks. There are a few slots, which the parts take in turn. Every step of the way runs on a lane of its
own and waits there for what it needs, the slot included. So the program only says what has to happen, and waits for
nothing before it reads the parameters (`ready`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.config.tiers import SLOTS, Tier
from megazero.disk.lanes import Need
from megazero.disk.swap import SwapSpace
from megazero.system.copy_thread import CopyThread
from megazero.system.streams import host_tensor
from megazero.zero.parts import Part
from megazero.zero.placement import OPTIMIZER, Column
from megazero.zero.storage import StoredColumn

FLAG = "--offload-optimizer"
"""What needs host memory, for errors."""

Key = tuple[int, int]
"""A bucket, and the number of a part of it."""
PartTensors = Mapping[Column, Tensor]
"""The columns of a part in host memory, [stop - start] each."""


def piece_of(key: Key) -> str:
    """The name of a part's optimizer state in swap files."""
    return f"bucket {key[0]}, part {key[1]}"


@dataclass
class _Slot:
    """The memory of a part on its way, and what there is to wait for.

    memory   bytes for the optimizer state; none where no part rests on a disk
    arrived  for its state and its gradient
    updated  for its update; the result says whether anything has changed
    ends     before another part takes the slot
    """

    gradient: Tensor
    parameters: Tensor
    memory: Tensor
    arrived: list[Need] = field(default_factory=list)
    updated: Future[bool] | None = None
    ends: list[Need] = field(default_factory=list)


class HostParts:
    """The parts of a rank's buckets that are updated in host memory.

    columns  the model state
    parts    of each bucket (`zero.parts`)
    swap     where optimizer state rests on disks, a piece for each part; None where none does
    """

    def __init__(
        self,
        columns: Mapping[Column, StoredColumn],
        parts: Sequence[Sequence[Part]],
        swap: SwapSpace | None,
        device: torch.device,
    ) -> None:
        self.columns, self.parts, self.swap = columns, parts, swap
        self.state = {column: columns[column].dtype for column in OPTIMIZER if column in columns}
        self._to_host, self._to_device = CopyThread(device, "to-host"), CopyThread(device, "to-device")
        self._host = ThreadPoolExecutor(max_workers=1, thread_name_prefix="host-updates")
        leaving = (part for of_bucket in parts for part in of_bucket if part.tier is not Tier.DEVICE)
        most = max((part.stop - part.start for part in leaving), default=0)
        self._slots = [
            _Slot(
                host_tensor(most, columns[Column.GRADIENT].dtype, device, FLAG),
                host_tensor(most, columns[Column.PARAMETER].dtype, device, FLAG),
                torch.empty(0, dtype=torch.uint8) if swap is None else swap.allocate(most * self.state_bytes),
            )
            for _ in range(SLOTS)
        ]
        self._turns = 0
        self._written = set[Key]()
        self._under_way: dict[Key, _Slot] = {}
        self._arriving: dict[int, list[Future[None]]] = defaultdict(list)

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
        request = self._swap.read({piece_of(key): self._memory(key, slot)}, needs=slot.ends)
        slot.arrived.append(request.wait)

    def copy_gradient(self, key: Key) -> None:
        """Start to copy a part's reduced gradient to host memory."""
        slot, part = self._taken(key), self._part(key)
        source = self.columns[Column.GRADIENT].view(key[0], part.start, part.stop)
        copied = self._to_host.copy(slot.gradient[: source.numel()], source, after=slot.ends)
        slot.arrived.append(copied.result)

    def update(self, key: Key, make: Callable[[Part, PartTensors], bool]) -> None:
        """Start to update a part.

        make: updates these tensors of the part, its parameters among them, and returns whether it has changed any.
        """
        slot, part = self._under_way[key], self._part(key)
        tensors = {
            **self._state(key, slot),
            Column.GRADIENT: slot.gradient[: part.stop - part.start],
            Column.PARAMETER: slot.parameters[: part.stop - part.start],
        }
        slot.updated = self._host.submit(_updated, tuple(slot.arrived), part, tensors, make)

    def copy_parameters(self, key: Key) -> None:
        """Start to copy a part's updated parameters to the device."""
        slot, part = self._under_way[key], self._part(key)
        assert slot.updated is not None, "parameters are copied before their update"
        target = self.columns[Column.PARAMETER].view(key[0], part.start, part.stop)
        copied = self._to_device.copy(target, slot.parameters[: target.numel()], wanted=slot.updated.result)
        self._arriving[key[0]].append(copied)
        slot.ends = [copied.result]
        if part.tier is not Tier.DISK:
            del self._under_way[key]

    def write(self, key: Key) -> None:
        """Start to write a part's optimizer state to disks."""
        slot = self._under_way.pop(key)
        assert slot.updated is not None, "state is written before its update"
        request = self._swap.write({piece_of(key): self._memory(key, slot)}, needs=[slot.updated.result])
        slot.ends.append(request.wait)

    def ready(self, buckets: Iterable[int]) -> None:
        """Return once the updated parameters of these buckets are there. Raises what has gone wrong on their way."""
        for index in buckets:
            for copied in self._arriving.pop(index, ()):
                copied.result()

    def wait(self) -> None:
        """Return once all parts have come to the end of their way. Raises what has gone wrong on it."""
        assert not self._under_way, f"{', '.join(map(piece_of, self._under_way))} is under way"
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
            self._swap.read({piece_of(key): self._memory(key, slot)}).wait()
        elif on_disk and reads:
            slot.memory.zero_()
        yield self._state(key, slot)
        if on_disk and writes:
            self._written.add(key)
            self._swap.write({piece_of(key): self._memory(key, slot)}).wait()

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
        for lane in (self._to_host, self._to_device):
            lane.close()
        self._host.shutdown(cancel_futures=True)
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
            slot.arrived = []
        return self._under_way[key]

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
    arrived: Sequence[Need], part: Part, tensors: PartTensors, make: Callable[[Part, PartTensors], bool]
) -> bool:
    """Executed on the host's lane."""
    for there in arrived:
        there()
    return make(part, tensors)
