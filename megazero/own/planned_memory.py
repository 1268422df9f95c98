"""What is known of a run's memory before its first step: the model state of each stage, and with a micro-batch what a
step takes in every tier, which is held to the budgets of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any

import torch

from megazero.config.dump import plain_value
from megazero.config.flags import fields_for_flags
from megazero.config.placement import AUTO
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.config.tiers import TierShare
from megazero.mpu.axes import Axes, Coordinates
from megazero.own.planned_placement import chosen_for
from megazero.own.planned_state import OwnChunks, own_axes
from megazero.own.planned_step import OwnPlannedModel
from megazero.own.settings import computed_again, placed_by, run_problems, with_batches
from megazero.own.unit_bytes import OwnModelBytes, unit_bytes
from megazero.own.unit_times import unit_seconds
from megazero.own.units.model import BatchTensors, Model
from megazero.pipeline.kept_disks import too_small
from megazero.plan.budget_changes import BudgetSearch, MemoryChange, set_field, smaller_buckets
from megazero.plan.budgets import budgets_of, excess_problems, fullest, has_budgets, shortened
from megazero.plan.rank_state import StageBytes
from megazero.plan.search import SearchLimits
from megazero.plan.step_memory import StageMemory, TierPeaks, rank_words, run_memories
from megazero.program.passes.leaving import LEAST_BUFFERS
from megazero.report.banner import stage_table, zero_words
from megazero.telemetry.units import size
from megazero.train.api import naming_fields
from megazero.train.placed import room_here


@dataclass(frozen=True)
class StepMemory:
    """What is found of a step. settings: of a placement, by field in plain words. Otherwise as `PlannedMemory`."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    peaks: tuple[TierPeaks, ...] = ()
    placed: tuple[str, ...] = ()

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> StepMemory:
        """That of which JSON holds the fields."""
        return cls(plain["settings"], tuple(TierPeaks(**stage) for stage in plain["peaks"]), tuple(plain["placed"]))


@dataclass(frozen=True)
class PlannedMemory:
    """The memory of a rank of each stage of a run on a kind of device, cpu or cuda.

    states  of its model state
    peaks   the most of a step in every tier; (): nothing has been measured
    placed  sentences on a placement that was found
    """

    run: Run
    axes: Axes
    kind: str
    states: tuple[StageBytes, ...]
    peaks: tuple[TierPeaks, ...] = ()
    placed: tuple[str, ...] = ()

    @classmethod
    def of(cls, chunks: OwnChunks, run: Run, axes: Axes, kind: str, step: StepMemory) -> PlannedMemory:
        """Of a model with these chunks."""
        at = (Coordinates(stage, 0, 0, 0) for stage in range(axes.pp))
        states = tuple(chunks.state(run, axes, each).bytes for each in at)
        return cls(run, axes, kind, states, step.peaks, step.placed)

    def __str__(self) -> str:
        """A table of the model state, and a line on what a step takes."""
        title = f"Memory of the model state, {zero_words(self.run.parallel.zero_stage, self.axes)}"
        table = "\n".join(f"  {line}".rstrip() for line in stage_table(self.states, "unit").splitlines())
        placed = (f"placement: {fields_for_flags(line)}" for line in self.placed)
        return "\n".join([title, table, self.step_words, *placed])

    @property
    def step_words(self) -> str:
        """What a step takes at most."""
        if not self.peaks:
            return "What a step takes beside it is not known: nothing has been measured"
        most = max(self.peaks, key=lambda peaks: peaks.total_bytes)
        host = f", and {size(most.host_bytes)} of host memory" * bool(most.host_bytes)
        words = f"A step takes {size(most.device_bytes)} on the device of {rank_words(most.stage, self.axes)}{host}"
        budgets = fullest(self.peaks, budgets_of(self.run, self.kind))
        of = (f"{size(tier.most)} {tier.name} of {fields_for_flags(tier.flag)} {size(tier.budget)}" for tier in budgets)
        return "; ".join([words, *of])


@dataclass(frozen=True)
class MeasuredStep:
    """A model, and what a step takes, by which its memory is measured.

    batch          makes a micro-batch for a run
    micro_batches  of a step, on each replica; None: the run says
    always         whether the memory of runs without budgets is measured, too
    """

    model: Model
    batch: Callable[[Run], BatchTensors]
    micro_batches: int | None = None
    always: bool = True

    def wanted(self, run: Run) -> bool:
        """Whether the memory of a run is measured."""
        return self.always or has_budgets(run) or run.offload.placement == AUTO

    def found(self, run: Run, device: torch.device, world_size: int, ranks_here: int) -> dict[str, Any]:
        """A `StepMemory` of a run as JSON holds it. The units run one at a time on the device. ranks_here: the ranks of
        this host.

        Communicates nothing. Raises ConfigError with the numbers where they are above the budgets of the run.
        """
        axes_for = partial(own_axes, self.model, world_size=world_size)
        axes, batch = axes_for(run), self.batch(run)
        planned = run if self.micro_batches is None else with_batches(run, self.micro_batches, axes.dp)

        @cache
        def measured(recompute: str) -> OwnModelBytes:
            return unit_bytes(self.model, batch, computed_again(run, recompute), device)

        own = OwnPlannedModel(OwnChunks.of(self.model, run), measured)
        settings, told = dict[str, Any](), tuple[str, ...]()
        if run.offload.placement == AUTO:
            room = room_here(run, ranks_here) if ranks_here == world_size else None
            seconds = partial(unit_seconds, self.model, batch, run, device)
            with naming_fields():
                choice = chosen_for(own, planned, axes, device.type, seconds, room)
            settings = {name: plain_value(value) for name, value in choice.settings}
            run, planned, told = placed_by(run, settings), placed_by(planned, settings), choice.told
        memories = run_memories(planned, axes, device.type, own)
        if too_large := _buffer_problems(planned, memories):
            raise ConfigError([*map(fields_for_flags, too_large)])
        peaks = [stage.peaks for stage in memories]
        budgets, enough = budgets_of(run, device.type), shortened(planned, axes)
        changes = partial(_OwnChanges, own, axes_for, enough, world_size, device.type, budgets)
        if has_budgets(run) and (problems := excess_problems(peaks, budgets, axes, changes)):
            with naming_fields():
                raise ConfigError(problems)
        return asdict(StepMemory(settings, tuple(peaks), told))


def _buffer_problems(run: Run, memories: Sequence[StageMemory]) -> list[str]:
    """A sentence if nvme_buffer_bytes does not hold the buffers of activations on their way to files."""
    size, room = max(stage.activations.buffer_bytes for stage in memories), run.offload.nvme_buffer_bytes
    if LEAST_BUFFERS * size <= room:
        return []
    return [
        f"--offload-activations {run.offload.offload_activations}: a unit keeps up to {size:,} bytes of a micro-batch, "
        f"rounded up: {too_small(room, size)}"
    ]


class _OwnChanges(BudgetSearch):
    """A search for changes of a run of a user's model, on as many ranks and with as many stages."""

    def __init__(
        self,
        model: OwnPlannedModel,
        axes_for: Callable[[Run], Axes],
        run: Run,
        world_size: int,
        kind: str,
        limits: SearchLimits,
        first: int,
    ) -> None:
        super().__init__(run, world_size, kind, limits, first)
        self._model, self._axes_for = model, axes_for

    def is_valid(self, run: Run) -> bool:
        return not [*run_problems(run, self._world, len(self._model.chunks.names))]

    def peaks(self, run: Run) -> tuple[TierPeaks, ...] | None:
        """None of a run whose units cannot compute so: with recompute_granularity one that changes its input. Neither
        are there any where buffers do not hold what goes to files.
        """
        try:
            memories = run_memories(run, self._axes_for(run), self._kind, self._model)
            return None if _buffer_problems(run, memories) else tuple(stage.peaks for stage in memories)
        except (ConfigError, ValueError):
            return None

    def changes(self, run: Run) -> Iterator[MemoryChange]:
        """Those that a model of modules reads, the cheapest in time first."""
        parallel, axes = run.parallel, self._axes_for(run)
        replicas = axes.dp > 1
        if replicas:
            yield from (set_field("zero_stage", stage) for stage in range(parallel.zero_stage + 1, 3))
            yield from smaller_buckets(run, axes)
        if run.offload.offload_optimizer:
            yield from (set_field("nvme_buffer_bytes", run.offload.nvme_buffer_bytes // part) for part in (4, 16))
        if run.offload.offload_params.in_files and parallel.micro_batch_order is None:
            yield set_field("micro_batch_order", "horizontal")
        if parallel.recompute_granularity != "full":
            yield set_field("recompute_granularity", "full")
        if replicas and parallel.zero_stage < 3:
            yield set_field("zero_stage", 3)
        if run.offload.offload_optimizer:
            yield set_field("offload_optimizer", TierShare())
