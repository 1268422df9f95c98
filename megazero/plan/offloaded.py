"""What of a rank's model state is not on the device, by the arithmetic that cuts it into parts: how many bytes, how
many of them move in a step, and which of them lie where in its swap files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megazero.config.derive import whole_steps
from megazero.config.schema import Run
from megazero.config.tiers import SLOTS, Tier
from megazero.disk.backend import DiskOptions
from megazero.disk.layout import SwapLayout
from megazero.mpu.axes import Axes, Coordinates
from megazero.plan.shapes import shape_of, updated_layouts
from megazero.program.instruction import Instruction, Lane, Piece
from megazero.program.passes.gathers import loads_of
from megazero.program.passes.slots import SLOT_MEMORY, ops_of_part
from megazero.program.passes.updates import updates_of
from megazero.program.shape import PartShape, RankShape
from megazero.program.traffic import traffic
from megazero.zero.layout import state_groups
from megazero.zero.offload import pieces_of, run_parts, run_residents
from megazero.zero.parts import Resident
from megazero.zero.shape import state_widths
from megazero.zero.sharding import OPTIMIZER, run_columns

MOVES = (Lane.TO_HOST, Lane.TO_DEVICE, Lane.FROM_DISK, Lane.TO_DISK, Lane.HOST)
"""The lanes on which state moves between the device, host memory and disks, and that of updates in host memory."""


@dataclass(frozen=True)
class OffloadedBytes:
    """What of a rank's model state is not on the device.

    parts       number of parts that are updated in host memory
    optimizer   bytes of optimizer state in host memory, and on disks
    parameters  the same of parameters
    gradients   the same of summed gradients
    slots       bytes of host memory through which parts pass
    buffers     bytes of host memory through which files are read and written
    copied      bytes of optimizer state on the device that is written to disks too (--nvme-checkpoint)
    files       bytes of the rank's swap files. Several folders share them, and each has a header and is padded
    """

    parts: int = 0
    optimizer: tuple[int, int] = (0, 0)
    parameters: tuple[int, int] = (0, 0)
    gradients: tuple[int, int] = (0, 0)
    slots: int = 0
    buffers: int = 0
    copied: int = 0
    files: int = 0

    @property
    def host(self) -> int:
        """Bytes that rest in host memory."""
        return self.optimizer[0] + self.parameters[0] + self.gradients[0]

    @property
    def disk(self) -> int:
        """Bytes that rest on disks."""
        return self.optimizer[1] + self.parameters[1] + self.gradients[1]

    @property
    def memory(self) -> int:
        """Bytes of host memory."""
        return self.host + self.slots + self.buffers

    def __bool__(self) -> bool:
        return self.host + self.disk > 0


NOTHING = OffloadedBytes()


def offloaded_bytes(run: Run, axes: Axes, at: Coordinates, *, nccl: bool) -> OffloadedBytes:
    """What of the rank at `at` is not on the device. nccl: as in `plan.shapes.shape_of`."""
    shape, residents = shape_of(run, axes, at, nccl=nccl), _residents(run, axes, at, nccl=nccl)
    widths = state_widths(run.optimizer, run.parallel, run.offload)
    parts = [part for bucket in shape.buckets for part in bucket.parts]
    stored = {tier: sum(b.stored_bytes for b in shape.buckets if b.rests is tier) for tier in (Tier.HOST, Tier.DISK)}
    state = {tier: sum(part.state_bytes for part in parts if part.tier is tier) for tier in (Tier.HOST, Tier.DISK)}
    sums = {
        tier: sum(part.gradient_bytes for bucket in shape.buckets if bucket.sums is tier for part in bucket.parts)
        for tier in (Tier.HOST, Tier.DISK)
    }
    rests, pieces = pieces_of(shape), pieces_of(shape, residents, widths.state)
    return OffloadedBytes(
        parts=sum(part.tier is not Tier.DEVICE for part in parts),
        optimizer=(state[Tier.HOST], state[Tier.DISK]),
        parameters=(stored[Tier.HOST], stored[Tier.DISK]),
        gradients=(sums[Tier.HOST], sums[Tier.DISK]),
        slots=_slots(shape, max((piece.stop - piece.start for piece in residents), default=0) * widths.state),
        buffers=DiskOptions().memory_bytes if pieces else 0,
        copied=sum(pieces.values()) - sum(rests.values()),
        files=swap_file_bytes(run, pieces),
    )


def swap_file_bytes(run: Run, pieces: Mapping[str, int]) -> int:
    """The bytes of a rank's swap files with these pieces, each of them twice with --nvme-checkpoint."""
    weights, slots = (1.0,) * len(run.offload.nvme_path), 2 if whole_steps(run.offload) else 1
    return sum(SwapLayout(pieces, weights, slots).file_bytes) if pieces else 0


def swapped_pieces(run: Run, axes: Axes, at: Coordinates, *, nccl: bool) -> dict[str, int]:
    """The bytes of each piece in the swap files of the rank at `at`, by name. nccl: as in `plan.shapes.shape_of`."""
    widths = state_widths(run.optimizer, run.parallel, run.offload)
    return pieces_of(shape_of(run, axes, at, nccl=nccl), _residents(run, axes, at, nccl=nccl), widths.state)


def _residents(run: Run, axes: Axes, at: Coordinates, *, nccl: bool) -> list[Resident]:
    layouts, ranges = updated_layouts(run, axes, at, nccl=nccl)
    widths = state_widths(run.optimizer, run.parallel, run.offload)
    resting = run_parts(ranges, layouts, widths, run.offload)
    return run_residents(ranges, resting, widths, run.offload)


def _slots(shape: RankShape, resident: int) -> int:
    """Bytes of all slots, each as large as the largest part that needs it: those of parts that are updated, and those
    for parameters that are read (`zero.mover`). resident: most bytes of a piece that stays on the device.
    """
    ways = [
        (part, ops_of_part(part.tier, bucket.rests, bucket.sums))
        for bucket in shape.buckets
        if bucket.trained
        for part in bucket.parts
    ]

    def most(piece: Piece) -> PartShape:
        needing = (part for part, way in ways if not SLOT_MEMORY[piece].isdisjoint(way))
        return max(needing, key=lambda part: part.parameter_bytes, default=PartShape(Tier.DEVICE, 0, 0, 0))

    way = most(Piece.GRADIENTS).gradient_bytes + most(Piece.SUMS).gradient_bytes
    way += max(most(Piece.STATE).state_bytes, resident) + most(Piece.UPDATED).parameter_bytes
    on_disk = (part.parameter_bytes for b in shape.buckets if b.rests is Tier.DISK for part in b.parts)
    return SLOTS * (way + max(on_disk, default=0))


def least_moved(shape: RankShape) -> dict[Lane, int]:
    """The least bytes that a step moves, by lane (`MOVES`): each bucket is loaded once and updated. Sums of
    gradients do not count.
    """
    loaded = (number for number, bucket in enumerate(shape.buckets) if bucket.is_loaded)
    loads = [i for number in loaded for i in loads_of(number, shape)]
    return moved_in_step([*loads, *updates_of(shape.trained, shape)], shape)


def moved_in_step(instructions: Iterable[Instruction], shape: RankShape) -> dict[Lane, int]:
    """Bytes of model state that a step moves, by lane; of updates in host memory those of gradients."""
    state = [i for i in instructions if i.buckets and i.lane in MOVES]
    return dict.fromkeys(MOVES, 0) | traffic(state, shape)


def swap_contents(run: Run, axes: Axes, at: Coordinates, *, nccl: bool) -> str:
    """A digest of what the pieces of the rank at `at` hold: which elements of which parameters, in which columns.

    nccl: as in `plan.shapes.shape_of`.
    """
    layouts, ranges = updated_layouts(run, axes, at, nccl=nccl)
    groups = state_groups(axes, at)
    widths = state_widths(run.optimizer, run.parallel, run.offload)
    resting = run_parts(ranges, layouts, widths, run.offload)
    dtypes = run_columns(run.optimizer, run.parallel, run.offload)
    contents = (
        [(column.value, str(dtypes[column])) for column in OPTIMIZER if column in dtypes],
        sorted(axes.sizes.items()),
        (at.pp, at.dp, at.cp, at.tp),
        [
            (
                layout.numel,
                tuple(groups[layout.group]),
                [(entry.spec.name, entry.spec.shape, entry.spec.box, entry.offset) for entry in layout.entries],
                [(part.start, part.stop, part.tier.value) for part in rest.parts],
                rest.rests.value,
            )
            for layout, rest in zip(layouts, resting, strict=True)
        ],
    )
    return hashlib.sha256(repr(contents).encode()).hexdigest()
