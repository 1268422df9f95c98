"""What a run gathers for each use, by arithmetic: whether its budget holds a unit, and the bytes of a step.

Gathered are sharded parameters (ZeRO-3) and frozen matrices that are stored as codes (--lora-base-bits).
"""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.derive import gathers_parameters
from megazero.config.schema import Run
from megazero.mpu.axes import Axes, Coordinates
from megazero.pipeline.stage_specs import chunks_of, stage_specs, unit_names
from megazero.plan.bytes import has_nccl
from megazero.plan.shapes import shape_of
from megazero.plan.step_lists import StageLists
from megazero.program.instruction import Op
from megazero.program.passes.gathers import least_bytes
from megazero.program.shape import RankShape
from megazero.program.traffic import message_bytes


@dataclass(frozen=True)
class GatheredBytes:
    """Bytes of parameters on a rank of one stage.

    budget  most that are gathered at any time
    step    gathered in a step
    least   what any list gathers in a step at least under this budget
    """

    stage: int
    budget: int
    step: int
    least: int


def unit_problems(run: Run, axes: Axes) -> list[str]:
    """A sentence if --zero3-gathered-bytes is less than the parameters of a unit on some rank."""
    budget = run.parallel.zero3_gathered_bytes
    if budget is None or not gathers_parameters(run):
        return []
    most, stage, name = largest_unit(run, axes)
    if most <= budget:
        return []
    return [
        f"--zero3-gathered-bytes {budget} does not hold the largest unit of the model: {name} on stage {stage} has "
        f"{most} bytes of parameters to gather; nearest: --zero3-gathered-bytes {most}"
    ]


def largest_unit(run: Run, axes: Axes) -> tuple[int, int, str]:
    """(bytes of parameters to gather, stage, name) of the unit with the most: the smallest budget."""
    found = [(most, stage, name) for stage in range(axes.pp) for most, name in _units(run, axes, stage)]
    return max(found, key=lambda unit: unit[0])


def gathered_bytes(steps: StageLists, stage: int) -> GatheredBytes | None:
    """The bytes of a training step; None where the stage gathers none for each use."""
    step = steps.of(stage)
    shape, listed = step.shape, step.instructions
    if not any(bucket.gathered for bucket in shape.buckets):
        return None
    gathers = [i for i in listed if i.op is Op.GATHER and shape.buckets[i.buckets[0]].gathered]
    gathered = sum(message_bytes(i, shape) for i in gathers)
    searched = steps.run.parallel.zero3_regather == "step"  # by the pass, for its list
    return GatheredBytes(stage, step.budget, gathered, least_bytes(listed, shape, step.budget, search=searched))


def _shape(run: Run, axes: Axes, stage: int) -> RankShape:
    """The shape of the ranks of a stage. Shards of all tp ranks have the same size."""
    return shape_of(run, axes, Coordinates(stage, 0, 0, 0), nccl=has_nccl(run.parallel, axes))


def _units(run: Run, axes: Axes, stage: int) -> list[tuple[int, str]]:
    """(bytes to gather, name) of each unit of a stage."""
    shape, specs = _shape(run, axes, stage), stage_specs(run)
    found: list[tuple[int, str]] = []
    for units, number in zip(shape.units, chunks_of(run).of(stage), strict=True):
        for unit, name in zip(units, unit_names(specs[number]), strict=True):
            read = {bucket for bucket in (*unit.forward, *unit.backward) if shape.buckets[bucket].gathered}
            found.append((shape.bytes_of(read), name))
    return found
