"""The memory of a training step on a rank of every stage, by arithmetic: what --memory-trace writes before any step,
and the most bytes in every tier, on the device, in host memory and on disks.

The device's are what the step's list allocates, and the host's what has left it. On a CPU they are the same memory, and
their sum counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from megazero.config.dtypes import grad_reduce_dtype, state_dtype
from megazero.config.schema import Run
from megazero.mpu.axes import Axes
from megazero.pipeline.stage_specs import chunks_of, stage_specs, unit_names
from megazero.plan.bytes import StageBytes, has_nccl, stage_bytes
from megazero.plan.leaving import unit_bytes
from megazero.plan.recompute import activation_plan
from megazero.plan.step_lists import StageLists, activation_pieces
from megazero.program.instruction import Instruction
from megazero.program.memory import MemoryColumn, Sample, StepBytes, UnitSizes
from megazero.program.memory_walk import Fullest, fullest, host_buffers, peak, spare_buffers
from megazero.program.scope import Scope
from megazero.program.shape import IN_FLIGHT
from megazero.program.trace import MemoryTrace, trace


def stage_trace(steps: StageLists, stage: int, state: StageBytes, kind: str) -> MemoryTrace:
    """The memory of a rank of this stage, whose model state takes `state`.

    kind: of device, cpu or cuda. It decides the body of attention, and so what attention keeps.
    """
    run, specs = steps.run, stage_specs(steps.run)
    units = {
        (chunk, unit): words
        for chunk, number in enumerate(chunks_of(run).of(stage))
        for unit, words in enumerate(unit_names(specs[number]))
    }
    return trace(rank_words(stage, steps.axes), *_walked(steps, stage, state, kind), units)


def step_peak(steps: StageLists, stage: int, state: StageBytes, kind: str) -> Sample:
    """The peak of `stage_trace` alone."""
    instructions, scope, sizes = _walked(steps, stage, state, kind)
    return peak(instructions, scope, sizes, spare_buffers(instructions, scope, sizes))


def step_fullest(steps: StageLists, stage: int, state: StageBytes, kind: str) -> Fullest:
    """The number of bytes of `step_peak`, and those of `host_bytes`."""
    return fullest(*_walked(steps, stage, state, kind))


def rank_words(stage: int, axes: Axes) -> str:
    """Whose memory it is."""
    return f"a rank of stage {stage} of {axes.pp}" if axes.pp > 1 else "a rank"


def _walked(
    steps: StageLists, stage: int, state: StageBytes, kind: str
) -> tuple[tuple[Instruction, ...], Scope, StepBytes]:
    """What a walk through the list of a stage's rank needs."""
    run, step, plan = steps.run, steps.of(stage), activation_plan(steps.run, kind)
    in_flight, cast = _reductions(run)
    sizes = StepBytes(
        hidden=plan.hidden_bytes,
        units=unit_bytes(run, steps.axes, stage, kind),
        optimizer=state.optimizer,
        host=state.elsewhere.memory if kind == "cpu" else 0,
        host_buffer=activation_pieces(step).buffer_bytes,
        feedback=state.feedback,
        logits=plan.logits if kind == "cpu" and state.head else 0,
        in_flight=in_flight,
        cast=cast,
    )
    return step.instructions, _scope(steps, stage), sizes


def _scope(steps: StageLists, stage: int) -> Scope:
    step = steps.of(stage)
    return Scope(step.shape, chunks_of(steps.run).count, border=step.border)


def spare_bytes(steps: StageLists, stage: int) -> int:
    """The bytes of the pool of spare buffers for whole gradients (`zero.storage.BufferPool`) between two steps, on a
    rank of this stage. It is 0 where gradients are whole anyway.
    """
    step = steps.of(stage)
    units = tuple((UnitSizes(),) * len(chunk) for chunk in step.shape.units)
    in_flight, cast = _reductions(steps.run)
    sizes = StepBytes(0, units, in_flight=in_flight, cast=cast)
    return sum(spare_buffers(step.instructions, _scope(steps, stage), sizes))


def host_bytes(steps: StageLists, stage: int, kind: str) -> int:
    """Bytes of host memory in which the activations of a rank of this stage wait for their backward. kind: as in
    `stage_trace`.
    """
    step, units = steps.of(stage), unit_bytes(steps.run, steps.axes, stage, kind)
    sizes = StepBytes(0, units, host_buffer=activation_pieces(step).buffer_bytes)
    return sum(host_buffers(step.instructions, _scope(steps, stage), sizes))


def _reductions(run: Run) -> tuple[int, float]:
    """`StepBytes.in_flight` and `cast`."""
    gradient = state_dtype(run.optimizer.precision)
    reduced = grad_reduce_dtype(run.optimizer.precision, run.parallel.grad_reduce_dtype)
    cast = 0.0 if reduced == gradient else reduced.itemsize / gradient.itemsize
    return IN_FLIGHT if run.parallel.overlap else 0, cast


@dataclass(frozen=True)
class TierPeaks:
    """The bytes of a rank of one stage.

    device  at the moment of a step with most of them, by column (`program.memory.MemoryColumn`)
    moment  that moment, in words
    host    of host memory, by what it is for. It is taken from the first step to the last
    disk    of the rank's swap files
    """

    stage: int
    device: Mapping[str, int]
    moment: str
    host: Mapping[str, int]
    disk: int

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def total_bytes(self) -> int:
        """Of both, for a CPU, where they are one memory."""
        return self.device_bytes + self.host_bytes


class RunPeaks:
    """The peaks of a run's stages. Each is computed when it is first asked for: of long lists that can take seconds.

    kind: of device, cpu or cuda, as in `plan.step_memory.stage_trace`.
    """

    def __init__(self, run: Run, axes: Axes, kind: str) -> None:
        self._kind, self._axes = kind, axes
        self._steps = StageLists(run, axes, nccl=has_nccl(run.parallel, axes))
        self._states = stage_bytes(run, axes)
        self._found: dict[int, TierPeaks] = {}

    def of(self, stage: int) -> TierPeaks:
        """Raises ConfigError as `plan.recompute.recompute_table` does."""
        if stage not in self._found:
            self._found[stage] = tier_peaks(self._steps, stage, self._states[stage], self._kind)
        return self._found[stage]

    def every(self) -> list[TierPeaks]:
        """Of all stages."""
        return [self.of(stage) for stage in range(self._axes.pp)]


@cache
def run_peaks(run: Run, axes: Axes, kind: str) -> RunPeaks:
    """The peaks of a run, once for all who ask."""
    return RunPeaks(run, axes, kind)


def tier_peaks(steps: StageLists, stage: int, state: StageBytes, kind: str) -> TierPeaks:
    """The bytes of a rank of this stage, whose model state takes `state`."""
    peak, off = step_peak(steps, stage, state, kind), state.elsewhere
    pieces = activation_pieces(steps.of(stage))
    # on a CPU the walk counts them, as host memory is the device's: here they are the host's
    elsewhere = MemoryColumn.OFFLOADED, MemoryColumn.HOST
    host = {
        "model state": off.memory - off.slots - off.buffers,
        "model state on its way": off.slots,
        "buffers of the swap files": off.buffers + pieces.buffers,
        "activations": host_bytes(steps, stage, kind) if steps.run.offload.offload_activations else 0,
    }
    return TierPeaks(
        stage,
        {column.value: size for column, size in peak.columns.items() if column not in elsewhere},
        f"number {peak.number} of its list, {peak.instruction}",
        {what: size for what, size in host.items() if size},
        off.files + pieces.file_bytes(len(steps.run.offload.nvme_path)),
    )
