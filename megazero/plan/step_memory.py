"""The memory of a training step on a rank of every stage, by arithmetic: what --memory-trace writes before any step."""

from __future__ import annotations

from dataclasses import replace

from megazero.config.dtypes import grad_reduce_dtype, state_dtype
from megazero.config.schema import Run
from megazero.mpu.axes import Axes
from megazero.pipeline.stage_specs import chunks_of, stage_specs, unit_names
from megazero.plan.bytes import StageBytes
from megazero.plan.kept import unit_bytes
from megazero.plan.leaving_disks import activation_pieces
from megazero.plan.recompute import activation_plan
from megazero.plan.step_lists import StageLists
from megazero.program.instruction import Instruction
from megazero.program.memory import Sample
from megazero.program.memory_walk import Fullest, fullest, host_buffers, peak, spare_buffers
from megazero.program.scope import Scope
from megazero.program.simulate import IN_FLIGHT
from megazero.program.step_bytes import StepBytes, UnitSizes
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
    step = steps.of(stage)
    scope = Scope(step.shape, chunks_of(steps.run).count, border=step.border)
    return (
        step.instructions,
        scope,
        replace(
            step_bytes(steps.run, steps.axes, stage, state, kind), host_buffer=activation_pieces(step).buffer_bytes
        ),
    )


def spare_bytes(steps: StageLists, stage: int) -> int:
    """The bytes of the pool of spare buffers for whole gradients (`zero.storage.BufferPool`) between two steps, on a
    rank of this stage. It is 0 where gradients are whole anyway.
    """
    step = steps.of(stage)
    scope = Scope(step.shape, chunks_of(steps.run).count, border=step.border)
    units = tuple((UnitSizes(),) * len(chunk) for chunk in step.shape.units)
    in_flight, cast = _reductions(steps.run)
    return sum(spare_buffers(step.instructions, scope, StepBytes(0, units, in_flight=in_flight, cast=cast)))


def host_bytes(steps: StageLists, stage: int, kind: str) -> int:
    """Bytes of host memory in which the activations of a rank of this stage wait for their backward. kind: as in
    `stage_trace`.
    """
    step, axes = steps.of(stage), steps.axes
    scope = Scope(step.shape, chunks_of(steps.run).count, border=step.border)
    sizes = StepBytes(0, unit_bytes(steps.run, axes, stage, kind), host_buffer=activation_pieces(step).buffer_bytes)
    return sum(host_buffers(step.instructions, scope, sizes))


def _reductions(run: Run) -> tuple[int, float]:
    """`StepBytes.in_flight` and `cast`."""
    gradient = state_dtype(run.optimizer.precision)
    reduced = grad_reduce_dtype(run.optimizer.precision, run.parallel.grad_reduce_dtype)
    cast = 0.0 if reduced == gradient else reduced.itemsize / gradient.itemsize
    return IN_FLIGHT if run.parallel.overlap else 0, cast


def step_bytes(run: Run, axes: Axes, stage: int, state: StageBytes, kind: str) -> StepBytes:
    """The sizes of what a rank of this stage holds in a step beside its buckets."""
    plan = activation_plan(run, kind)
    in_flight, cast = _reductions(run)
    return StepBytes(
        hidden=plan.hidden_bytes,
        units=unit_bytes(run, axes, stage, kind),
        optimizer=state.optimizer,
        host=state.elsewhere.memory if kind == "cpu" else 0,
        feedback=state.feedback,
        logits=plan.logits if kind == "cpu" and state.head else 0,
        in_flight=in_flight,
        cast=cast,
    )
