"""Bytes that the fullest device of a step never falls below, found in a thousandth of the time of a walk through its
lists: of each stage the model state whose parameters tp divides evenly, and the activations of its schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from megazero.config.derive import pipeline_schedule
from megazero.config.inventory import LayerCounts, parameters_per_layer
from megazero.config.layers.kinds import layers
from megazero.config.schema import Run
from megazero.config.tiers import TierShare
from megazero.model.stage import StageSpec
from megazero.mpu.axes import Axes
from megazero.mpu.chunks import ChunkMap
from megazero.pipeline.schedule import make_orders
from megazero.pipeline.stage_specs import specs_of_stage
from megazero.plan.activations import Moment, binding, chunk_bytes, moments, places
from megazero.plan.budgets import keeps_all
from megazero.plan.rank_state import micro_batches_of
from megazero.plan.recompute import activation_plan, recompute_table
from megazero.program.instruction import Instruction
from megazero.zero.sharding import OPTIMIZER, Column, Sharding, run_columns, shardings

SPLIT = frozenset({"zb-h1", "zb-v"})
"""Schedules that compute the backward of the weights apart."""
FILLINGS = 2
"""So often the micro-batches of a step whose memory is looked at fill the pipeline, at least."""


def least_states(run: Run, axes: Axes) -> list[int]:
    """By the first of equal stages, the bytes of its model state on the device, at least, while it computes: of what is
    sharded a block is whole at a time.
    """
    width = state_width(run, axes.shard_size, axes.dp * axes.cp)
    counts = parameters_per_layer(run.model)
    whole = min(counts.blocks, default=0) * width.whole
    stages = (specs_of_stage(run, stage) for stage in equal_stages(run))
    return [int((sum(_elements(counts, spec) for spec in specs) * width.device + whole) / axes.tp) for specs in stages]


def least_activations(run: Run, axes: Axes, kind: str) -> list[int]:
    """The same of activations, whatever ZeRO shards. Those that leave the device do not count, and which ones do is not
    asked.
    """
    if run.offload.offload_activations:
        return [0 for _ in equal_stages(run)]
    plan, table = activation_plan(run, kind), recompute_table(run, axes, kind)
    p, micro_batches = run.parallel, short_step(run, axes, FILLINGS)
    most = list[int]()
    for stage in equal_stages(run):
        chunks = [chunk_bytes(plan, spec, table) for spec in specs_of_stage(run, stage)]
        when = _moments(pipeline_schedule(p), p.pp, micro_batches, p.virtual_stages, stage)
        most.append(max(max(places(moment, chunks)) for moment in when))
    return most


def first_activations(run: Run, axes: Axes, kind: str) -> int:
    """The same of the first stage, without its schedule: every schedule holds there at one time as many micro-batches
    of each chunk as there are stages, or all of them. Chunks count as the smallest.
    """
    if run.offload.offload_activations:
        return 0
    plan, table = activation_plan(run, kind), recompute_table(run, axes, kind)
    kept = [chunk_bytes(plan, spec, table).kept for spec in specs_of_stage(run, 0)]
    return len(kept) * min(axes.pp, micro_batches_of(run, axes)) * min(kept)


@dataclass(frozen=True)
class Activations:
    """The least activations of a run, whatever its ZeRO stage."""

    run: Run
    axes: Axes
    kind: str

    @cached_property
    def _first(self) -> int:
        return first_activations(self.run, self.axes, self.kind)

    @cached_property
    def _all(self) -> list[int]:
        return least_activations(self.run, self.axes, self.kind)

    def least_tensors(self, states: Sequence[int], room: float) -> int:
        """Bytes of tensors on the fullest device with these model states (`least_states`), at least. The schedule is
        asked only where the first stage has room without it.
        """
        of_first = states[0] + self._first
        return of_first if of_first > room else max(map(sum, zip(states, self._all, strict=True)))


def short_step(run: Run, axes: Axes, fillings: int) -> int:
    """Micro-batches of a step that fill the pipeline so often at least, and leave as many over as the whole step does;
    all of them where all count.
    """
    micro_batches = micro_batches_of(run, axes)
    if keeps_all(run):
        return micro_batches
    return micro_batches - max(0, micro_batches // axes.pp - fillings) * axes.pp


# A search asks for the same schedule with every micro-batch of the same number, recompute and ZeRO stage.
@lru_cache(maxsize=128)
def schedule_orders(
    name: str, pp: int, micro_batches: int, virtual_stages: int
) -> tuple[list[list[Instruction]], ChunkMap]:
    """`pipeline.schedule.make_orders`, once for all who ask."""
    return make_orders(name, pp, micro_batches, virtual_stages)


@lru_cache(maxsize=4096)
def _moments(name: str, pp: int, micro_batches: int, virtual_stages: int, stage: int) -> tuple[Moment, ...]:
    """The computations of a stage's schedule at which it may hold most."""
    orders, _ = schedule_orders(name, pp, micro_batches, virtual_stages)
    return tuple(binding(moments(orders[stage], virtual_stages)))


def equal_stages(run: Run) -> dict[int, range]:
    """The first of each set of stages that hold equal layers, and the set. Others of it are reached later, and hold no
    more micro-batches. Where a backward is split this does not hold, and each stage stands for itself.
    """
    of_model, first, last = layers(run.model), dict[object, int](), dict[object, int]()
    if pipeline_schedule(run.parallel) in SPLIT:
        return {stage: range(stage, stage + 1) for stage in range(run.parallel.pp)}
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


class StateWidth(NamedTuple):
    """Bytes of model state for each parameter of a rank, at least.

    device  on the device
    away    in host memory
    whole   more of a block on the device while it computes its backward, where a rank else has a shard of it
    """

    device: float
    away: float
    whole: float


def state_width(run: Run, shard_size: int | None, replicas: int) -> StateWidth:
    """The widths of a run. 0 with adapters, whose base has columns of its own.

    shard_size: ranks that share out sharded columns; None: all. The ranks of two stages share a tied embedding, so all
    are twice the replicas.
    """
    if run.lora.lora_rank is not None:
        return StateWidth(0.0, 0.0, 0.0)
    row, off, shards = shardings(run.parallel, run.offload), run.offload, shard_size or 2 * replicas
    leaves: dict[Column, TierShare] = {
        **dict.fromkeys(OPTIMIZER, off.offload_optimizer),
        Column.GRADIENT: off.offload_gradients,
        Column.PARAMETER: off.offload_params,
    }
    device = away = whole = 0.0
    for column, dtype in run_columns(run.optimizer, run.parallel, run.offload).items():
        width = dtype.itemsize / (shards if row[column] is Sharding.SHARDED else 1)
        share = leaves[column].share if leaves[column] else 0.0
        away += share * width
        device += (1 - share) * width
        whole += (dtype.itemsize - width) * (column in (Column.GRADIENT, Column.PARAMETER))
    return StateWidth(device, away, whole)
