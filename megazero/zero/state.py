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
from megazero.program.passes.gathers import loads_of
from megazero.program.passes.slots import place_slots
from megazero.system import device as devices
from megazero.zero.actions import BucketActions, OwedUpdates
from megazero.zero.coded import Coding, frozen_layouts
from megazero.zero.frozen import FROZEN, FrozenParameters, buckets_of, parameters_by_name, specs_by_unit
from megazero.zero.gatherer import ParameterGatherer, WholeParameters
from megazero.zero.layout import Packing, group_sizes, pack, packing_of, state_groups
from megazero.zero.memories import DeviceMemory, Tiers
from megazero.zero.messages import BITS, KEPT, GradientMessages
from megazero.zero.mover import Mover
from megazero.zero.offload import (
    NOTHING_LEAVES,
    OpenStores,
    frozen_parts,
    frozen_ranges,
    pieces_again,
    pieces_of,
    run_parts,
    run_residents,
    with_slots,
)
from megazero.zero.parts import Part, Range, Resting
from megazero.zero.reducer import GradientReducer
from megazero.zero.shape import rank_shape, state_widths
from megazero.zero.sharding import Column, Sharding, run_columns, shardings
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
    open_stores  opens the files of this rank; None where nothing rests in files

    `actions` is what the engine calls, and `shape` is what the lists of a step are made from. After construction all
    weights are zero: `zero.portions` or a checkpoint sets them. Construction communicates what `open_stores` does.
    Raises ValueError for an unknown ZeRO stage.
    """

    def __init__(
        self,
        stages: Sequence[HasUnits],
        grid: ProcessGrid,
        optimizer: OptimizerConfig,
        parallel: ParallelConfig,
        base: Coding | None = None,
        offload: OffloadConfig = NOTHING_LEAVES,
        open_stores: OpenStores | None = None,
    ) -> None:
        self.grid = grid
        chunks = [stage.units() for stage in stages]
        row, dtypes = shardings(parallel, offload), run_columns(optimizer, parallel, offload)
        packing, sizes = packing_on(grid, parallel, offload), group_sizes(grid.axes, grid.at)
        layouts = pack(specs_by_unit(chunks, trained=True), sizes, packing)
        still = specs_by_unit(chunks, trained=False)
        frozen = frozen_layouts(still, sizes, row[Column.PARAMETER], packing, base)
        self.buckets = buckets_of(layouts, parameters_by_name(chunks, trained=True), grid.state_groups)
        widths = state_widths(optimizer, parallel, offload)
        ranges = [update_range(own, row) for own in self.buckets]
        trained = run_parts(ranges, layouts, widths, offload)
        self.residents = run_residents(ranges, trained, widths, offload)
        """What rests on the device, and is written to disks with each whole step; nobody reads it in training."""
        stored = frozen_ranges(frozen, row[Column.PARAMETER], lambda group: _place(grid, group))
        self.resting = [*trained, *frozen_parts(frozen, stored, widths, offload)]
        """Where each bucket rests, by number in the list of `shape`: the trained ones come first."""
        groups = state_groups(grid.axes, grid.at)
        shape = rank_shape(_specs(chunks), layouts, frozen, row, widths, groups, self.resting)
        shares_memory = devices.shares_host_memory(grid.device.type) and not grid.memory_apart
        self.shape = with_slots(shape, self.residents, widths, offload, shares_memory=shares_memory)
        pieces = pieces_of(self.shape, self.residents, widths.state)
        assert open_stores is not None or not pieces, "validated: state in files has folders"
        stores = {} if open_stores is None else open_stores(pieces, pieces_again(self.shape, parallel, offload))
        self.tiers = Tiers(DeviceMemory(grid.device, offload.device_memory_budget), stores)
        self.columns = self._made_columns(row, dtypes, trained)
        held = self.columns[Column.PARAMETER]
        self.parameters = [WholeParameters.adopt(held, *each) for each in enumerate(self.buckets)]
        self.frozen = FrozenParameters(
            chunks, frozen, grid.state_groups, held.sharding, held.dtype, self.tiers, self.resting
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
            masters=self.weights if parallel.zero_quantized_weights else None,
            overlap=parallel.overlap,
        )
        self.mover = Mover(
            self.shape,
            self.resting,
            self.columns,
            self.tiers,
            self.reducer,
            self.gatherer,
            grid.at.tp,
        )
        self.owed = OwedUpdates()
        """What a step leaves to the next one; nothing without --late-update."""
        self.actions = BucketActions(self.shape, self.reducer, self.gatherer, self.mover, self.owed)

    def _made_columns(
        self, row: Mapping[Column, Sharding], dtypes: Mapping[Column, torch.dtype], resting: Sequence[Resting]
    ) -> dict[Column, StoredColumn]:
        """All columns of the trained buckets."""
        parameter, gradient = row[Column.PARAMETER], row[Column.GRADIENT]
        ranges = [stored_range(bucket, gradient) for bucket in self.buckets]
        sums = [(Part(*whole, rests.sums),) for whole, rests in zip(ranges, resting, strict=True)]
        parts = [rests.state_parts for rests in resting]
        made: dict[Column, StoredColumn] = {}
        for column, dtype in dtypes.items():
            of = dtype, self.buckets, self.tiers, column.value
            if column is Column.PARAMETER:
                made[column] = parameter_column(parameter, *of, resting)
            elif column is Column.GRADIENT:
                # Not zeroed: a step's first gradient is written, and not added.
                made[column] = StoredColumn(gradient, *of, "--offload-gradients", torch.empty, sums)
            else:
                made[column] = StoredColumn(row[column], *of, parts=parts)
        return made

    @property
    def weights(self) -> StoredColumn:
        """The column that the optimizer updates: the master weights, or the parameters where there are none."""
        return self.columns.get(Column.MASTER, self.columns[Column.PARAMETER])

    def update_range(self, index: int) -> Range:
        """The elements of a bucket that this rank updates."""
        return self.columns[Column.EXP_AVG].range_of(index)

    @property
    def has_master(self) -> bool:
        return Column.MASTER in self.columns

    def bytes(self) -> dict[str, int]:
        """Bytes of each column on this rank's device, and, if there are any, of frozen parameters, of error feedback,
        and of host memory that offloaded state takes.

        Buffers that live for part of a step are not included, and neither is what is in files.
        """
        on_device = {column.value: stored.nbytes_in(Tier.DEVICE) for column, stored in self.columns.items()}
        in_host_memory = sum(stored.nbytes_in(Tier.HOST) for stored in self.columns.values()) + self.frozen.nbytes_in(
            Tier.HOST
        )
        in_host_memory += self.mover.nbytes + sum(store.memory_bytes for store in self.tiers.stores.values())
        beside_columns = {FROZEN: self.frozen.nbytes, KEPT: self.messages.nbytes, HOST: in_host_memory}
        return on_device | {name: nbytes for name, nbytes in beside_columns.items() if nbytes}

    def wait_parameters(self) -> None:
        """Return once the parameters are those after the last step, and the ones that are whole between two steps are
        gathered.

        The engine waits by itself; any other reader must call this, or `reading`. If updates are owed it makes them:
        then it is a collective of all ranks.
        """
        self.owed.settle()
        self.mover.wait()
        self.gatherer.wait()

    @contextmanager
    def reading(self, unit: nn.Module | None = None) -> Iterator[None]:
        """A context in which the parameters of a unit (None: all) are whole, trained and frozen ones.

        A collective of the ranks that share out their state; of all ranks if updates are owed.
        """
        self.owed.settle()
        self.mover.wait()
        wanted = None if unit is None else {id(parameter) for parameter in unit.parameters()}
        parameters = [whole.bucket.parameters for whole in self.gatherer.parameters]
        buckets = [
            n
            for n, of_bucket in enumerate(parameters)
            if wanted is None or any(id(each) in wanted for each in of_bucket)
        ]
        gathered = [n for n in buckets if self.gatherer.parameters[n].gathered]
        for n in gathered:
            # Outside of lists nothing is under way, so the parts take the slots in turn.
            for i in place_slots(loads_of(n, self.shape), self.shape) if self.shape.buckets[n].is_loaded else ():
                self.mover.move(i)
            self.gatherer.gather(n)
        self.gatherer.ready(buckets)
        try:
            yield
        finally:
            for n in gathered:
                self.gatherer.release(n)


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
