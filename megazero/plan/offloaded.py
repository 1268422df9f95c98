"""Bytes of a rank's model state that is not on the device, by the arithmetic that cuts it into parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megazero.config.tiers import SLOTS, Tier
from megazero.disk.backend import DiskOptions
from megazero.disk.layout import SwapLayout
from megazero.program.instruction import Instruction, Lane, Op
from megazero.program.passes.loads import loads_of
from megazero.program.passes.updates import updates_of, way_of
from megazero.program.shape import PartShape, RankShape
from megazero.program.traffic import traffic
from megazero.zero.offload import pieces_of

MOVES = (Lane.TO_HOST, Lane.TO_DEVICE, Lane.FROM_DISK, Lane.TO_DISK, Lane.HOST)
"""The lanes on which state moves between the device, host memory and disks, and that of updates in host memory."""


@dataclass(frozen=True)
class OffloadedBytes:
    """What of a rank's model state is not on the device.

    parts       number of parts that are updated in host memory
    optimizer   bytes of optimizer state in host memory, and on disks
    parameters  the same of parameters
    slots       bytes of host memory through which parts pass
    buffers     bytes of host memory through which files are read and written
    moved       least bytes that a step moves, by lane (`MOVES`): each bucket is loaded once and updated
    files       bytes of the rank's swap files. Several folders share them, and each has a header and is padded
    """

    parts: int = 0
    optimizer: tuple[int, int] = (0, 0)
    parameters: tuple[int, int] = (0, 0)
    slots: int = 0
    buffers: int = 0
    moved: tuple[int, ...] = (0, 0, 0, 0, 0)
    files: int = 0

    @property
    def host(self) -> int:
        """Bytes that rest in host memory."""
        return self.optimizer[0] + self.parameters[0]

    @property
    def disk(self) -> int:
        """Bytes that rest on disks."""
        return self.optimizer[1] + self.parameters[1]

    @property
    def memory(self) -> int:
        """Bytes of host memory."""
        return self.host + self.slots + self.buffers

    def __bool__(self) -> bool:
        return self.host + self.disk > 0


NOTHING = OffloadedBytes()


def offloaded_bytes(shape: RankShape, folders: int) -> OffloadedBytes:
    """What of a rank with this shape is not on the device. folders: number of those of its swap files."""
    parts = [part for bucket in shape.buckets for part in bucket.parts]
    stored = {tier: sum(b.stored_bytes for b in shape.buckets if b.rests is tier) for tier in (Tier.HOST, Tier.DISK)}
    state = {tier: sum(part.state_bytes for part in parts if part.tier is tier) for tier in (Tier.HOST, Tier.DISK)}
    pieces = pieces_of(shape)
    return OffloadedBytes(
        parts=sum(part.tier is not Tier.DEVICE for part in parts),
        optimizer=(state[Tier.HOST], state[Tier.DISK]),
        parameters=(stored[Tier.HOST], stored[Tier.DISK]),
        slots=_slots(shape),
        buffers=DiskOptions().memory_bytes if pieces else 0,
        moved=_least_moved(shape),
        files=sum(SwapLayout(pieces, (1.0,) * folders, slots=1).file_bytes) if pieces else 0,
    )


def _slots(shape: RankShape) -> int:
    """Bytes of all slots, each as large as the largest part that needs it: those of `zero.host_parts`, and those for
    parameters that are read (`zero.resting`).
    """
    ways = [
        (part, way_of(part.tier, bucket.rests)) for bucket in shape.buckets if bucket.trained for part in bucket.parts
    ]

    def most(*ops: Op) -> PartShape:
        needing = (part for part, way in ways if not {*ops}.isdisjoint(way))
        return max(needing, key=lambda part: part.parameter_bytes, default=PartShape(Tier.DEVICE, 0, 0, 0))

    way = most(Op.UPDATE_HOST).gradient_bytes + most(Op.READ_STATE).state_bytes
    way += most(Op.COPY_PARAMETERS, Op.WRITE_PARAMETERS).parameter_bytes
    on_disk = (part.parameter_bytes for b in shape.buckets if b.rests is Tier.DISK for part in b.parts)
    return SLOTS * (way + max(on_disk, default=0))


def _least_moved(shape: RankShape) -> tuple[int, ...]:
    loaded = (number for number, bucket in enumerate(shape.buckets) if bucket.is_loaded)
    loads = [i for number in loaded for i in loads_of(number, shape)]
    return tuple(moved_in_step([*loads, *updates_of(shape.trained, shape)], shape).values())


def moved_in_step(instructions: Iterable[Instruction], shape: RankShape) -> dict[Lane, int]:
    """Bytes of model state that a step moves, by lane; of updates in host memory those of gradients."""
    state = [i for i in instructions if i.buckets and i.lane in MOVES]
    return dict.fromkeys(MOVES, 0) | traffic(state, shape)
