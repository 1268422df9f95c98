"""The lists of a step on all stages of a run, by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.schema import Run
from megazero.mpu.axes import Axes, Coordinates
from megazero.pipeline.build import schedules, step_options
from megazero.plan.shapes import shape_of
from megazero.program.checker import check
from megazero.program.instruction import Instruction
from megazero.program.shape import RankShape
from megazero.program.step import gathered_budget, training_step


def micro_batches_of(run: Run, axes: Axes) -> int:
    """Number of micro-batches of a step with the run's whole global batch."""
    return run.schedule.global_batch_size // (run.schedule.micro_batch_size * axes.dp)


@dataclass(frozen=True)
class StageStep:
    """A training step of the ranks of one stage: all its replicas and tp indexes have one list.

    budget: most bytes of gathered parameters (ZeRO-3).
    """

    shape: RankShape
    instructions: tuple[Instruction, ...]
    budget: int


class StageLists:
    """The training step of each stage. Each is made once, when it is first asked for: that can take a second.

    nccl: whether the run communicates through NCCL, which has larger buckets.
    """

    def __init__(self, run: Run, axes: Axes, *, nccl: bool) -> None:
        self.run, self.axes, self.nccl = run, axes, nccl
        self.micro_batches = micro_batches_of(run, axes)
        self._made: dict[int, StageStep] = {}

    def of(self, stage: int) -> StageStep:
        """The step of a stage, with the run's whole global batch."""
        if stage not in self._made:
            shape, options = self._shape(stage), step_options(self.run)
            listed = training_step(schedules(self.run, stage)(self.micro_batches), shape, options)
            self._made[stage] = StageStep(shape, listed, gathered_budget(listed, shape, options))
        return self._made[stage]

    def check(self) -> None:
        """Raise ProgramError if the lists of the stages do not fit together (`program.checker.check`)."""
        steps = {(stage, 0): self.of(stage) for stage in range(self.axes.pp)}
        check(
            {role: step.instructions for role, step in steps.items()},
            {role: step.shape for role, step in steps.items()},
            self.micro_batches,
            {role: step.budget for role, step in steps.items()},
        )

    def _shape(self, stage: int) -> RankShape:
        return shape_of(self.run, self.axes, Coordinates(stage, 0, 0, 0), nccl=self.nccl)
