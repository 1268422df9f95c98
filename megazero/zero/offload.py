"""What of a run's optimizer state leaves the device, by arithmetic, and the memory through which it passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megazero.config.schema import OffloadConfig
from megazero.config.tiers import ALIGNMENT, SLOTS, Tier, offload_of
from megazero.disk.swap import SwapSpace
from megazero.zero.host_parts import HostParts, piece_of
from megazero.zero.parts import Part, parts_of
from megazero.zero.placement import Column
from megazero.zero.shape import StateWidths
from megazero.zero.storage import StoredColumn

OpenSwap = Callable[[Mapping[str, int]], SwapSpace]
"""From the bytes of each piece, by name, to swap files with these pieces."""


@dataclass(frozen=True)
class Offloading:
    """What of a model state leaves the device. open_swap: opens this rank's swap files; None where nothing needs any"""

    cfg: OffloadConfig
    open_swap: OpenSwap | None = None

    @property
    def tier(self) -> Tier:
        """Where the optimizer state goes that leaves the device."""
        return offload_of(self.cfg.offload_optimizer).tier


NO_OFFLOADING = Offloading(OffloadConfig())


def element_bytes(widths: StateWidths, tier: Tier) -> int:
    """Bytes of a slot (`zero.host_parts`) for each element of a part."""
    return widths.gradient + widths.parameter + widths.state * (tier is Tier.DISK)


def run_parts(ranges: Sequence[tuple[int, int]], widths: StateWidths, cfg: OffloadConfig) -> list[tuple[Part, ...]]:
    """The parts of each trained bucket. ranges: what the rank updates of it."""
    offload = offload_of(cfg.offload_optimizer)
    most = cfg.nvme_buffer_bytes // (SLOTS * element_bytes(widths, offload.tier)) // ALIGNMENT * ALIGNMENT
    return parts_of(ranges, offload, max(most, ALIGNMENT))


def pieces_of(parts: Sequence[Sequence[Part]], widths: StateWidths) -> dict[str, int]:
    """The bytes of each part that rests on disks, by the name of its piece."""
    return {
        piece_of((bucket, number)): (part.stop - part.start) * widths.state
        for bucket, of_bucket in enumerate(parts)
        for number, part in enumerate(of_bucket)
        if part.tier is Tier.DISK
    }


def host_parts(
    columns: Mapping[Column, StoredColumn],
    parts: Sequence[Sequence[Part]],
    widths: StateWidths,
    offloading: Offloading,
    device: torch.device,
) -> HostParts:
    """The parts of a rank that are updated in host memory. Opens the swap files where some rest on disks."""
    pieces, swap = pieces_of(parts, widths), None
    if pieces:
        assert offloading.open_swap is not None, "validated: state on disks has --nvme-path"
        swap = offloading.open_swap(pieces)
    return HostParts(columns, parts, swap, device)
