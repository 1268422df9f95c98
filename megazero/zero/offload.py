"""What of a run's model state leaves the device, by arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from megazero.config.derive import updates_early, whole_steps
from megazero.config.schema import OffloadConfig, ParallelConfig
from megazero.config.tiers import ALIGNMENT, FILE_TIERS, SLOTS, Tier, TierShare
from megazero.disk.store import Store
from megazero.mpu.parameter import StateGroup
from megazero.program.instruction import Piece
from megazero.program.passes.slots import slots_within
from megazero.program.shape import RankShape
from megazero.zero.coded import FrozenLayouts
from megazero.zero.layout import BucketLayout
from megazero.zero.parts import (
    Range,
    Resident,
    Resting,
    parts_of,
    piece_name,
    resident_piece,
    residents_of,
    tiers_of,
)
from megazero.zero.shape import StateWidths
from megazero.zero.sharding import Sharding

OpenStores = Callable[[Mapping[Tier, Mapping[str, int]], Collection[str]], Mapping[Tier, Store]]
"""From the bytes of each piece, by tier and name, and from the names of those that keep their content before a write,
to the stores of these tiers. May be a collective.
"""


NOTHING_LEAVES = OffloadConfig()


def most_elements(widths: StateWidths, cfg: OffloadConfig) -> int:
    """Elements of the largest parts of which --nvme-buffer-bytes holds as many as there are slots."""
    state = widths.state * cfg.offload_optimizer.in_files
    read = widths.parameter * cfg.offload_params.in_files  # on its way to the device, beside what comes back
    sums = widths.gradient * cfg.offload_gradients.in_files
    each = SLOTS * (widths.gradient + widths.parameter + state + read + sums)
    return max(ALIGNMENT, cfg.nvme_buffer_bytes // each // ALIGNMENT * ALIGNMENT)


def run_parts(
    ranges: Sequence[Range],
    layouts: Sequence[BucketLayout],
    widths: StateWidths,
    cfg: OffloadConfig,
) -> list[Resting]:
    """Where the trained buckets rest. ranges: what the rank updates of each, which it also stores of its parameters."""
    sizes = [(stop - start) * (not layout.kept_whole) for (start, stop), layout in zip(ranges, layouts, strict=True)]
    units = [layout.units for layout in layouts]
    rests = tiers_of(sizes, cfg.offload_params, units)
    sums = tiers_of([stop - start for start, stop in ranges], cfg.offload_gradients, units)
    most = most_elements(widths, cfg)
    parts = parts_of(ranges, cfg.offload_optimizer, most, units, rests, sums)
    return [Resting(*where) for where in zip(parts, rests, sums, strict=True)]


def frozen_parts(
    frozen: FrozenLayouts,
    ranges: Sequence[Range],
    widths: StateWidths,
    cfg: OffloadConfig,
) -> list[Resting]:
    """Where the frozen buckets rest, those of codes last. ranges: what the rank stores of each, in elements, of codes
    in bytes. Of each kind the same share leaves.
    """
    most, offload = most_elements(widths, cfg), cfg.offload_params
    kept = [layout.kept_whole for layout in frozen.plain] + [False] * len(frozen.coded)
    sizes = [(stop - start) * (not stays) for (start, stop), stays in zip(ranges, kept, strict=True)]
    plain = len(frozen.plain)
    units = [layout.units for layout in (*frozen.plain, *(codes.numbers for codes in frozen.coded))]
    rests = [*tiers_of(sizes[:plain], offload, units[:plain]), *tiers_of(sizes[plain:], offload, units[plain:])]
    parts = parts_of(ranges, TierShare(), most, units, rests)
    return [Resting(*pair) for pair in zip(parts, rests, strict=True)]


def frozen_ranges(
    frozen: FrozenLayouts, sharding: Sharding, shard_of: Callable[[StateGroup], tuple[int, int]]
) -> list[Range]:
    """What a rank stores of each frozen bucket, in elements, of codes in bytes.

    sharding: of the parameter column. shard_of: the rank's number among those that share out a bucket, and theirs.
    """
    sharded = sharding is Sharding.SHARDED
    ranges = [
        layout.shard(*shard_of(layout.group)) if sharded and not layout.kept_whole else (0, layout.numel)
        for layout in frozen.plain
    ]
    for codes in frozen.coded:
        index, size = shard_of(codes.numbers.group) if sharded else (0, 1)
        ranges.append((index * codes.nbytes // size, (index + 1) * codes.nbytes // size))
    return ranges


def run_residents(
    ranges: Sequence[Range],
    resting: Sequence[Resting],
    widths: StateWidths,
    cfg: OffloadConfig,
) -> list[Resident]:
    """What stays on the device and is written to disks too; nothing without --nvme-checkpoint. Arguments as in
    `run_parts`, which gives `resting`.
    """
    return residents_of(ranges, resting, most_elements(widths, cfg)) if whole_steps(cfg) else []


def pieces_again(shape: RankShape, parallel: ParallelConfig, cfg: OffloadConfig) -> list[str]:
    """The names of the pieces that keep their content before a write: optimizer state that is updated early."""
    return [piece_name(Piece.STATE, key) for key in shape.early] if updates_early(parallel, cfg) else []


def with_slots(
    shape: RankShape,
    residents: Sequence[Resident],
    widths: StateWidths,
    cfg: OffloadConfig,
    *,
    shares_memory: bool,
) -> RankShape:
    """The shape with the number of slots that --nvme-buffer-bytes holds. residents: as `run_residents` gives them.
    shares_memory: as of `RankShape`.
    """
    copied = max((resident.stop - resident.start for resident in residents), default=0)
    shape = replace(shape, resident_bytes=copied * widths.state, shares_memory=shares_memory)
    return replace(shape, slots=slots_within(shape, cfg.nvme_buffer_bytes))


def pieces_of(shape: RankShape, residents: Sequence[Resident], state: int) -> dict[Tier, dict[str, int]]:
    """The bytes of what rests in files, by tier and by the name of its piece: parameters, gradient and optimizer state
    of each part; and of what is written to disks too. state: bytes of the optimizer state of an element.
    """
    pieces: dict[Tier, dict[str, int]] = {tier: {} for tier in FILE_TIERS}
    for number, bucket in enumerate(shape.buckets):
        for index, part in enumerate(bucket.parts):
            tiers = {Piece.PARAMETERS: bucket.rests, Piece.SUMS: bucket.sums, Piece.STATE: part.tier}
            for piece, tier in tiers.items():
                if tier.in_files:
                    pieces[tier][piece_name(piece, (number, index))] = part.bytes_of(piece)
    on_device = {resident_piece(resident): (resident.stop - resident.start) * state for resident in residents}
    pieces[Tier.DISK] |= on_device
    return {tier: of_tier for tier, of_tier in pieces.items() if of_tier}
