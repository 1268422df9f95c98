"""The memory of a training step on a rank of every stage, by arithmetic: what --memory-trace writes before any step."""

from __future__ import annotations

from megazero.config.dtypes import grad_reduce_dtype, state_dtype
from megazero.config.schema import Run
from megazero.mpu.axes import Axes
from megazero.pipeline.stage_specs import chunks_of, stage_specs, unit_names
from megazero.plan.bytes import StageBytes, stage_bytes
from megazero.plan.kept import unit_bytes
from megazero.plan.recompute import activation_plan
from megazero.plan.step_lists import StageLists
from megazero.program.memory_walk import host_buffers, spare_buffers
from megazero.program.scope import Scope
from megazero.program.simulate import IN_FLIGHT
from megazero.program.step_bytes import StepBytes, UnitSizes
from megazero.program.trace import MemoryTrace, trace


def memory_traces(steps: StageLists, kind: str) -> list[MemoryTrace]:
    """The memory of a step on a rank of each stage, that with the largest peak first.

    kind: of device, cpu or cuda. It decides the body of attention, and so what attention keeps.
    """
    states = stage_bytes(steps.run, steps.axes)
    found = [stage_trace(steps, stage, state, kind) for stage, state in enumerate(states)]
    return sorted(found, key=lambda each: -each.peak.total)


def stage_trace(steps: StageLists, stage: int, state: StageBytes, kind: str) -> MemoryTrace:
    """The memory of a rank of this stage, whose model state takes `state`. kind: as in `memory_traces`."""
    run, axes, step = steps.run, steps.axes, steps.of(stage)
    name = f"a rank of stage {stage} of {axes.pp}" if axes.pp > 1 else "a rank"
    specs = stage_specs(run)
    units = {
        (chunk, unit): words
        for chunk, number in enumerate(chunks_of(run).of(stage))
        for unit, words in enumerate(unit_names(specs[number]))
    }
    scope = Scope(step.shape, chunks_of(run).count, border=step.border)
    return trace(name, step.instructions, scope, step_bytes(run, axes, stage, state, kind), units)


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
    `memory_traces`.
    """
    step, axes = steps.of(stage), steps.axes
    scope = Scope(step.shape, chunks_of(steps.run).count, border=step.border)
    sizes = StepBytes(0, unit_bytes(steps.run, axes, stage, kind))
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
