"""The lists of a step on all stages of a run, and the shapes of their model state, by arithmetic."""

from __future__ import annotations

from megazero.config.dtypes import compute_dtype, state_dtype
from megazero.config.schema import Run
from megazero.mpu.axes import Axes, Coordinates
from megazero.pipeline.build import step_lists
from megazero.plan.parameter_specs import specs_of
from megazero.program.checker import check
from megazero.program.shape import RankShape
from megazero.zero.layout import frozen_sizes, group_sizes, pack, packing_of, state_groups
from megazero.zero.placement import Column, placements
from megazero.zero.shape import StateWidths, rank_shape


def stage_shape(run: Run, axes: Axes, stage: int, *, nccl: bool, tp_index: int = 0) -> RankShape:
    """The shape of the model state of a stage's ranks, the same as `ModelState.shape` there.

    nccl: whether the run communicates by NCCL, for which buckets are larger.
    """
    at = Coordinates(stage, 0, 0, tp_index)
    trained, frozen = (specs_of(run, stage, tp_index, trained=which) for which in (True, False))
    specs = [[[*one, *other] for one, other in zip(*units, strict=True)] for units in zip(trained, frozen, strict=True)]
    row, sizes = placements(run.parallel.zero_stage), group_sizes(axes, at)
    packing = packing_of(run.parallel, axes.dp * axes.cp, nccl=nccl)
    widths = StateWidths(compute_dtype(run.optimizer.precision).itemsize, state_dtype(run.optimizer.precision).itemsize)
    held = pack(frozen, frozen_sizes(sizes, row[Column.PARAMETER]), packing)
    return rank_shape(specs, pack(trained, sizes, packing), held, row, widths, state_groups(axes, at))


def micro_batches_of(run: Run, axes: Axes) -> int:
    """Number of micro-batches of a step with the run's whole global batch."""
    return run.schedule.global_batch_size // (run.schedule.micro_batch_size * axes.dp)


def check_step(run: Run, axes: Axes, micro_batches: int, *, nccl: bool) -> None:
    """Raise ProgramError if the lists of the stages' training steps do not fit together (`program.checker.check`).

    All replicas and tp indexes of a stage have one list, so the stages are checked against each other.
    """
    shapes = {(stage, 0): stage_shape(run, axes, stage, nccl=nccl) for stage in range(axes.pp)}
    lists = {role: step_lists(run, role[0], shape).training(micro_batches) for role, shape in shapes.items()}
    check(lists, shapes, micro_batches)
