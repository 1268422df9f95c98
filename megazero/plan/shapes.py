"""The shape of the model state of any rank, and the number of its micro-batches, by arithmetic."""

from __future__ import annotations

from megazero.config.schema import Run
from megazero.mpu.axes import Axes, Coordinates
from megazero.plan.parameter_specs import specs_of
from megazero.program.shape import RankShape
from megazero.zero.coded import coding_of, frozen_layouts
from megazero.zero.layout import group_sizes, pack, packing_of, state_groups
from megazero.zero.offload import run_parts
from megazero.zero.placement import Column, placements
from megazero.zero.shape import rank_shape, state_widths, update_ranges


def micro_batches_of(run: Run, axes: Axes) -> int:
    """Number of micro-batches of a step with the run's whole global batch."""
    return run.schedule.global_batch_size // (run.schedule.micro_batch_size * axes.dp)


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
    layouts, groups = pack(trained, sizes, packing), state_groups(axes, at)
    widths = state_widths(run.optimizer, run.parallel, run.offload)
    return rank_shape(
        specs,
        layouts,
        frozen_layouts(frozen, sizes, row[Column.PARAMETER], packing, coding_of(run.lora, run.model)),
        row,
        widths,
        groups,
        run_parts(update_ranges(layouts, row, groups), widths, run.offload),
    )
