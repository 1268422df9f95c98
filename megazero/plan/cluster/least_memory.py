"""Bytes that the fullest device of a step never falls below, found in a thousandth of the time of a walk through its
lists: of each stage the model state whose parameters tp divides evenly, and the activations of its schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from megazero.config.derive import pipeline_schedule
from megazero.config.inventory import LayerCounts, parameters_per_layer
from megazero.config.layers.kinds import layers
from megazero.config.schema import Run
from megazero.model.stage import StageSpec
from megazero.mpu.axes import Axes
from megazero.pipeline.schedule import stage_schedule
from megazero.pipeline.stage_specs import specs_of_stage
from megazero.plan.activations import Moment, binding, chunk_bytes, moments, places
from megazero.plan.rank_state import micro_batches_of
from megazero.plan.recompute import activation_plan, recompute_table
from megazero.zero.sharding import OPTIMIZER, Column, Sharding, run_columns, shardings


def least_states(run: Run, axes: Axes) -> list[int]:
    """By the first of equal stages, the bytes of its model state on the device, at least."""
    width = state_width(run, axes.shard_size, axes.dp * axes.cp) / axes.tp
    counts = parameters_per_layer(run.model)
    return [
        int(sum(_elements(counts, spec) for spec in specs_of_stage(run, stage)) * width) for stage in equal_stages(run)
    ]


def least_activations(run: Run, axes: Axes, kind: str) -> list[int]:
    """The same of activations, whatever ZeRO shards. Those that leave the device do not count, and which ones do is not
    asked.
    """
    if run.offload.offload_activations:
        return [0 for _ in equal_stages(run)]
    plan, table = activation_plan(run, kind), recompute_table(run, axes, kind)
    p, micro_batches = run.parallel, micro_batches_of(run, axes)
    most = list[int]()
    for stage in equal_stages(run):
        when = _moments(pipeline_schedule(p), p.pp, micro_batches, p.virtual_stages, stage)
        chunks = [chunk_bytes(plan, spec, table) for spec in specs_of_stage(run, stage)]
        most.append(max(max(places(moment, chunks)) for moment in when))
    return most


# A search asks for the same schedule with every micro-batch of the same number, recompute and ZeRO stage.
@lru_cache(maxsize=4096)
def _moments(name: str, pp: int, micro_batches: int, virtual_stages: int, stage: int) -> tuple[Moment, ...]:
    """The computations of a stage's schedule at which it may hold most."""
    instructions = stage_schedule(name, pp, micro_batches, virtual_stages, stage)
    return tuple(binding(moments(instructions, virtual_stages)))


def equal_stages(run: Run) -> dict[int, range]:
    """The first of each set of stages that hold equal layers, and the set. Others of it are reached later, and hold no
    more micro-batches.
    """
    of_model, first, last = layers(run.model), dict[object, int](), dict[object, int]()
    for stage in range(run.parallel.pp):
        shape = tuple(
            (tuple(of_model[number] for number in spec.blocks), spec.has_embedding, spec.has_head)
            for spec in specs_of_stage(run, stage)
        )
        first.setdefault(shape, stage)
        last[shape] = stage
    return {stage: range(stage, last[shape] + 1) for shape, stage in first.items()}


def _elements(counts: LayerCounts, spec: StageSpec) -> int:
    blocks = sum(counts.blocks[number] for number in spec.blocks)
    return blocks + counts.embedding * spec.has_embedding + counts.head * spec.has_head


def state_width(run: Run, shard_size: int | None, replicas: int) -> float:
    """Bytes of model state for each parameter of a rank, at least, on the device. 0 with adapters, whose base has
    columns of its own.

    shard_size: ranks that share out sharded columns; None: all. The ranks of two stages share a tied embedding, so all
    are twice the replicas.
    """
    return 0.0 if run.lora.lora_rank is not None else sum(_widths(run, shard_size or 2 * replicas))


def _widths(run: Run, shards: int) -> Iterator[float]:
    row, off = shardings(run.parallel, run.offload), run.offload
    leaves: dict[Column, bool] = {
        **dict.fromkeys(OPTIMIZER, bool(off.offload_optimizer)),
        Column.GRADIENT: bool(off.offload_gradients),
        Column.PARAMETER: bool(off.offload_params),
    }
    for column, dtype in run_columns(run.optimizer, run.parallel, run.offload).items():
        if not leaves[column]:
            yield dtype.itemsize / (shards if row[column] is Sharding.SHARDED else 1)
