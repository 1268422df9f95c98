"""Parameters that do not rest on the device, on their way there.

Those in host memory are copied. Those on disks are read into a slot, part by part, and copied from it; there are a few
slots (`program.passes.slots`). Both lanes work beside the computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megazero.config.tiers import SLOTS, Tier
from megazero.disk.lanes import Need
from megazero.disk.swap import SwapSpace
from megazero.program.shape import RankShape
from megazero.system.copy_thread import Copied, CopyThread
from megazero.zero.parts import Key, Resting, parameters_piece

FLAG = "--offload-params"
"""What needs host memory, for errors."""


@dataclass
class _Slot:
    """Memory for a part that is read, uint8. ends: before another part takes it."""

    memory: Tensor
    ends: list[Need] = field(default_factory=list)


class RestingParameters:
    """The parameters of a rank that do not rest on the device, by number of the bucket in the list of its shape.

    shape      the rank's buckets
    resting    where each of them rests (`zero.parts`)
    swap       where some rest on disks; None where none do
    to_device  the lane on which they are copied
    """

    def __init__(
        self, shape: RankShape, resting: Sequence[Resting], swap: SwapSpace | None, to_device: CopyThread
    ) -> None:
        self.shape, self.resting, self.swap, self._to_device = shape, resting, swap, to_device
        buckets = [bucket for bucket in shape.buckets if bucket.rests is Tier.DISK]
        most = max((part.parameter_bytes for bucket in buckets for part in bucket.parts), default=0)
        self._slots = [_Slot(swap.allocate(most)) for _ in range(SLOTS)] if swap is not None and most else []
        self._read: dict[Key, tuple[_Slot, Need]] = {}

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all slots, in host memory."""
        return sum(slot.memory.nbytes for slot in self._slots)

    def read(self, key: Key, number: int) -> None:
        """Start to read a part from disks into the slot of this number."""
        assert self.swap is not None and key not in self._read, f"{parameters_piece(key)} is on its way"
        slot = self._slots[number]
        for earlier, (taken, _) in self._read.items():
            assert taken is not slot, f"{parameters_piece(earlier)} has not been loaded, and {key} would overwrite it"
        request = self.swap.read({parameters_piece(key): self._memory(key, slot)}, needs=slot.ends)
        slot.ends = [request.wait]
        self._read[key] = slot, request.wait

    def load(self, key: Key, target: Tensor, held: Tensor | None, after: Sequence[Need]) -> Copied:
        """Start to copy to the device.

        key     a bucket and a part of it; -1: all of it
        target  on the device, 1-D, contiguous
        held    where the bucket rests, if that is host memory; None: the part has been read
        after   waited for before
        """
        if held is not None:
            return self._to_device.copy(target, held, after=after)
        slot, there = self._read.pop(key)
        copied = self._to_device.copy(target, self._memory(key, slot).view(target.dtype), after=[*after, there])
        slot.ends = [copied.result]
        return copied

    def keep(self, key: Key, values: Tensor) -> None:
        """Write a part to disks. Returns when that is done. values: [stop - start], anywhere."""
        assert self.swap is not None, "no parameters rest on disks"
        self.swap.write({parameters_piece(key): values.cpu().contiguous()}).wait()

    def _memory(self, key: Key, slot: _Slot) -> Tensor:
        number, part = key
        return slot.memory[: self.shape.buckets[number].parts[part].parameter_bytes]


class DiskColumn:
    """The buckets of one parameter column among those of a rank. first: the number of the column's first bucket."""

    def __init__(self, parameters: RestingParameters, first: int) -> None:
        self._parameters, self._first = parameters, first

    def keep(self, index: int, part: int, values: Tensor) -> None:
        """See `RestingParameters.keep`; index: of the bucket in the column."""
        self._parameters.keep((self._first + index, part), values)
