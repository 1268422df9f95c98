"""`ModelState`: parameters, gradients and optimizer state of a rank, as a table of buckets and columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from megazero.config.dtypes import grad_reduce_dtype
from megazero.config.schema import OffloadConfig, OptimizerConfig, ParallelConfig
from megazero.config.tiers import Tier
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.parameter import ParameterSpec, StateGroup, spec_of
from megazero.zero.actions import BucketActions
from megazero.zero.coded import Coding, frozen_layouts
from megazero.zero.device_account import DeviceAccount
from megazero.zero.frozen import FROZEN, FrozenParameters, buckets_of, parameters_by_name, specs_by_unit
from megazero.zero.gatherer import ParameterGatherer, WholeParameters
from megazero.zero.host_gradients import HostGradients
from megazero.zero.host_lanes import HostLanes
from megazero.zero.host_parts import HostParts
from megazero.zero.layout import Packing, group_sizes, pack, packing_of, state_groups
from megazero.zero.messages import BITS, KEPT, GradientMessages
from megazero.zero.offload import (
    NOTHING_LEAVES,
    OpenSwap,
    frozen_parts,
    frozen_ranges,
    pieces_of,
    run_parts,
    run_residents,
)
from megazero.zero.owed import OwedUpdates
from megazero.zero.parts import Part, Resting
from megazero.zero.reducer import GradientReducer
from megazero.zero.resting import DiskColumn, RestingParameters
from megazero.zero.shape import rank_shape, state_widths
from megazero.zero.sharding import OPTIMIZER, Column, Sharding, run_columns, shardings
from megazero.zero.storage import StoredColumn, parameter_column, stored_range, update_range

HOST = "host memory"
"""The name of what offloaded state takes there, in `ModelState.bytes`."""


class HasUnits(Protocol):
    """A model chunk. `units` are its modules in forward order; its `forward` calls each of them."""

    def units(self) -> list[nn.Module]: ...


class ModelState:
    """Parameters, gradients and optimizer state of this rank's stages, in flat buckets.

    The ZeRO stage decides which columns are sharded (`sharding`).

    stages  model chunks of this rank in order. Their parameters (`mpu.parameter.Parameter`) become views of the
            buckets. A parameter that two chunks share exists once. Frozen ones (`requires_grad` is False) are in a flat
            memory of their own (`frozen`), without gradient and optimizer state
    grid    a bucket is reduced and sharded over the groups of what its parameters name (`mpu.parameter.StateGroup`)
    base    how frozen matrices are encoded (`zero.coded`); None: they are stored as they are
    offload what of it leaves the device
    open_swap  opens this rank's swap files; None where nothing rests on disks

    `actions` is what the engine calls, and `shape` is what the lists of a step are made from. After construction all
    weights are zero: `zero.initial` or a checkpoint sets them. Construction communicates what `open_swap` does. Raises
    ValueError for an unknown ZeRO stage.
    """

    def __init__(
        self,
        stages: Sequence[HasUnits],
        grid: ProcessGrid,
        optimizer: OptimizerConfig,
        parallel: ParallelConfig,
        base: Coding | None = None,
        offload: OffloadConfig = NOTHING_LEAVES,
        open_swap: OpenSwap | None = None,
    ) -> None:
        self.grid = grid
        chunks = [stage.units() for stage in stages]
        row, dtypes = shardings(parallel, offload), run_columns(optimizer, parallel, offload)
        packing, sizes = packing_on(grid, parallel, offload), group_sizes(grid.axes, grid.at)
        layouts = pack(specs_by_unit(chunks, trained=True), sizes, packing)
        still = specs_by_unit(chunks, trained=False)
        frozen = frozen_layouts(still, sizes, row[Column.PARAMETER], packing, base)
        self.buckets = buckets_of(layouts, parameters_by_name(chunks, trained=True), grid.state_groups)
        self.account = DeviceAccount(offload.device_memory_budget)
        widths = state_widths(optimizer, parallel, offload)
        ranges = [update_range(own, row) for own in self.buckets]
        trained = run_parts(ranges, layouts, widths, offload)
        residents = run_residents(ranges, trained, widths, offload)
        stored = frozen_ranges(frozen, row[Column.PARAMETER], lambda group: _place(grid, group))
        every = [*trained, *frozen_parts(frozen, stored, widths, offload)]
        at = state_groups(grid.axes, grid.at)
        self.shape = rank_shape(_specs(chunks), layouts, frozen, row, widths, at, every)
        pieces, lanes = pieces_of(self.shape, residents, widths.state), HostLanes.of(grid.device)
        assert open_swap is not None or not pieces, "validated: state on disks has --nvme-path"
        swap = None if open_swap is None else open_swap(pieces)
        self.rests_on_disks = swap is not None
        self.resting = RestingParameters(self.shape, every, swap, lanes.to_device)
        self.columns = self._made_columns(row, dtypes, trained)
        held = self.columns[Column.PARAMETER]
        self.parameters = [WholeParameters.adopt(held, *each) for each in enumerate(self.buckets)]
        sharding, resting = row[Column.PARAMETER], self.resting
        self.frozen = FrozenParameters(
            chunks, frozen, grid.state_groups, sharding, held.dtype, grid.device, resting, self.account
        )
        bits, gradient = BITS[parallel.zero_quantized_gradients], self.columns[Column.GRADIENT]
        self.messages = GradientMessages(self.buckets, bits, grid.device, keep=parallel.zero_gradient_error_feedback)
        reduced = grad_reduce_dtype(optimizer.precision, parallel.grad_reduce_dtype)
        self.reducer = GradientReducer(
            self.buckets,
            gradient,
            self.columns[Column.EXP_AVG],
            dtype=reduced if bits is None else gradient.dtype,
            messages=self.messages,
            overlap=parallel.overlap,
            tp=grid.tp,
            sums=[own.sums for own in trained],
        )
        self.gatherer = ParameterGatherer(
            [*self.parameters, *self.frozen.parameters],
            self.resting,
            masters=self.weights if parallel.zero_quantized_weights else None,
            overlap=parallel.overlap,
        )
        self.host = HostParts(self.columns, trained, swap, lanes, grid.device, residents)
        """The parts that are updated in host memory."""
        self.gradients = HostGradients(self.buckets, trained, self.reducer, self.host, grid.at.tp)
        """Sums of gradients that are not on the device."""
        self.owed = OwedUpdates()
        """What a step leaves to the next one; nothing without --late-update."""
        self.actions = BucketActions(self.reducer, self.gatherer, self.owed, self.host, self.gradients)

    def _made_columns(
        self, row: Mapping[Column, Sharding], dtypes: Mapping[Column, torch.dtype], resting: Sequence[Resting]
    ) -> dict[Column, StoredColumn]:
        """All columns of the trained buckets."""
        parts, device = [own.state_parts for own in resting], self.grid.device
        made: dict[Column, StoredColumn] = {}
        for column, dtype in dtypes.items():
            if column is Column.PARAMETER:
                disk = DiskColumn(self.resting, 0)
                made[column] = parameter_column(
                    row[column], dtype, self.buckets, device, resting, disk, self.account, column.value
                )
                continue
            allocate = torch.empty if column is Column.GRADIENT else torch.zeros
            rests: Sequence[tuple[Part, ...]] = parts if column in OPTIMIZER else ()
            flag = "--offload-optimizer"
            if column is Column.GRADIENT:
                ranges = [stored_range(own, row[column]) for own in self.buckets]
                tiers = [own.sums for own in resting]
                rests, flag = (
                    [(Part(*own, tier),) for own, tier in zip(ranges, tiers, strict=True)],
                    "--offload-gradients",
                )
            made[column] = StoredColumn(
                row[column],
                dtype,
                self.buckets,
                device,
                allocate,
                parts=rests,
                flag=flag,
                account=self.account,
                name=column.value,
            )
        return made

    @property
    def weights(self) -> StoredColumn:
        """The column that the optimizer updates: the master weights, or the parameters where there are none."""
        return self.columns.get(Column.MASTER, self.columns[Column.PARAMETER])

    @property
    def has_master(self) -> bool:
        return Column.MASTER in self.columns

    def bytes(self) -> dict[str, int]:
        """Bytes of each column on this rank's device, and, if there are any, of frozen parameters, of error feedback,
        and of host memory that offloaded state takes.

        Buffers that live for part of a step are not included, and neither is what is on disks.
        """
        held = {column.value: stored.nbytes_in(Tier.DEVICE) for column, stored in self.columns.items()}
        there = sum(stored.nbytes_in(Tier.HOST) for stored in self.columns.values()) + self.frozen.nbytes_in(Tier.HOST)
        there += self.host.memory_bytes + self.resting.buffer_bytes
        more = {FROZEN: self.frozen.nbytes, KEPT: self.messages.nbytes, HOST: there}
        return held | {name: nbytes for name, nbytes in more.items() if nbytes}

    def wait_parameters(self) -> None:
        """Return once the parameters are those after the last step, and the ones that are whole between two steps are
        gathered.

        The engine waits by itself; any other reader must call this, or `reading`. If updates are owed it makes them:
        then it is a collective of all ranks.
        """
        self.owed.settle()
        self.host.wait()
        self.gatherer.wait()

    @contextmanager
    def reading(self, unit: nn.Module | None = None) -> Iterator[None]:
        """A context in which the parameters of a unit (None: all) are whole, trained and frozen ones.

        A collective of the ranks that share out their state; of all ranks if updates are owed.
        """
        self.owed.settle()
        self.host.wait()
        wanted = None if unit is None else {id(parameter) for parameter in unit.parameters()}
        held = [at.bucket.parameters for at in self.gatherer.parameters]
        with self.gatherer.reading(
            [n for n, own in enumerate(held) if wanted is None or any(id(parameter) in wanted for parameter in own)]
        ):
            yield


def packing_on(grid: ProcessGrid, parallel: ParallelConfig, offload: OffloadConfig) -> Packing:
    """How parameters are packed on this grid, the same on every rank."""
    return packing_of(parallel, offload, grid.replicas.size, nccl=grid.world.is_on_device)


def _place(grid: ProcessGrid, group: StateGroup) -> tuple[int, int]:
    """The number of this rank among those that share out a state, and their number."""
    inner = grid.state_groups(group).inner
    return inner.index, inner.size


def _specs(chunks: Sequence[Sequence[nn.Module]]) -> list[list[list[ParameterSpec]]]:
    """The specs of all parameters, by chunk and unit."""
    return [[[spec_of(parameter) for parameter in unit.parameters()] for unit in units] for units in chunks]
