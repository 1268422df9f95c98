"""The lists of a step on all stages of a run, checked together by arithmetic."""

from __future__ import annotations

from megazero.config.schema import Run
from megazero.mpu.axes import Axes, Coordinates
from megazero.pipeline.build import step_lists
from megazero.plan.shapes import shape_of
from megazero.program.checker import check


def micro_batches_of(run: Run, axes: Axes) -> int:
    """Number of micro-batches of a step with the run's whole global batch."""
    return run.schedule.global_batch_size // (run.schedule.micro_batch_size * axes.dp)


def check_step(run: Run, axes: Axes, micro_batches: int, *, nccl: bool) -> None:
    """Raise ProgramError if the lists of the stages' training steps do not fit together (`program.checker.check`).

    All replicas and tp indexes of a stage have one list, so the stages are checked against each other.
    """
    shapes = {(stage, 0): shape_of(run, axes, Coordinates(stage, 0, 0, 0), nccl=nccl) for stage in range(axes.pp)}
    lists = {role: step_lists(run, role[0], shape).training(micro_batches) for role, shape in shapes.items()}
    check(lists, shapes, micro_batches)
