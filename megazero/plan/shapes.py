"""The shape of the model state of any rank, by arithmetic."""

from __future__ import annotations

from megazero.config.schema import Run
from megazero.mpu.axes import Axes, Coordinates
from megazero.plan.parameter_specs import specs_of
from megazero.program.shape import RankShape
from megazero.zero.layout import frozen_sizes, group_sizes, pack, packing_of, state_groups
from megazero.zero.placement import Column, placements
from megazero.zero.shape import rank_shape, state_widths


def shape_of(run: Run, axes: Axes, at: Coordinates, *, nccl: bool) -> RankShape:
    """The shape of the rank at `at`, as `zero.state.ModelState.shape` on that rank.

    nccl: whether the run communicates through NCCL, which has larger buckets.
    """
    trained, frozen = (specs_of(run, at.pp, at.tp, trained=trained) for trained in (True, False))
    row, sizes = placements(run.parallel.zero_stage), group_sizes(axes, at)
    packing = packing_of(run.parallel, axes.dp * axes.cp, nccl=nccl)
    specs = [
        [[*own, *still] for own, still in zip(*chunks, strict=True)] for chunks in zip(trained, frozen, strict=True)
    ]
    return rank_shape(
        specs,
        pack(trained, sizes, packing),
        pack(frozen, frozen_sizes(sizes, row[Column.PARAMETER]), packing),
        row,
        state_widths(run.optimizer, run.parallel),
        state_groups(axes, at),
    )
