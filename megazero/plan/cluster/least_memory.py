"""Bytes that the fullest device of a step never falls below, found in a thousandth of the time of a walk through its
lists: of each stage the model state whose parameters tp divides evenly, and the activations of its schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from megazero.config.derive import RecomputeTable, pipeline_schedule
from megazero.config.inventory import LayerCounts, parameters_per_layer
from megazero.config.layers.kinds import layers
from megazero.config.schema import Run
from megazero.config.tiers import Tier, TierShare
from megazero.model.stage import StageSpec
from megazero.mpu.axes import Axes
from megazero.mpu.chunks import ChunkMap
from megazero.pipeline.schedule import make_orders
from megazero.pipeline.stage_specs import specs_by_stage, specs_of_stage
from megazero.plan.activations import ActivationPlan, ChunkBytes, Moment, binding, chunk_bytes, moments, most_bytes
from megazero.plan.budgets import keeps_all
from megazero.plan.rank_state import micro_batches_of
from megazero.plan.recompute import activation_plan, recompute_table
from megazero.program.instruction import Instruction
from megazero.zero.sharding import OPTIMIZER, Column, Sharding, run_columns, shardings

SPLIT = frozenset({"zb-h1", "zb-v"})
"""Schedules that compute the backward of the weights apart."""
REPEATED = frozenset({"1f1b", "zb-h1"})
"""Schedules whose middle repeats itself with each micro-batch, and not only with each filling of the pipeline."""
FILLINGS = 2
"""So often the micro-batches of a step that is short, but tells of the whole one, fill the pipeline."""
BEHIND = 4
"""Micro-batches behind those that fill the pipeline, of a step whose memory is looked at: what is on its way then."""


@dataclass(frozen=True)
class LeastMemory:
    """The least bytes of the devices of a run, whatever its ZeRO stage: by stage, or by the first of equal ones where
    that holds most (`fullest_stages`).

    Activations that leave the device do not count, and which ones do is not asked.
    """

    run: Run
    axes: Axes
    kind: str

    @cached_property
    def stages(self) -> list[int]:
        """The stages that are looked at."""
        return [*fullest_stages(self.run)]

    def states(self, width: StateWidth) -> list[int]:
        """The bytes of model state on the device, at least, while it computes: of what is sharded a block is whole at a
        time.
        """
        elements, _ = self._elements
        return [self._state(number, width) for number in elements]

    def _state(self, elements: int, width: StateWidth) -> int:
        """The same of a stage with so many parameters."""
        _, block = self._elements
        return int((elements * width.device + block * width.whole) / self.axes.tp)

    def away(self, width: StateWidth) -> int:
        """The bytes of model state in host memory on the rank that has most there, at least."""
        elements, _ = self._elements
        return int(max(elements) * width.away / self.axes.tp)

    @cached_property
    def _elements(self) -> tuple[list[int], int]:
        """The parameters of each stage, and those of the smallest block."""
        counts, specs = parameters_per_layer(self.run.model), specs_by_stage(self.run)
        of_stages = [sum(elements_of(counts, spec) for spec in specs[stage]) for stage in self.stages]
        return of_stages, min(counts.blocks, default=0)

    @cached_property
    def activations(self) -> list[int]:
        """The most bytes of activations, without messages on their way."""
        if self.run.offload.offload_activations:
            return [0 for _ in self.stages]
        p, micro_batches = self.run.parallel, full_step(self.run, self.axes)
        specs, most = specs_by_stage(self.run), list[int]()
        for stage in self.stages:
            when = _moments(pipeline_schedule(p), p.pp, micro_batches, p.virtual_stages, stage)
            chunks = self._chunks(specs[stage])
            most.append(max(most_bytes(moment, chunks) for moment in when))
        return most

    @cached_property
    def first_activations(self) -> int:
        """The same of the first stage, without its schedule: every schedule holds there at one time as many
        micro-batches of each chunk as there are stages, or all of them. Chunks count as the smallest.
        """
        if self.run.offload.offload_activations:
            return 0
        kept = [chunk.kept for chunk in self._chunks(specs_of_stage(self.run, 0))]
        return len(kept) * min(self.axes.pp, micro_batches_of(self.run, self.axes)) * min(kept)

    @cached_property
    def _unit_bytes(self) -> tuple[ActivationPlan, RecomputeTable]:
        return activation_plan(self.run, self.kind), recompute_table(self.run, self.axes, self.kind)

    def _chunks(self, specs: Sequence[StageSpec]) -> list[ChunkBytes]:
        plan, table = self._unit_bytes
        return [chunk_bytes(plan, spec, table) for spec in specs]

    def tensors(self, width: StateWidth, room: float) -> int:
        """Bytes of tensors on the fullest device with model state of this width, at least. The schedule is asked only
        where the first stage has room without it.
        """
        elements, _ = self._elements
        of_first = self._state(elements[0], width) + self.first_activations
        return of_first if of_first > room else max(self._tensors(width))

    def _tensors(self, width: StateWidth) -> list[int]:
        return [state + kept for state, kept in zip(self.states(width), self.activations, strict=True)]

    def fullest(self, width: StateWidth) -> int:
        """The stage that holds most by these bounds."""
        tensors = self._tensors(width)
        return self.stages[tensors.index(max(tensors))]


def short_step(run: Run, axes: Axes, fillings: int) -> int:
    """Micro-batches of a step that fill the pipeline so often, and leave as many over as the whole step does where that
    matters to the schedule; all of them where all count.
    """
    micro_batches, pp = micro_batches_of(run, axes), axes.pp
    if keeps_all(run):
        return micro_batches
    if pipeline_schedule(run.parallel) in REPEATED:
        return min(micro_batches, fillings * pp)
    return micro_batches - max(0, micro_batches // pp - fillings) * pp


def full_step(run: Run, axes: Axes) -> int:
    """Micro-batches of a step in which each rank holds as much as in the whole one."""
    short = short_step(run, axes, FILLINGS)
    return min(short, axes.pp + BEHIND) if pipeline_schedule(run.parallel) in REPEATED and not keeps_all(run) else short


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


def fullest_stages(run: Run) -> dict[int, range]:
    """Of each set of stages that hold equal layers the first, which holds most, and the stages from the first to the
    last of the set: others are reached later, and hold no more micro-batches. Where a backward is split this does not
    hold, and each stage stands for itself.
    """
    if pipeline_schedule(run.parallel) in SPLIT:
        return {stage: range(stage, stage + 1) for stage in range(run.parallel.pp)}
    of_model, stages = layers(run.model), dict[object, list[int]]()
    for stage, specs in enumerate(specs_by_stage(run)):
        shape = tuple(
            (tuple(of_model[number] for number in spec.blocks), spec.has_embedding, spec.has_head) for spec in specs
        )
        stages.setdefault(shape, []).append(stage)
    return {equal[0]: range(equal[0], equal[-1] + 1) for equal in stages.values()}


def elements_of(counts: LayerCounts, spec: StageSpec) -> int:
    """The parameters of a chunk, without an output weight that is tied."""
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
    are twice the replicas then.
    """
    if run.lora.lora_rank is not None:
        return StateWidth(0.0, 0.0, 0.0)
    ranks = replicas if run.model.untie_embeddings_and_output_weights else 2 * replicas
    row, off, shards = shardings(run.parallel, run.offload), run.offload, shard_size or ranks
    leaves: dict[Column, TierShare] = {
        **dict.fromkeys(OPTIMIZER, off.offload_optimizer),
        Column.GRADIENT: off.offload_gradients,
        Column.PARAMETER: off.offload_params,
    }
    device = away = whole = 0.0
    for column, dtype in run_columns(run.optimizer, run.parallel, run.offload).items():
        width = dtype.itemsize / (shards if row[column] is Sharding.SHARDED else 1)
        left = leaves[column]
        share = left.share if left else 0.0
        # what rests in files takes no host memory, and how much some units are is not asked
        away += share * width if left.tier is Tier.HOST and not left.units else 0.0
        device += (1 - share) * width
        whole += (dtype.itemsize - width) * (column in (Column.GRADIENT, Column.PARAMETER))
    return StateWidth(device, away, whole)
