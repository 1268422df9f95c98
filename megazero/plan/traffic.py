"""What moves in a step: what the ranks of a run send each other of gradients and parameters, by formula, what a step's
list gathers, and what of a rank's model state moves between its tiers.

Gathered for each use are sharded parameters (ZeRO-3) and frozen matrices that are stored as codes (--lora-base-bits).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fused_ops.quantise import bytes_each
from megazero.config.derive import gathers_parameters, pipeline_schedule, shards_parameters
from megazero.config.dtypes import compute_dtype, grad_reduce_dtype
from megazero.config.schema import Run
from megazero.mpu.axes import Axes
from megazero.pipeline.build import step_options
from megazero.pipeline.schedule import is_breadth_first
from megazero.pipeline.stage_specs import specs_of_stage, unit_names
from megazero.plan.rank_state import micro_batches_of, stage_state
from megazero.plan.step_lists import StageLists
from megazero.program.instruction import READ_LANES, WRITE_LANES, Instruction, Lane, Op
from megazero.program.passes.gathers import least_bytes, loads_of
from megazero.program.passes.updates import updates_of
from megazero.program.shape import RankShape
from megazero.program.traffic import message_bytes, traffic
from megazero.zero.messages import BITS

MOVES = (Lane.TO_HOST, Lane.TO_DEVICE, *READ_LANES, *WRITE_LANES, Lane.HOST)
"""The lanes on which state moves between the device, host memory and disks, and that of updates in host memory."""


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
class ElementWidths:
    """Bytes of an element of a run's model state on its way.

    parameter         of one that is gathered
    gradient          of one that is reduced
    summed            of a sum of gradients that is gathered; None: as of a gradient
    parameter_blocks  (bytes in blocks, bytes as it is) of a parameter that is gathered in blocks; None: it is not
    gradient_blocks   the same of a gradient
    """

    parameter: float
    gradient: float
    summed: float | None
    parameter_blocks: tuple[float, int] | None
    gradient_blocks: tuple[float, int] | None


def element_widths(run: Run) -> ElementWidths:
    """The widths of a run."""
    p, precision = run.parallel, run.optimizer.precision
    bits, reduced = BITS[p.zero_quantized_gradients], grad_reduce_dtype(precision, p.grad_reduce_dtype).itemsize
    plain = compute_dtype(precision).itemsize
    gradient = None if bits is None else (bytes_each(bits), reduced)
    parameter = (bytes_each(8), plain) if p.zero_quantized_weights else None
    return ElementWidths(
        parameter[0] if parameter else plain,
        gradient[0] if gradient else reduced,
        bytes_each(8) if gradient else None,
        parameter,
        gradient,
    )


def run_traffic(run: Run, axes: Axes) -> Traffic:
    """`state_traffic` of a run's step."""
    shards = shards_parameters(run.parallel, run.offload)
    return _traffic(run, axes, run.parallel.zero_stage, shards=shards, leaves=bool(run.offload.offload_gradients))


def zero_1_traffic(run: Run, axes: Axes) -> Traffic:
    """The same if nothing left the device, and only the optimizer's state were sharded."""
    shards = run.parallel.zero_stage == 1 and shards_parameters(run.parallel, run.offload)
    return _traffic(run, axes, 1, shards=shards, leaves=False)


def _traffic(run: Run, axes: Axes, zero_stage: int, *, shards: bool, leaves: bool) -> Traffic:
    micro_batches = micro_batches_of(run, axes)
    groups, replicas, widths = step_options(run).groups(micro_batches), axes.dp * axes.cp, element_widths(run)
    # a group of micro-batches in vertical order is gathered and reduced as one
    passes = micro_batches if groups is None else len(groups)
    once = is_breadth_first(pipeline_schedule(run.parallel), run.parallel.virtual_stages)
    size = axes.shard_size or replicas
    return state_traffic(
        zero_stage,
        size,
        replicas // size,
        micro_batches=passes,
        reductions=1 if once and not leaves else passes,
        gradient_bytes=widths.gradient,
        parameter_bytes=widths.parameter,
        summed_bytes=widths.summed,
        shards_parameters=shards,
        sums_leave=leaves,
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
    sizes = list[tuple[int, int, str]]()
    for stage in range(axes.pp):
        shape = stage_state(run, axes, stage).shape
        for units, spec in zip(shape.units, specs_of_stage(run, stage), strict=True):
            for unit, name in zip(units, unit_names(spec), strict=True):
                read = {bucket for bucket in (*unit.forward, *unit.backward) if shape.buckets[bucket].gathered}
                sizes.append((shape.bytes_of(read), stage, name))
    return max(sizes, key=lambda size: size[0])


def gathered_bytes(steps: StageLists, stage: int) -> GatheredBytes | None:
    """The bytes of a training step; None where the stage gathers none for each use."""
    step = steps.of(stage)
    shape, listed = step.shape, step.instructions
    if not any(bucket.gathered for bucket in shape.buckets):
        return None
    gathers = [i for i in listed if i.op is Op.GATHER and shape.buckets[i.buckets[0]].gathered]
    gathered = sum(message_bytes(i, shape) for i in gathers)
    searched, budget = steps.run.parallel.zero3_regather == "step", step.budget  # by the pass, for its list
    return GatheredBytes(stage, budget, gathered, least_bytes(listed, shape, budget, search=searched))


def least_moved(shape: RankShape) -> dict[Lane, int]:
    """The least bytes that a step moves, by lane (`MOVES`): each bucket is loaded once and updated. Sums of
    gradients do not count.
    """
    loaded = (number for number, bucket in enumerate(shape.buckets) if bucket.is_loaded)
    loads = [i for number in loaded for i in loads_of(number, shape)]
    return moved_in_step([*loads, *updates_of(shape.trained, shape)], shape)


def moved_in_step(instructions: Iterable[Instruction], shape: RankShape) -> dict[Lane, int]:
    """Bytes of model state that a step moves, by lane; of updates in host memory those of gradients."""
    state = [i for i in instructions if i.buckets and i.lane in MOVES]
    return dict.fromkeys(MOVES, 0) | traffic(state, shape)
