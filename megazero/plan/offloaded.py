"""Bytes of a rank's model state that is not on the device, by the arithmetic that cuts it into parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megazero.config.schema import Run
from megazero.config.tiers import SLOTS, Tier
from megazero.disk.backend import DiskOptions
from megazero.disk.layout import SwapLayout
from megazero.program.shape import RankShape
from megazero.zero.host_parts import piece_of
from megazero.zero.offload import pieces_of, run_parts
from megazero.zero.shape import state_widths


@dataclass(frozen=True)
class OffloadedBytes:
    """What of a rank's model state is not on the device.

    parts    number of parts that are updated in host memory
    slots    bytes of host memory through which they pass
    buffers  bytes of host memory through which files are read and written
    host     bytes of optimizer state in host memory
    disk     bytes of optimizer state on disks
    files    bytes of the rank's swap files. Several folders share them, and each has a header and is padded
    moved    bytes of a step to the host, and back: gradients and parameters
    """

    parts: int = 0
    slots: int = 0
    buffers: int = 0
    host: int = 0
    disk: int = 0
    files: int = 0
    moved: tuple[int, int] = (0, 0)

    @property
    def state(self) -> int:
        """Bytes of optimizer state that is not on the device."""
        return self.host + self.disk

    @property
    def memory(self) -> int:
        """Bytes of host memory."""
        return self.host + self.slots + self.buffers


NOTHING = OffloadedBytes()


def offloaded_bytes(run: Run, ranges: Sequence[tuple[int, int]]) -> OffloadedBytes:
    """What leaves the device. ranges: what the rank updates of each bucket."""
    widths = state_widths(run.optimizer, run.parallel, run.offload)
    parts = run_parts(ranges, widths, run.offload)
    leaving = [part for of_bucket in parts for part in of_bucket if part.tier is not Tier.DEVICE]
    if not leaving:
        return NOTHING
    pieces, sizes = pieces_of(parts, widths), [part.stop - part.start for part in leaving]
    each = widths.gradient + widths.parameter + widths.state * bool(pieces)
    folders = (1.0,) * len(run.offload.nvme_path)
    return OffloadedBytes(
        parts=len(leaving),
        slots=SLOTS * max(sizes) * each,
        buffers=DiskOptions().memory_bytes if pieces else 0,
        host=sum(sizes) * widths.state - sum(pieces.values()),
        disk=sum(pieces.values()),
        files=sum(SwapLayout(pieces, folders, slots=1).file_bytes) if pieces else 0,
        moved=(sum(sizes) * widths.gradient, sum(sizes) * widths.parameter),
    )


def swapped_pieces(shape: RankShape) -> dict[str, int]:
    """The bytes of each part that rests on disks, by the name of its piece in a swap file."""
    return {
        piece_of((number, index)): part.state_bytes
        for number, bucket in enumerate(shape.buckets)
        for index, part in enumerate(bucket.parts)
        if part.tier is Tier.DISK
    }
