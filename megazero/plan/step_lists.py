"""The lists of a step on all stages of a run, and what of activations each writes to disks, by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megazero.config.schema import Run
from megazero.disk.backend import DiskOptions
from megazero.disk.layout import SwapLayout
from megazero.mpu.axes import Axes, Coordinates
from megazero.pipeline.build import schedules, step_options
from megazero.pipeline.kept_disks import piece_names
from megazero.pipeline.stage_specs import chunks_of, stage_specs, unit_names
from megazero.plan.leaving import with_kept
from megazero.plan.shapes import micro_batches_of, shape_of
from megazero.program.checker import check
from megazero.program.instruction import WRITE_ACTIVATIONS, Instruction
from megazero.program.passes.leaving import buffer_bytes, largest_unit, most_pieces
from megazero.program.passes.vertical import turn
from megazero.program.scope import Border
from megazero.program.shape import RankShape, without_state
from megazero.program.step import gathered_budget, settling_list, training_step


@dataclass(frozen=True)
class StageStep:
    """A training step of the ranks of one stage: all its replicas and tp indexes have one list.

    budget: most bytes of gathered parameters (ZeRO-3). border: what it takes over from the step before, and leaves.
    """

    shape: RankShape
    instructions: tuple[Instruction, ...]
    budget: int
    border: Border


@dataclass(frozen=True)
class ActivationPieces:
    """The activations of a rank on disks.

    buffer_bytes  of each host buffer through which they pass, and of each piece
    count         of pieces: the most graphs that have one at a time, in a step of the whole global batch
    written       graphs that are written in a step, and read again
    """

    buffer_bytes: int = 0
    count: int = 0
    written: int = 0

    @property
    def pieces(self) -> dict[str, int]:
        """The bytes of each piece, by name."""
        return dict.fromkeys(piece_names(self.count), self.buffer_bytes)

    @property
    def step_bytes(self) -> int:
        """Bytes that a step writes, and reads."""
        return self.written * self.buffer_bytes

    @property
    def buffers(self) -> int:
        """Bytes of host memory through which the files are read and written."""
        return DiskOptions().memory_bytes if self.count else 0

    def file_bytes(self, folders: int) -> int:
        """Bytes of a rank's files in so many folders."""
        return sum(SwapLayout(self.pieces, (1.0,) * folders, slots=1).file_bytes) if self.count else 0


def activation_pieces(step: StageStep) -> ActivationPieces:
    """What of the activations of this list goes to disks."""
    writes = [i for i in step.instructions if i.op == WRITE_ACTIVATIONS]
    if not writes:
        return ActivationPieces()
    size = buffer_bytes(largest_unit(step.shape.kept))
    return ActivationPieces(size, most_pieces(step.instructions), len(writes))


class StageLists:
    """The training step of each stage. Each is made once, when it is first asked for: that can take a second.

    nccl: whether the run communicates through NCCL, which has larger buckets.
    """

    def __init__(self, run: Run, axes: Axes, *, nccl: bool) -> None:
        self.run, self.axes, self.nccl = run, axes, nccl
        self.micro_batches = micro_batches_of(run, axes)
        self._made: dict[int, StageStep] = {}

    def of(self, stage: int) -> StageStep:
        """The step of a stage that follows another one, with the run's whole global batch."""
        if stage not in self._made:
            self._made[stage] = self._step(stage, owed=step_options(self.run).late)
        return self._made[stage]

    def schedule(self) -> tuple[list[tuple[Instruction, ...]], list[RankShape]]:
        """The computations and transfers of all stages, and shapes without model state."""
        groups, specs = step_options(self.run).groups(self.micro_batches), stage_specs(self.run)
        units = [
            [len(unit_names(specs[number])) for number in chunks_of(self.run).of(stage)]
            for stage in range(self.axes.pp)
        ]
        shapes, lists = [without_state(counts) for counts in units], list[tuple[Instruction, ...]]()
        for stage, shape in enumerate(shapes):
            schedule = schedules(self.run, stage)(self.micro_batches)
            lists.append(schedule if groups is None else turn(schedule, shape, groups))
        return lists, shapes

    def check(self) -> None:
        """Raise ProgramError if the lists of the stages do not fit together (`program.checker.check`): those of a step;
        with late updates also those of a step before which none are owed, and those of updates alone.
        """
        stages = range(self.axes.pp)
        self._check([self.of(stage) for stage in stages], self.micro_batches)
        options = step_options(self.run)
        if options.late:
            self._check([self._step(stage, owed=False) for stage in stages], self.micro_batches)
            shapes = [self.of(stage).shape for stage in stages]
            lists = [settling_list(shape, ahead=options.ahead) for shape in shapes]
            self._check([StageStep(*pair, 0, options.settling) for pair in zip(shapes, lists, strict=True)], 0)

    def _step(self, stage: int, *, owed: bool) -> StageStep:
        """A step of a stage. owed: whether it makes the updates of the step before."""
        shape, options = self._shape(stage), step_options(self.run)
        schedule, groups = schedules(self.run, stage)(self.micro_batches), options.groups(self.micro_batches)
        listed = training_step(schedule, shape, options, groups=groups, owed=owed)
        return StageStep(shape, listed, gathered_budget(listed, shape, options), options.border_of(owed=owed))

    @staticmethod
    def _check(steps: Sequence[StageStep], micro_batches: int) -> None:
        check(
            {(stage, 0): step.instructions for stage, step in enumerate(steps)},
            {(stage, 0): step.shape for stage, step in enumerate(steps)},
            micro_batches,
            {(stage, 0): step.budget for stage, step in enumerate(steps)},
            steps[0].border,
        )

    def _shape(self, stage: int) -> RankShape:
        shape = shape_of(self.run, self.axes, Coordinates(stage, 0, 0, 0), nccl=self.nccl)
        return with_kept(shape, self.run, self.axes, stage)
