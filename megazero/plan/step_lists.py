"""The lists of a step on all stages of a run, by arithmetic, and the pieces of activations that are written to disks
(--offload-activations).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megazero.config.derive import writes_activations
from megazero.config.schema import Run
from megazero.mpu.axes import Axes
from megazero.pipeline.build import schedules, step_options
from megazero.pipeline.kept_disks import piece_names
from megazero.plan.planned_model import FAMILIES, PlannedModel, leaving_bytes
from megazero.plan.rank_state import buffers_of, file_bytes, micro_batches_of
from megazero.program.checker import check
from megazero.program.instruction import ACTIVATION_WRITES, Instruction
from megazero.program.passes.leaving import LEAST_BUFFERS, buffer_bytes, largest_unit, most_pieces
from megazero.program.passes.vertical import turn
from megazero.program.scope import Border
from megazero.program.shape import RankShape, without_state
from megazero.program.step import StepOptions, gathered_budget, settling_list, training_step


def buffer_problems(run: Run, axes: Axes, kind: str) -> list[str]:
    """A sentence if --nvme-buffer-bytes does not hold the buffers of activations on their way to disks. kind: of
    device, cpu or cuda. Raises ConfigError as `plan.recompute.recompute_table` does.
    """
    if not writes_activations(run):
        return []
    largest = largest_unit(chunk for stage in range(axes.pp) for chunk in leaving_bytes(run, axes, stage, kind))
    least, room = LEAST_BUFFERS * buffer_bytes(largest), run.offload.nvme_buffer_bytes
    if least <= room:
        return []
    return [
        f"--nvme-buffer-bytes {room} does not hold {LEAST_BUFFERS} times what a unit of the model keeps of a "
        f"micro-batch, as --offload-activations {run.offload.offload_activations} needs; nearest: --nvme-buffer-bytes "
        f"{least}"
    ]


@dataclass(frozen=True)
class StageStep:
    """A training step of the ranks of one stage: all its replicas and tp indexes have one list.

    options: by which the list was made. border: what it takes over from the step before, and leaves.
    """

    shape: RankShape
    instructions: tuple[Instruction, ...]
    options: StepOptions
    border: Border

    @property
    def budget(self) -> int:
        """Most bytes of gathered parameters (ZeRO-3)."""
        return gathered_budget(self.instructions, self.shape, self.options)


@dataclass(frozen=True)
class ActivationPieces:
    """The activations of a rank in files.

    buffer_bytes  of each host buffer through which they pass, and of each piece
    count         of pieces: the most graphs that have one at a time, in a step of the whole global batch
    written       graphs that are written in a step, and read again
    files         bytes of the rank's files
    buffers       bytes of host memory through which the files are read and written
    """

    buffer_bytes: int = 0
    count: int = 0
    written: int = 0
    files: int = 0
    buffers: int = 0

    @property
    def pieces(self) -> dict[str, int]:
        """The bytes of each piece, by name."""
        return dict.fromkeys(piece_names(self.count), self.buffer_bytes)

    @property
    def step_bytes(self) -> int:
        """Bytes that a step writes, and reads."""
        return self.written * self.buffer_bytes


class StageLists:
    """The training step of each stage. Each is made once, when it is first asked for: that can take a second.

    nccl: whether the run communicates through NCCL, which has larger buckets. model: whose steps these are.
    """

    def __init__(self, run: Run, axes: Axes, *, nccl: bool, model: PlannedModel = FAMILIES) -> None:
        self.run, self.axes, self.nccl, self.model = run, axes, nccl, model
        self.micro_batches = micro_batches_of(run, axes)
        self._made: dict[int, StageStep] = {}
        self._shapes: dict[int, RankShape] = {}

    def with_micro_batches(self, number: int) -> StageLists:
        """The lists of a step of so many micro-batches."""
        batch = number * self.run.schedule.micro_batch_size * self.axes.dp
        run = replace(self.run, schedule=replace(self.run.schedule, global_batch_size=batch))
        other = StageLists(run, self.axes, nccl=self.nccl, model=self.model)
        other._shapes = self._shapes  # model state does not depend on the batch
        return other

    def of(self, stage: int) -> StageStep:
        """The step of a stage that follows another one, with the run's whole global batch."""
        if stage not in self._made:
            options = step_options(self.run)
            self._made[stage] = self._step(stage, owed=options.late, early=options.early)
        return self._made[stage]

    def activations(self, stage: int) -> ActivationPieces:
        """What of the activations of a stage's list goes to files."""
        step = self.of(stage)
        written = sum(i.op in ACTIVATION_WRITES for i in step.instructions)
        largest = self.model.largest_written(step.instructions, step.shape) if written else 0
        if not largest:
            return ActivationPieces()
        size = buffer_bytes(largest)
        to_disks = ActivationPieces(size, most_pieces(step.instructions), written)
        tier = self.run.offload.offload_activations.tier
        return replace(to_disks, files=file_bytes(self.run, tier, to_disks.pieces), buffers=buffers_of(tier))

    def schedule(self) -> tuple[list[tuple[Instruction, ...]], list[RankShape]]:
        """The computations and transfers of all stages, and shapes without model state."""
        groups = step_options(self.run).groups(self.micro_batches)
        shapes, lists = list[RankShape](), list[tuple[Instruction, ...]]()
        for stage in range(self.axes.pp):
            shapes.append(without_state(len(names) for names in self.model.names(self.run, stage)))
            schedule = schedules(self.run, stage)(self.micro_batches)
            lists.append(schedule if groups is None else turn(schedule, shapes[-1], groups))
        return lists, shapes

    def check(self) -> None:
        """Raise ProgramError if the lists of the stages do not fit together (`program.checker.check`): those of a step;
        with late or early updates also those of a step without them, and those of updates alone.
        """
        stages = range(self.axes.pp)
        self._check([self.of(stage) for stage in stages], self.micro_batches)
        options = step_options(self.run)
        if options.late or options.early:
            self._check([self._step(stage, owed=False, early=False) for stage in stages], self.micro_batches)
            shapes = [self.of(stage).shape for stage in stages]
            lists = [settling_list(shape, options) for shape in shapes]
            self._check([StageStep(*pair, options, options.settling) for pair in zip(shapes, lists, strict=True)], 0)

    def _step(self, stage: int, *, owed: bool, early: bool) -> StageStep:
        """A step of a stage. owed, early: as in `StepOptions.border_of`."""
        shape, options = self._shape(stage), step_options(self.run)
        schedule, groups = schedules(self.run, stage)(self.micro_batches), options.groups(self.micro_batches)
        listed = training_step(schedule, shape, options, groups=groups, owed=owed, early=early)
        shape = self.model.walked(shape, self.run, self.axes, stage)
        return StageStep(shape, listed, options, options.border_of(owed=owed, early=early))

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
        if stage not in self._shapes:
            shape = self.model.state(self.run, self.axes, stage, nccl=self.nccl).shape
            self._shapes[stage] = self.model.listed(shape, self.run, self.axes, stage)
        return self._shapes[stage]
