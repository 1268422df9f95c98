"""What is known of a run's memory before its first step: the model state of each stage, and with a micro-batch what a
step takes in every tier, which is held to the budgets of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch

from megazero.config.flags import fields_for_flags
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.config.tiers import TierShare
from megazero.mpu.axes import Axes, Coordinates
from megazero.own.model import BatchTensors, Model
from megazero.own.planned_state import OwnChunks, own_axes
from megazero.own.planned_step import OwnPlannedModel
from megazero.own.settings import computed_again, run_problems, with_batches
from megazero.own.unit_bytes import OwnModelBytes, unit_bytes
from megazero.plan.budget_changes import BudgetSearch, MemoryChange, set_field, smaller_buckets
from megazero.plan.budgets import budgets_of, excess_problems, fullest, has_budgets, shortened
from megazero.plan.rank_state import StageBytes
from megazero.plan.search import SearchLimits
from megazero.plan.step_memory import TierPeaks, rank_words, run_memories
from megazero.report.banner import stage_table, zero_words
from megazero.telemetry.units import size


@dataclass(frozen=True)
class PlannedMemory:
    """The memory of a rank of each stage of a run on a kind of device, cpu or cuda.

    states  of its model state
    peaks   the most of a step in every tier; (): nothing has been measured
    """

    run: Run
    axes: Axes
    kind: str
    states: tuple[StageBytes, ...]
    peaks: tuple[TierPeaks, ...] = ()

    @classmethod
    def of(cls, chunks: OwnChunks, run: Run, axes: Axes, kind: str, peaks: Sequence[TierPeaks]) -> PlannedMemory:
        """Of a model with these chunks."""
        at = (Coordinates(stage, 0, 0, 0) for stage in range(axes.pp))
        return cls(run, axes, kind, tuple(chunks.state(run, axes, each).bytes for each in at), tuple(peaks))

    def __str__(self) -> str:
        """A table of the model state, and a line on what a step takes."""
        title = f"Memory of the model state, {zero_words(self.run.parallel.zero_stage, self.axes)}"
        table = "\n".join(f"  {line}".rstrip() for line in stage_table(self.states, "unit").splitlines())
        return f"{title}\n{table}\n{self.step_words}"

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
        return self.always or has_budgets(run)

    def peaks(self, run: Run, device: torch.device, world_size: int) -> list[Any]:
        """The peaks of each stage of a run as JSON holds them. The units run one at a time on the device.

        Communicates nothing. Raises ConfigError with the numbers where they are above the budgets of the run.
        """
        axes_for = partial(own_axes, self.model, world_size=world_size)
        axes, batch = axes_for(run), self.batch(run)
        planned = run if self.micro_batches is None else with_batches(run, self.micro_batches, axes.dp)

        @cache
        def measured(recompute: str) -> OwnModelBytes:
            return unit_bytes(self.model, batch, computed_again(run, recompute), device)

        own = OwnPlannedModel(OwnChunks.of(self.model, run), measured)
        peaks = [stage.peaks for stage in run_memories(planned, axes, device.type, own)]
        budgets, enough = budgets_of(run, device.type), shortened(planned, axes)
        changes = partial(_OwnChanges, own, axes_for, enough, world_size, device.type, budgets)
        if has_budgets(run) and (problems := excess_problems(peaks, budgets, axes, changes)):
            raise ConfigError([*map(fields_for_flags, problems)])
        return [asdict(stage) for stage in peaks]


def peaks_from(plain: Sequence[Mapping[str, Any]]) -> list[TierPeaks]:
    """The peaks that `MeasuredStep.peaks` has found."""
    return [TierPeaks(**stage) for stage in plain]


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
        """None of a run whose units cannot compute so: with recompute_granularity one that changes its input."""
        try:
            return tuple(stage.peaks for stage in run_memories(run, self._axes_for(run), self._kind, self._model))
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
