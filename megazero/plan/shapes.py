"""The parameters of any rank, the shape of its model state, and the number of its micro-batches, by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from megazero.config.placement import unplaced
from megazero.config.schema import Run
from megazero.mpu.axes import Axes, Coordinates
from megazero.mpu.grid import Group
from megazero.mpu.parameter import ParameterSpec, StateGroup
from megazero.pipeline.build import stages_of
from megazero.program.shape import RankShape
from megazero.zero.coded import coding_of, frozen_layouts
from megazero.zero.frozen import specs_by_unit
from megazero.zero.layout import BucketLayout, Packing, group_sizes, pack, packing_of, state_groups
from megazero.zero.offload import frozen_parts, frozen_ranges, run_parts
from megazero.zero.shape import rank_shape, state_widths, update_ranges
from megazero.zero.sharding import Column, shardings


def specs_of(run: Run, pp_index: int, tp_index: int, *, trained: bool = True) -> list[list[list[ParameterSpec]]]:
    """The specs of the parameters that a rank with these coordinates trains, by chunk and unit.

    The stages are built on the meta device, which takes no memory. trained=False: the specs of the parameters that the
    rank holds and does not train (with --lora-rank, all but the adapters).
    """
    return [[[*unit] for unit in chunk] for chunk in _found(unplaced(run), pp_index, tp_index, trained)]


@lru_cache(maxsize=64)
def _found(run: Run, pp_index: int, tp_index: int, trained: bool) -> list[list[list[ParameterSpec]]]:
    """`specs_of` a run without a placement. A search asks for them hundreds of times, and building takes longest."""
    tp = Group(tuple(range(run.parallel.tp)), tp_index, None)
    stages = stages_of(run, pp_index, tp, torch.device("meta"))
    return specs_by_unit([stage.units() for stage in stages], trained=trained)


def micro_batches_of(run: Run, axes: Axes) -> int:
    """Number of micro-batches of a step with the run's whole global batch."""
    return run.schedule.global_batch_size // (run.schedule.micro_batch_size * axes.dp)


def packed(run: Run, axes: Axes, at: Coordinates, packing: Packing) -> tuple[BucketLayout, ...]:
    """The trained buckets of the rank at `at`."""
    return _packed(unplaced(run), tuple(group_sizes(axes, at).items()), at.pp, at.tp, packing)


@lru_cache(maxsize=64)
def _packed(
    run: Run, sizes: tuple[tuple[StateGroup, int], ...], pp_index: int, tp_index: int, packing: Packing
) -> tuple[BucketLayout, ...]:
    """`packed` of a run without a placement. A search asks for them several times for each placement."""
    return pack(specs_of(run, pp_index, tp_index), dict(sizes), packing)


def updated_layouts(
    run: Run, axes: Axes, at: Coordinates, *, nccl: bool
) -> tuple[Sequence[BucketLayout], list[tuple[int, int]]]:
    """The trained buckets of the rank at `at`, and what it updates of each (`zero.shape.update_ranges`)."""
    layouts = packed(run, axes, at, packing_of(run.parallel, run.offload, axes.dp * axes.cp, nccl=nccl))
    return layouts, update_ranges(layouts, shardings(run.parallel, run.offload), state_groups(axes, at))


def shape_of(run: Run, axes: Axes, at: Coordinates, *, nccl: bool) -> RankShape:
    """The shape of the rank at `at`, as `zero.state.ModelState.shape` on that rank.

    nccl: whether the run communicates through NCCL, which has larger buckets.
    """
    trained, still = (specs_of(run, at.pp, at.tp, trained=trained) for trained in (True, False))
    row, sizes = shardings(run.parallel, run.offload), group_sizes(axes, at)
    packing = packing_of(run.parallel, run.offload, axes.dp * axes.cp, nccl=nccl)
    specs = [
        [[*of_unit, *others] for of_unit, others in zip(*chunks, strict=True)]
        for chunks in zip(trained, still, strict=True)
    ]
    groups, (layouts, ranges) = state_groups(axes, at), updated_layouts(run, axes, at, nccl=nccl)
    frozen = frozen_layouts(still, sizes, row[Column.PARAMETER], packing, coding_of(run.lora, run.model))
    widths = state_widths(run.optimizer, run.parallel, run.offload)
    stored = frozen_ranges(frozen, row[Column.PARAMETER], lambda group: (0, groups[group].shards))
    resting = [
        *run_parts(ranges, layouts, widths, run.offload),
        *frozen_parts(frozen, stored, widths, run.offload),
    ]
    return rank_shape(specs, layouts, frozen, row, widths, groups, resting)
