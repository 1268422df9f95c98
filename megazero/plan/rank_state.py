"""The model state of any rank by arithmetic: its parameters, the buckets that hold them, and where how many bytes rest.

What a rank of a run computes when it starts (`zero.state`) is computed here for every rank, with the same functions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from megazero.config.derive import folders_of, whole_steps
from megazero.config.placement import unplaced
from megazero.config.schema import ParallelConfig, Run, ScheduleConfig
from megazero.config.tiers import FILE_TIERS, Tier
from megazero.disk.layout import SwapLayout
from megazero.disk.transports import DiskOptions
from megazero.model.stage import StageSpec
from megazero.mpu.axes import Axes, Coordinates
from megazero.mpu.grid import Group
from megazero.mpu.parameter import ParameterSpec, StateGroup
from megazero.pipeline.build import stages_of
from megazero.pipeline.stage_specs import specs_of_stage
from megazero.program.passes.slots import slot_bytes
from megazero.program.shape import RankShape
from megazero.system import device as devices
from megazero.zero.coded import FrozenLayouts, coding_of, frozen_layouts
from megazero.zero.frozen import specs_by_unit
from megazero.zero.layout import BucketLayout, Packing, SharedBy, group_sizes, pack, packing_of, state_groups
from megazero.zero.offload import (
    frozen_parts,
    frozen_ranges,
    pieces_again,
    pieces_of,
    run_parts,
    run_residents,
    with_slots,
)
from megazero.zero.parts import Resident, Resting
from megazero.zero.shape import StateWidths, rank_shape, state_widths, update_ranges
from megazero.zero.sharding import OPTIMIZER, Column, Sharding, run_columns, shardings

KEPT_BYTES = 4
"""Of an element that error feedback keeps."""


def micro_batches_of(run: Run, axes: Axes) -> int:
    """Number of micro-batches of a step with the run's whole global batch."""
    return run.schedule.global_batch_size // (run.schedule.micro_batch_size * axes.dp)


def has_nccl(parallel: ParallelConfig, axes: Axes) -> bool:
    """Whether the run says that it will have NCCL: with `auto` for both, the machine decides later, and this is False.

    A bucket's size changes the bytes of a sharded state by its padding only.
    """
    on_card = parallel.backend == "auto" and parallel.device == "cuda"
    return axes.world_size > 1 and (parallel.backend == "nccl" or on_card)


def specs_of(run: Run, pp_index: int, tp_index: int, *, trained: bool = True) -> list[list[list[ParameterSpec]]]:
    """The specs of the parameters that a rank with these coordinates trains, by chunk and unit.

    The layers are built on the meta device, which takes no memory. trained=False: the specs of the parameters that the
    rank holds and does not train (with --lora-rank, all but the adapters).
    """
    specs = _specs(_read_by_specs(run), pp_index, tp_index)[0 if trained else 1]
    return [[[*unit] for unit in chunk] for chunk in specs]


def _read_by_specs(run: Run) -> Run:
    """The run with the defaults of what no parameter depends on: placement, batch, ZeRO and recompute. A search over
    layouts asks for the same specs with all values of these.
    """
    bare = unplaced(run)
    parallel = replace(bare.parallel, zero_stage=0, zero_shard_size=None, recompute_granularity="none")
    return replace(bare, parallel=parallel, schedule=ScheduleConfig())


# These are of runs without a placement, on which they do not depend: a search asks for them hundreds of times.
@lru_cache(maxsize=2048)
def _specs(run: Run, pp_index: int, tp_index: int) -> tuple[list[list[list[ParameterSpec]]], ...]:
    """Those that the rank trains, and those that it does not."""
    chunks = specs_of_stage(run, pp_index)
    ends = _built(run, pp_index, tp_index, [replace(spec, blocks=range(0)) for spec in chunks])
    blocks = _block_specs(_read_by_blocks(run), tp_index)
    return tuple(
        [
            [*end[: spec.has_embedding], *(of_blocks[number] for number in spec.blocks), *end[spec.has_embedding :]]
            for spec, end in zip(chunks, of_ends, strict=True)
        ]
        for of_ends, of_blocks in zip(ends, blocks, strict=True)
    )


def _read_by_blocks(run: Run) -> Run:
    """The run with the defaults of what the parameters of blocks do not depend on: how stages share out the layers."""
    parallel = replace(run.parallel, pp=1, virtual_stages=1, pipeline_schedule=None, partition=None)
    return replace(run, parallel=parallel)


@lru_cache(maxsize=64)
def _block_specs(run: Run, tp_index: int) -> tuple[list[list[ParameterSpec]], ...]:
    """The same of all blocks of the model, by block."""
    every = StageSpec(range(run.model.num_layers), has_embedding=False, has_head=False)
    return tuple(blocks for (blocks,) in _built(run, 0, tp_index, [every]))


def _built(
    run: Run, pp_index: int, tp_index: int, specs: Sequence[StageSpec]
) -> tuple[list[list[list[ParameterSpec]]], ...]:
    """The same of chunks with these layers, which are built for that."""
    tp = Group(tuple(range(run.parallel.tp)), tp_index, None)
    units = [stage.units() for stage in stages_of(run, pp_index, tp, torch.device("meta"), specs=specs)]
    return tuple(specs_by_unit(units, trained=trained) for trained in (True, False))


@lru_cache(maxsize=512)
def _packed(
    run: Run, sizes: tuple[tuple[StateGroup, int], ...], pp_index: int, tp_index: int, packing: Packing
) -> tuple[BucketLayout, ...]:
    return pack(specs_of(run, pp_index, tp_index), dict(sizes), packing)


OFF_DEVICE = tuple(tier for tier in Tier if tier is not Tier.DEVICE)


@dataclass(frozen=True)
class OffloadedBytes:
    """What of a rank's model state is not on the device.

    parts       number of parts that are updated in host memory
    optimizer   bytes of optimizer state on each tier of `OFF_DEVICE`
    parameters  the same of parameters
    gradients   the same of summed gradients
    slots       bytes of host memory through which parts pass
    buffers     bytes of host memory through which files are read and written
    copied      bytes of optimizer state on the device that is written to disks too (--nvme-checkpoint)
    files       bytes of the rank's files. Several folders share swap files, and each has a header and is padded
    """

    parts: int = 0
    optimizer: tuple[int, ...] = (0,) * len(OFF_DEVICE)
    parameters: tuple[int, ...] = (0,) * len(OFF_DEVICE)
    gradients: tuple[int, ...] = (0,) * len(OFF_DEVICE)
    slots: int = 0
    buffers: int = 0
    copied: int = 0
    files: int = 0

    @property
    def host(self) -> int:
        """Bytes that rest in host memory."""
        return self.on(Tier.HOST)

    @property
    def in_files(self) -> int:
        """Bytes that rest in files."""
        return sum(map(self.on, FILE_TIERS))

    def on(self, tier: Tier) -> int:
        """Bytes that rest on a tier."""
        number = OFF_DEVICE.index(tier)
        return self.optimizer[number] + self.parameters[number] + self.gradients[number]

    @property
    def memory(self) -> int:
        """Bytes of host memory."""
        return self.host + self.slots + self.buffers

    def __bool__(self) -> bool:
        return self.host + self.in_files > 0


NOTHING = OffloadedBytes()


class StageLayers(NamedTuple):
    """What of a model a rank has: see `StageBytes`."""

    blocks: int
    chunks: int
    embedding: bool
    head: bool


@dataclass(frozen=True)
class StageBytes:
    """The model state of one rank of a stage.

    blocks      number of blocks, in `chunks` model chunks
    embedding   whether the rank has the embedding
    head        whether the rank has the head
    parameters  number of parameters, frozen ones included
    weights, gradients, optimizer
                bytes of these columns on the device; the gradients' with error feedback, the optimizer's are the
                master weights and the moments
    feedback    bytes of error feedback alone
    elsewhere   what rests in host memory and in files
    """

    blocks: int
    chunks: int
    embedding: bool
    head: bool
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    feedback: int = 0
    elsewhere: OffloadedBytes = NOTHING

    @property
    def total(self) -> int:
        """Of what is on the device."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, eq=False)
class RankState:
    """The model state of the rank at `at`, as `zero.state.ModelState` on that rank. What is asked for is computed once.

    nccl  whether the run communicates through NCCL, which has larger buckets
    """

    run: Run
    axes: Axes
    at: Coordinates
    nccl: bool = field(kw_only=True)

    @property
    def _row(self) -> dict[Column, Sharding]:
        return shardings(self.run.parallel, self.run.offload)

    @property
    def _packing(self) -> Packing:
        return packing_of(self.run.parallel, self.run.offload, self.axes.dp * self.axes.cp, nccl=self.nccl)

    @property
    def _widths(self) -> StateWidths:
        return state_widths(self.run.optimizer, self.run.parallel, self.run.offload)

    @cached_property
    def _groups(self) -> dict[StateGroup, SharedBy]:
        return state_groups(self.axes, self.at)

    def specs(self, *, trained: bool) -> list[list[list[ParameterSpec]]]:
        """Those of its trained (or its frozen) parameters, by chunk and unit."""
        return specs_of(self.run, self.at.pp, self.at.tp, trained=trained)

    @property
    def layers(self) -> StageLayers:
        """What of the model it has."""
        specs = specs_of_stage(self.run, self.at.pp)
        blocks = sum(len(spec.blocks) for spec in specs)
        ends = (any(spec.has_embedding for spec in specs), any(spec.has_head for spec in specs))
        return StageLayers(blocks, len(specs), *ends)

    @cached_property
    def layouts(self) -> tuple[BucketLayout, ...]:
        """The trained buckets."""
        sizes = tuple(group_sizes(self.axes, self.at).items())
        return _packed(_read_by_specs(self.run), sizes, self.at.pp, self.at.tp, self._packing)

    @cached_property
    def _ranges(self) -> list[tuple[int, int]]:
        """What the rank updates of each trained bucket."""
        return update_ranges(self.layouts, self._row, self._groups)

    @cached_property
    def _resting(self) -> list[Resting]:
        """Where each trained bucket rests."""
        return run_parts(self._ranges, self.layouts, self._widths, self.run.offload)

    @cached_property
    def _frozen(self) -> FrozenLayouts:
        still = self.specs(trained=False)
        sizes, coding = group_sizes(self.axes, self.at), coding_of(self.run.lora, self.run.model)
        return frozen_layouts(still, sizes, self._row[Column.PARAMETER], self._packing, coding)

    @cached_property
    def shape(self) -> RankShape:
        """The shape for the list of a step."""
        trained, still = (self.specs(trained=trained) for trained in (True, False))
        specs = [
            [[*of_unit, *others] for of_unit, others in zip(*chunks, strict=True)]
            for chunks in zip(trained, still, strict=True)
        ]
        row, widths, frozen, groups = self._row, self._widths, self._frozen, self._groups
        stored = frozen_ranges(frozen, row[Column.PARAMETER], lambda group: (0, groups[group].shards))
        resting = [*self._resting, *frozen_parts(frozen, stored, widths, self.run.offload)]
        shape = rank_shape(specs, self.layouts, frozen, row, widths, groups, resting)
        shares_memory = devices.shares_host_memory(devices.kind(self.run.parallel.device))
        return with_slots(shape, self._residents, widths, self.run.offload, shares_memory=shares_memory)

    @cached_property
    def _residents(self) -> list[Resident]:
        """What stays on the device and is written to disks too."""
        return run_residents(self._ranges, self._resting, self._widths, self.run.offload)

    @property
    def pieces(self) -> dict[Tier, dict[str, int]]:
        """The bytes of each piece in its files, by tier and name."""
        return pieces_of(self.shape, self._residents, self._widths.state)

    @property
    def files(self) -> dict[Tier, int]:
        """The bytes of its files, by tier."""
        # a whole step stays beside the one that is written
        slots = {Tier.DISK: 2 if whole_steps(self.run.offload) else 1}
        again = {Tier.DISK: pieces_again(self.shape, self.run.parallel, self.run.offload)}
        return {
            tier: file_bytes(self.run, tier, pieces, slots=slots.get(tier, 1), again=again.get(tier, ()))
            for tier, pieces in self.pieces.items()
        }

    @property
    def contents(self) -> str:
        """A digest of what the pieces hold: which elements of which parameters, in which columns."""
        dtypes, groups = run_columns(self.run.optimizer, self.run.parallel, self.run.offload), self._groups
        contents = (
            [(column.value, str(dtypes[column])) for column in OPTIMIZER if column in dtypes],
            sorted(self.axes.sizes.items()),
            (self.at.pp, self.at.dp, self.at.cp, self.at.tp),
            [
                (
                    layout.numel,
                    tuple(groups[layout.group]),
                    [(entry.spec.name, entry.spec.shape, entry.spec.box, entry.offset) for entry in layout.entries],
                    [(part.start, part.stop, part.tier.value) for part in rest.parts],
                    rest.rests.value,
                    *([str(layout.dtype)] if layout.dtype else []),  # without any the digest is that of before
                )
                for layout, rest in zip(self.layouts, self._resting, strict=True)
            ],
            *pieces_again(
                self.shape, self.run.parallel, self.run.offload
            ),  # files without any have the digest of before
        )
        return hashlib.sha256(repr(contents).encode()).hexdigest()

    @property
    def bytes(self) -> StageBytes:
        """The bytes of it, in every tier."""
        frozen, buckets, elsewhere = self._frozen, self.shape.buckets, self._elsewhere
        layouts = (*self.layouts, *frozen.plain, *(codes.numbers for codes in frozen.coded))
        sums = (b.gradient_bytes // (b.shards if b.sharded_gradient else 1) for b in buckets if b.sums is Tier.DEVICE)
        feedback = KEPT_BYTES * self._fed_back if self.run.parallel.zero_gradient_error_feedback else 0
        return StageBytes(
            **self.layers._asdict(),
            parameters=sum(layout.parameters for layout in layouts),
            weights=sum(bucket.stored_bytes for bucket in buckets if bucket.rests is Tier.DEVICE),
            gradients=sum(sums) + feedback,
            optimizer=self._widths.state * sum(stop - start for start, stop in self._ranges) - sum(elsewhere.optimizer),
            feedback=feedback,
            elsewhere=elsewhere,
        )

    @property
    def _fed_back(self) -> int:
        """Elements that error feedback keeps: those of each message in blocks, to the ranks of a shard and across."""
        pairs = [(layout.numel, self._groups[layout.group]) for layout in self.layouts]
        return sum(numel * (by.shards > 1) + numel // by.shards * (by.across > 1) for numel, by in pairs)

    @property
    def _elsewhere(self) -> OffloadedBytes:
        buckets, state = self.shape.buckets, self._widths.state
        parts = [(bucket, part) for bucket in buckets for part in bucket.parts]
        copied = [(resident.stop - resident.start) * state for resident in self._residents]
        return OffloadedBytes(
            parts=sum(part.tier is not Tier.DEVICE for _, part in parts),
            optimizer=_off_device((part.tier, part.state_bytes) for _, part in parts),
            parameters=_off_device((bucket.rests, bucket.stored_bytes) for bucket in buckets),
            gradients=_off_device((bucket.sums, part.gradient_bytes) for bucket, part in parts),
            slots=self.shape.slots * slot_bytes(self.shape).of_both,
            buffers=sum(map(buffers_of, self.pieces)),
            copied=sum(copied),
            files=sum(self.files.values()),
        )


def _off_device(sizes: Iterable[tuple[Tier, int]]) -> tuple[int, ...]:
    """Bytes on each tier of `OFF_DEVICE`, of bytes on any tier."""
    totals = dict.fromkeys(Tier, 0)
    for tier, nbytes in sizes:
        totals[tier] += nbytes
    return tuple(totals[tier] for tier in OFF_DEVICE)


def file_bytes(run: Run, tier: Tier, pieces: Mapping[str, int], *, slots: int = 1, again: Iterable[str] = ()) -> int:
    """The bytes of a rank's files on a tier with so many slots of each of these pieces, and one more of some, in whole
    pages, which is what files of their own take too.
    """
    weights = (1.0,) * len(folders_of(run.offload, tier))
    return sum(SwapLayout(pieces, weights, slots, frozenset(again)).file_bytes) if pieces else 0


def buffers_of(tier: Tier) -> int:
    """The bytes of host memory through which a rank reads and writes the files of a tier that it has."""
    return DiskOptions().memory_bytes if FILE_TIERS[tier].preallocated else 0


def stage_state(run: Run, axes: Axes, stage: int, *, nccl: bool | None = None) -> RankState:
    """The state of the ranks of a stage with dp, cp and tp index 0. All ranks of the stage have as many bytes. Runs of
    which no difference changes their model state share one.

    nccl: default: what the run says.
    """
    return _stage_state(_read_by_state(run), axes, stage, has_nccl(run.parallel, axes) if nccl is None else nccl)


def _read_by_state(run: Run) -> Run:
    """The run with the defaults of what no model state depends on: its batch, and what backward computes again."""
    return replace(run, parallel=replace(run.parallel, recompute_granularity="none"), schedule=ScheduleConfig())


# A search asks for the state of a stage with several batches, for its list and for its bytes.
@lru_cache(maxsize=1024)
def _stage_state(run: Run, axes: Axes, stage: int, nccl: bool) -> RankState:
    return RankState(run, axes, Coordinates(stage, 0, 0, 0), nccl=nccl)


def stage_bytes(run: Run, axes: Axes) -> list[StageBytes]:
    """The bytes of each stage's ranks, without buffers of buckets in flight."""
    return [stage_state(run, axes, stage).bytes for stage in range(axes.pp)]
