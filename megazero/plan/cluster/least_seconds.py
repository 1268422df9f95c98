"""Seconds that a step on a cluster never falls below, by arithmetic: what its stages compute, the messages on model
state, and those of them that stand at the two ends of a step, where nothing is computed beside them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from megazero.config.derive import bucket_size, gathers_parameters, leaving, micro_batch_order
from megazero.config.inventory import block_shapes, parameters, parameters_per_layer
from megazero.config.layers.kinds import kinds
from megazero.config.schema import Run
from megazero.mpu.axes import Axes
from megazero.pipeline.build import step_options
from megazero.pipeline.schedule import ChunkMap
from megazero.pipeline.stage_specs import chunks_of, specs_by_stage
from megazero.plan.cluster.cluster_times import GRADIENT
from megazero.plan.cluster.least_memory import elements_of
from megazero.plan.flops import trained_parameters
from megazero.plan.rank_state import has_nccl
from megazero.plan.traffic import element_widths, run_traffic
from megazero.program.instruction import Lane
from megazero.program.schedule_time import NONE, StateDelays
from megazero.program.shape import IN_FLIGHT
from megazero.program.times import ChunkTimes


def least_step(times: ChunkTimes, chunks: ChunkMap, micro_batches: int, *, split: bool) -> float:
    """A time that no step of these chunks falls below, whatever the order of its computations.

    A stage computes its chunks for all micro-batches one after the other. Before its first computation the chunks in
    front of its first one have computed a forward, each after the other, and behind its last one these chunks compute a
    backward, with a message from stage to stage. Where the weights' part of a backward is apart (split), that may be a
    stage's last computation, and nothing has to follow.
    """

    def least(stage: int) -> float:
        numbers = list(chunks.of(stage))
        work = micro_batches * sum(times.forward[n] + times.backward[n] for n in numbers)
        before = range(min(numbers))
        reach = sum(times.forward[n] for n in before) + times.message * len(before)
        return work + reach + (0.0 if split else sum(times.backward[n] for n in before) + times.message * len(before))

    return max(least(stage) for stage in range(chunks.stages))


TURNS = 4
"""Units that a rank keeps gathered, at most, where a micro-batch turns back, and where the next one follows."""


IN_CHUNKS = 0.75
"""The share of its messages that a list with several chunks on a rank sends at least: some of them bring a bucket for
two chunks.
"""


def least_messages(run: Run, axes: Axes, per_byte: Mapping[Lane, float]) -> float:
    """Seconds in which the messages on the model state of some stage pass a lane, at least: an even share of the
    parameters that tp divides. The two lanes work beside each other. A tied embedding of two stages, whose gradients
    are reduced once, does not count.
    """
    traffic = run_traffic(run, axes)
    inside, units = traffic.inside, run.model.num_layers / axes.pp
    if gathers_parameters(run):
        inside *= max(0.0, 1 - TURNS / (2 * units))
    if run.parallel.virtual_stages > 1:
        inside *= IN_CHUNKS
    elements = parameters(run.model) if run.lora.lora_rank is None else trained_parameters(run)
    if axes.pp > 1 and run.lora.lora_rank is None and not run.model.untie_embeddings_and_output_weights:
        elements = sum(parameters_per_layer(run.model).blocks)
    share = elements / (axes.tp * axes.pp)
    return share * max(inside * per_byte[Lane.SHARDS], traffic.across * per_byte[Lane.ACROSS])


def state_delays(run: Run, axes: Axes, times: ChunkTimes) -> StateDelays:
    """The messages at the two ends of a step: parameters that were updated are gathered before they are used, and the
    gradients of the last micro-batch are reduced behind the begin of its backward. Of the parameters of blocks alone:
    those of tables may be tied, and their gradients come early.

    None where a step begins with what the one before has left undone, or where columns leave the device.
    """
    options, shards = step_options(run), axes.shard_size or axes.dp * axes.cp
    late = options.late or options.early or micro_batch_order(run) == "vertical"
    if shards == 1 or late or any(leaving(run).values()) or run.lora.lora_rank is not None:
        return NONE
    widths, blocks = element_widths(run), parameters_per_layer(run.model).blocks
    reduced, gathered = widths.gradient, widths.parameter
    if run.parallel.zero_stage == 0:
        reduced, gathered = widths.gradient + (widths.summed or widths.gradient), 0.0
    byte, chunks = times.per_byte[Lane.SHARDS] / axes.tp, chunks_of(run)
    gathers, every, reductions, updated = dict[int, float](), dict[int, float](), list[float](), 0.0
    for stage, specs in enumerate(specs_by_stage(run)):
        elements = 0
        for chunk, spec in zip(chunks.of(stage), specs, strict=True):
            of_chunk = sum(blocks[number] for number in spec.blocks)
            elements += of_chunk
            gathers[chunk], every[chunk] = elements * gathered * byte, of_chunk * reduced * byte
        reductions.append(elements * reduced * byte)
        updated = max(updated, elements / axes.tp * GRADIENT / shards * times.update)
    # the gathers of one stage may begin while another one still updates
    waits = {chunk: max(0.0, seconds - updated) for chunk, seconds in gathers.items()}
    if not options.reduce_every:
        return StateDelays(waits, reductions)
    return StateDelays(waits, reductions, every, IN_FLIGHT * _largest_bucket(run, axes) * reduced * byte * axes.tp)


def largest_update(run: Run, axes: Axes, times: ChunkTimes) -> float:
    """Seconds in which the stage with most parameters updates those that are its ranks'."""
    counts, shards = parameters_per_layer(run.model), axes.shard_size or axes.dp * axes.cp
    elements = (
        sum(elements_of(counts, spec) + counts.output * spec.has_head for spec in specs)
        for specs in specs_by_stage(run)
    )
    return max(elements) / axes.tp * GRADIENT / (shards if run.parallel.zero_stage else 1) * times.update


def _largest_bucket(run: Run, axes: Axes) -> float:
    """Elements of blocks that a bucket has at most: a parameter is never split."""
    most = bucket_size(run.parallel, axes.dp * axes.cp, nccl=has_nccl(run.parallel, axes))
    largest = max(math.prod(shape) for layer in kinds(run.model) for shape in block_shapes(layer).values())
    return max(most, largest / axes.tp)
