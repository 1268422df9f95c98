"""What the ranks of a run send each other of gradients and parameters: by formula, and what a step's list gathers.

Gathered for each use are sharded parameters (ZeRO-3) and frozen matrices that are stored as codes (--lora-base-bits).
"""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.derive import gathers_parameters
from megazero.config.schema import Run
from megazero.mpu.axes import Axes
from megazero.pipeline.stage_specs import chunks_of, stage_specs, unit_names
from megazero.plan.bytes import stage_shape
from megazero.plan.step_lists import StageLists
from megazero.program.instruction import Op
from megazero.program.passes.gathers import least_bytes
from megazero.program.traffic import message_bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes of a rank and step for each element of its buckets: a reduce-scatter's input, an all-gather's output and
    twice an all-reduce's tensor, as `mpu.grid.Group.traffic` counts them.

    inside  among the K neighbours that share out the state
    across  among the N / K ranks that store the same shard
    """

    inside: float
    across: float

    @property
    def total(self) -> float:
        return self.inside + self.across


def state_traffic(
    zero_stage: int,
    shard_size: int,
    sets: int,
    *,
    micro_batches: int,
    reductions: int,
    gradient_bytes: float,
    parameter_bytes: float,
    summed_bytes: float | None = None,
    shards_parameters: bool = False,
    sums_leave: bool = False,
) -> Traffic:
    """The traffic of the gradients and parameters of a rank (ZeRO: arXiv:1910.02054, section 7).

    Under ZeRO-3 this is the most: parameters are gathered for the forward and for the backward of each micro-batch. A
    list may keep some of them in between.

    shard_size       K, number of neighbours that share out the state
    sets             number of such sets, N / K
    micro_batches    of a step; in vertical order the number of groups, each of which gathers as one micro-batch does
    reductions       how often ZeRO-2 and 3 reduce a bucket in a step: as often as there are micro-batches, or once
                     where the schedule is breadth-first. What goes across is sent once per step at every stage
    gradient_bytes   bytes per element of a gradient that travels
    parameter_bytes  bytes per element of a parameter
    summed_bytes     bytes per element of a sum of gradients that is gathered; None: `gradient_bytes`
    sums_leave       whether gradients are summed off the device: then every stage reduces as often, and across too
    shards_parameters  whether parameters are sharded with ZeRO-1 or 2 too, because they do not rest on the device
    """
    summed = gradient_bytes if summed_bytes is None else summed_bytes
    gathered = summed if zero_stage == 0 else parameter_bytes
    if zero_stage == 3 or shards_parameters:
        gathered = 2 * micro_batches * parameter_bytes
    times = reductions if zero_stage >= 2 or sums_leave else 1
    gathered *= times if zero_stage == 0 else 1
    inside = 0.0 if shard_size == 1 else times * gradient_bytes + gathered
    return Traffic(
        inside, 0.0 if sets == 1 else (reductions if sums_leave else 1) * (gradient_bytes + summed) / shard_size
    )


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
    units = [(most, stage, name) for stage in range(axes.pp) for most, name in _units(run, axes, stage)]
    return max(units, key=lambda unit: unit[0])


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


def _units(run: Run, axes: Axes, stage: int) -> list[tuple[int, str]]:
    """(bytes to gather, name) of each unit of a stage."""
    shape, specs = stage_shape(run, axes, stage), stage_specs(run)
    sizes: list[tuple[int, str]] = []
    for units, number in zip(shape.units, chunks_of(run).of(stage), strict=True):
        for unit, name in zip(units, unit_names(specs[number]), strict=True):
            read = {bucket for bucket in (*unit.forward, *unit.backward) if shape.buckets[bucket].gathered}
            sizes.append((shape.bytes_of(read), name))
    return sizes
