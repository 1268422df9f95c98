"""The slots through which parts of buckets pass (`zero.host_parts`): host memory for one part each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.config.tiers import SLOTS
from megazero.disk.lanes import Need
from megazero.disk.swap import SwapSpace
from megazero.program.instruction import Piece
from megazero.program.passes.slots import SLOT_MEMORY, ops_of_part
from megazero.system.streams import host_tensor
from megazero.zero.parts import Resident, Resting
from megazero.zero.sharding import Column
from megazero.zero.storage import StoredColumn

FLAG = "--offload-optimizer"
"""What needs host memory, for errors."""

PartTensors = Mapping[Column, Tensor]
"""The columns of a part in host memory, [stop - start] each."""


@dataclass
class PartSlot:
    """The memory of a part on its way, and what there is to wait for. A kind of memory that no part needs is empty.

    gradient    of a part that is updated in host memory, or added to a sum that is not on the device
    parameters  its new ones, unless they rest in host memory
    memory      bytes for optimizer state that rests on disks
    sums        bytes for a sum of gradients that rests on disks
    free        before the part may use it
    arrived     for its state and its gradient
    made        for its new parameters; the result says whether anything has changed
    ends        before another part takes the slot
    """

    gradient: Tensor
    parameters: Tensor
    memory: Tensor
    sums: Tensor
    free: list[Need] = field(default_factory=list)
    arrived: list[Need] = field(default_factory=list)
    made: Callable[[], bool] | None = None
    ends: list[Need] = field(default_factory=list)

    def state(self, dtypes: Mapping[Column, torch.dtype], numel: int) -> dict[Column, Tensor]:
        """The optimizer state of so many elements in the slot, one column behind the other."""
        found, at = dict[Column, Tensor](), 0
        for column, dtype in dtypes.items():
            found[column], at = self.memory[at : at + numel * dtype.itemsize].view(dtype), at + numel * dtype.itemsize
        return found

    @property
    def nbytes(self) -> int:
        return self.gradient.nbytes + self.parameters.nbytes + self.memory.nbytes + self.sums.nbytes


def part_slots(
    columns: Mapping[Column, StoredColumn],
    resting: Sequence[Resting],
    residents: Sequence[Resident],
    state_bytes: int,
    swap: SwapSpace | None,
    device: torch.device,
) -> list[PartSlot]:
    """The slots of a rank, each as large as the largest part that needs it. Arguments as of `host_parts.HostParts`;
    state_bytes: of the optimizer state of an element.
    """
    ways = [
        (part.stop - part.start, ops_of_part(part.tier, own.rests, own.sums)) for own in resting for part in own.parts
    ]

    def most(piece: Piece) -> int:
        return max((numel for numel, way in ways if not SLOT_MEMORY[piece].isdisjoint(way)), default=0)

    stays = max((one.stop - one.start for one in residents), default=0)
    copied, state = most(Piece.GRADIENTS), max(most(Piece.STATE), stays) * state_bytes
    moved = most(Piece.UPDATED)
    dtypes = {column: columns[column].dtype for column in (Column.GRADIENT, Column.PARAMETER)}
    sums = most(Piece.SUMS) * dtypes[Column.GRADIENT].itemsize

    def allocated(size: int) -> Tensor:
        return torch.empty(0, dtype=torch.uint8) if swap is None else swap.allocate(size)

    return [
        PartSlot(
            host_tensor(copied, dtypes[Column.GRADIENT], device, FLAG),
            host_tensor(moved, dtypes[Column.PARAMETER], device, FLAG),
            allocated(state),
            allocated(sums),
        )
        for _ in range(SLOTS)
    ]
