"""`ModelState`: parameters, gradients and optimizer state of a rank, as a table of buckets and columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from megazero.config.derive import bucket_size
from megazero.config.dtypes import compute_dtype, grad_reduce_dtype, state_dtype
from megazero.config.schema import OptimizerConfig, ParallelConfig
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.random import initialise
from megazero.zero.frozen import FROZEN, FrozenParameters, parameters_by_name, specs_by_unit
from megazero.zero.gatherer import ParameterGatherer
from megazero.zero.layout import group_sizes, pack
from megazero.zero.placement import Column, columns, placements
from megazero.zero.reducer import GradientReducer
from megazero.zero.storage import Bucket, StoredColumn


class HasUnits(Protocol):
    """A model chunk. `units` are its modules in forward order; its `forward` calls each of them."""

    def units(self) -> list[nn.Module]: ...


class ModelState:
    """Parameters, gradients and optimizer state of this rank's stages, in flat buckets.

    The ZeRO stage decides which columns are sharded (`placement`).

    stages  model chunks of this rank in order. Their parameters (`mpu.parameter.Parameter`) become views of the
            buckets. A parameter that two chunks share exists once. Frozen ones (`requires_grad` is False) are in a flat
            memory of their own (`frozen`), without gradient and optimizer state
    grid    a bucket is reduced and sharded over the groups of what its parameters name (`mpu.parameter.StateGroup`)

    `reducer` is the engine's gradient sink. After construction all weights are zero: `initialise` or a checkpoint sets
    them. Construction communicates nothing. Raises ValueError for an unknown ZeRO stage.
    """

    def __init__(
        self,
        stages: Sequence[HasUnits],
        grid: ProcessGrid,
        optimizer: OptimizerConfig,
        parallel: ParallelConfig,
    ) -> None:
        self.grid = grid
        chunks = [stage.units() for stage in stages]
        most = bucket_size_on(grid, parallel)
        self.buckets = _buckets(chunks, grid, most)
        row = placements(parallel.zero_stage)
        dtypes = columns(compute_dtype(optimizer.precision), state_dtype(optimizer.precision), optimizer.optimizer)
        self.columns: dict[Column, StoredColumn] = {}
        for column, dtype in dtypes.items():
            allocate = torch.empty if column is Column.GRADIENT else torch.zeros
            self.columns[column] = StoredColumn(row[column], dtype, self.buckets, grid.device, allocate)
        self._adopt_parameters()
        self.frozen = FrozenParameters(chunks, grid.device, most)
        self.reducer = GradientReducer(
            self.buckets,
            self.columns[Column.GRADIENT],
            self.columns[Column.EXP_AVG],
            dtype=grad_reduce_dtype(optimizer.precision, parallel.grad_reduce_dtype),
            overlap=parallel.overlap,
            tp=grid.tp,
        )
        self.gatherer = ParameterGatherer(
            self.buckets,
            self.columns[Column.PARAMETER],
            self.columns[Column.EXP_AVG],
            [unit for units in chunks for unit in units],
            overlap=parallel.overlap,
        )

    def _adopt_parameters(self) -> None:
        column = self.columns[Column.PARAMETER]
        for index, bucket in enumerate(self.buckets):
            for entry, parameter in zip(bucket.layout.entries, bucket.parameters, strict=True):
                assert parameter.dtype == column.dtype, f"{entry.spec.name} is {parameter.dtype}, not {column.dtype}"
                parameter.data = column.view(index, entry.offset, entry.stop).view(entry.spec.local_shape)

    @property
    def weights(self) -> StoredColumn:
        """The column that the optimizer updates: the master weights, or the parameters where there are none."""
        return self.columns.get(Column.MASTER, self.columns[Column.PARAMETER])

    @property
    def has_master(self) -> bool:
        return Column.MASTER in self.columns

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Set the initial weights, which are the same on every layout: the master weight, and the parameter rounded
        once.

        Frozen parameters are not set. Communicates nothing.
        """
        self.wait_parameters()
        master = self.columns.get(Column.MASTER)
        for index, bucket in enumerate(self.buckets):
            for entry, parameter in zip(bucket.layout.entries, bucket.parameters, strict=True):
                if master is None:
                    initialise(parameter, entry.spec, seed)
                    continue
                values = torch.empty(entry.spec.local_shape, dtype=master.dtype, device=parameter.device)
                initialise(values, entry.spec, seed)
                parameter.copy_(values)
                first, last = master.range_of(index)
                start, stop = max(first, entry.offset), min(last, entry.stop)
                if start < stop:
                    master.view(index, start, stop).copy_(values.view(-1)[start - entry.offset : stop - entry.offset])

    def bytes(self) -> dict[str, int]:
        """Bytes of each column on this rank, and of frozen parameters if there are any, as allocated.

        Buffers that live for part of a step are not included.
        """
        held = {column.value: stored.nbytes for column, stored in self.columns.items()}
        return held | ({FROZEN: self.frozen.nbytes} if self.frozen.nbytes else {})

    def wait_parameters(self) -> None:
        """Return once all parameters are gathered after the last step.

        The units' forward waits by itself; any other reader must call this.
        """
        self.gatherer.wait()


def bucket_size_on(grid: ProcessGrid, parallel: ParallelConfig) -> int:
    """Most elements of a bucket on this grid, the same on every rank."""
    return bucket_size(parallel, grid.replicas.size, nccl=grid.world.is_on_device)


def _buckets(chunks: Sequence[Sequence[nn.Module]], grid: ProcessGrid, most: int) -> tuple[Bucket, ...]:
    """The trained parameters of the chunks, packed into buckets."""
    by_name = parameters_by_name(chunks, trained=True)
    specs = specs_by_unit(chunks, trained=True)
    layouts = pack(specs, group_sizes(grid.axes, grid.at), most)
    buckets = []
    for layout in layouts:
        held = tuple(by_name[entry.spec.name] for entry in layout.entries)
        users = [{spec.name for spec in unit} for unit in specs[layout.chunk]]
        uses = tuple(sum(entry.spec.name in names for names in users) for entry in layout.entries)
        buckets.append(Bucket(layout, held, uses, grid.state_groups(layout.group)))
    return tuple(buckets)
