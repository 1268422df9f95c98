"""The model state of any rank of a user's model by arithmetic, before an engine takes the modules: names and shapes
of its parameters are all that is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megazero.config.schema import Run
from megazero.mpu.axes import Axes, Coordinates, SharingAxes, axes_of
from megazero.mpu.parameter import ParameterSpec
from megazero.own.rank_units import (
    chunks_of_units,
    held_parameters,
    inventory_of,
    plan_of,
    sharing_stages,
    tied_names,
)
from megazero.own.units.model import Units
from megazero.own.units.parameter_shape import ParameterShape
from megazero.pipeline.stage_specs import chunks_of
from megazero.plan.rank_state import RankState, StageLayers, has_nccl
from megazero.zero.layout import BucketLayout, group_sizes, pack


@dataclass(frozen=True, eq=False)
class OwnRankState(RankState):
    """That of the rank at `at`.

    units  the parameters of its units, by its own number of a chunk
    """

    units: Sequence[Sequence[Sequence[ParameterShape]]] = field(kw_only=True)

    def specs(self, *, trained: bool) -> list[list[list[ParameterSpec]]]:
        rank, size = self.at.tp, self.axes.tp
        return [
            [[each.spec(rank, size) for each in unit if each.is_trained == trained] for unit in chunk]
            for chunk in self.units
        ]

    @property
    def layers(self) -> StageLayers:
        return StageLayers(sum(map(len, self.units)), len(self.units), embedding=False, head=False)

    @cached_property
    def layouts(self) -> tuple[BucketLayout, ...]:
        return pack(self.specs(trained=True), group_sizes(self.axes, self.at), self._packing)


@dataclass(frozen=True)
class OwnChunks:
    """How a model is divided.

    names      of the units, in model order
    chunks     the numbers of the units of each model chunk
    inventory  the parameters of each unit
    """

    names: tuple[str, ...]
    chunks: tuple[range, ...]
    inventory: Sequence[Sequence[ParameterShape]]

    @classmethod
    def of(cls, model: Units, run: Run) -> OwnChunks:
        """Those of a model that no engine has yet. The modules stay as they are."""
        chunks = chunks_of_units(model, run)
        tied = tied_names(model, run, chunks)
        inventory = inventory_of(
            model,
            tied,
            held_parameters(model, run, chunks, tied),
            plan_of(model, run),
            has_several_dtypes=run.optimizer.has_several_dtypes,
        )
        return cls(tuple(unit.name for unit in model.units), chunks, inventory)

    def of_stage(self, run: Run, stage: int) -> list[range]:
        """The numbers of the units of a stage, by its own number of a chunk."""
        return [self.chunks[number] for number in chunks_of(run).of(stage)]

    def state(self, run: Run, axes: Axes, at: Coordinates, *, nccl: bool | None = None) -> OwnRankState:
        """The model state of a rank. nccl: default: what the run says."""
        units = [[self.inventory[number] for number in numbers] for numbers in self.of_stage(run, at.pp)]
        nccl = has_nccl(run.parallel, axes) if nccl is None else nccl
        return OwnRankState(run, axes, at, nccl=nccl, units=units)


def own_axes(model: Units, run: Run, world_size: int) -> Axes:
    """The grid's sizes of a run of a model, which knows the stages that share parameters."""
    axes = axes_of(run, world_size)
    sharing = sharing_stages(model, run)
    return SharingAxes(**vars(axes), sharing=sharing) if sharing else axes
