"""What a plan asks of a model: the state of a rank, the names of its units and their bytes. All else of a plan follows
from the run. Families of megazero answer by their layers; a model of a program's own has answers of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from megazero.config.derive import gathers_parameters
from megazero.config.inventory import fp8_elements
from megazero.config.schema import Run
from megazero.config.tiers import plain_unit
from megazero.mpu.axes import Axes
from megazero.pipeline.measured import UnitBytes
from megazero.pipeline.stage_specs import specs_of_stage, unit_names
from megazero.plan.rank_state import RankState, stage_state
from megazero.plan.recompute import activation_plan, recompute_table
from megazero.program.instruction import Instruction
from megazero.program.memory import GraphMemory, HiddenBytes, UnitMemory
from megazero.program.passes.leaving import largest_unit
from megazero.program.shape import RankShape
from megazero.system import device as devices


@dataclass(frozen=True)
class StageSizes:
    """Bytes of a rank's activations, and of what lies beside them.

    units   by its own number of a chunk and by unit
    hidden  of the hidden states between two units
    uneven  of those that differ from it, by model chunk and by the unit that they enter
    graphs  of units in one graph, as of `program.memory.StepBytes`
    logits  of a block of logits that is kept from step to step
    copies  of weights in FP8 that stay
    beside  what else is on the device all the time, by what it is
    """

    units: tuple[tuple[UnitMemory, ...], ...]
    hidden: int
    uneven: Mapping[tuple[int, int], HiddenBytes] = field(default_factory=dict)
    graphs: GraphMemory | None = None
    logits: int = 0
    copies: int = 0
    beside: Mapping[str, int] = field(default_factory=dict)


class PlannedModel(Protocol):
    """A model, whatever it is made of. kind: of device, cpu or cuda."""

    def state(self, run: Run, axes: Axes, stage: int, *, nccl: bool | None = None) -> RankState:
        """The model state of a rank of a stage. nccl: default: what the run says."""

    def names(self, run: Run, stage: int) -> Sequence[Sequence[str]]:
        """What the units of a stage are, by its own number of a chunk."""

    def listed(self, shape: RankShape, run: Run, axes: Axes, stage: int) -> RankShape:
        """A stage's shape as its list is made from it."""

    def walked(self, shape: RankShape, run: Run, axes: Axes, stage: int) -> RankShape:
        """A stage's shape with what units keep, by which the bytes of its list are counted."""

    def largest_written(self, instructions: Sequence[Instruction], shape: RankShape) -> int:
        """The most bytes of a graph that a list writes to files. shape: of `walked`."""

    def sizes(self, run: Run, axes: Axes, stage: int, kind: str) -> StageSizes:
        """The bytes of a stage's activations."""


class FamilyModel:
    """A model of megazero's own layers, which the run names."""

    def state(self, run: Run, axes: Axes, stage: int, *, nccl: bool | None = None) -> RankState:
        return stage_state(run, axes, stage, nccl=nccl)

    def names(self, run: Run, stage: int) -> Sequence[Sequence[str]]:
        return [unit_names(spec) for spec in specs_of_stage(run, stage)]

    def listed(self, shape: RankShape, run: Run, axes: Axes, stage: int) -> RankShape:
        return with_kept(shape, run, axes, stage)

    def walked(self, shape: RankShape, run: Run, axes: Axes, stage: int) -> RankShape:
        return shape

    def largest_written(self, instructions: Sequence[Instruction], shape: RankShape) -> int:
        return largest_unit(shape.kept)

    def sizes(self, run: Run, axes: Axes, stage: int, kind: str) -> StageSizes:
        """Raises ConfigError as `plan.recompute.recompute_table` does."""
        plan, specs = activation_plan(run, kind), specs_of_stage(run, stage)
        has_logits = kind == "cpu" and any(spec.has_head for spec in specs)
        return StageSizes(
            unit_bytes(run, axes, stage, kind),
            plan.hidden_bytes,
            logits=plan.logits if has_logits else 0,
            copies=_fp8_copies(run, stage),
        )


FAMILIES = FamilyModel()
"""What a plan asks where nobody hands it another model."""


def _fp8_copies(run: Run, stage: int) -> int:
    """Bytes of the weights in FP8 and of their transposes, where weights stay (`mpu.fp8.Fp8Layer.weight`)."""
    if gathers_parameters(run):
        return 0
    return 2 * fp8_elements(run, chain.from_iterable(spec.blocks for spec in specs_of_stage(run, stage)))


def unit_bytes(run: Run, axes: Axes, stage: int, kind: str) -> tuple[tuple[UnitBytes, ...], ...]:
    """The bytes of a stage's units, by its own number of a chunk and by unit. kind: of device, cpu or cuda."""
    plan, table = activation_plan(run, kind), recompute_table(run, axes, kind)
    return tuple(plan.units(spec, table) for spec in specs_of_stage(run, stage))


def with_kept(shape: RankShape, run: Run, axes: Axes, stage: int) -> RankShape:
    """The shape of a rank of this stage with what its units keep, where a list asks for that: where activations leave
    the device. Raises ConfigError as `plan.recompute.recompute_table` does.
    """
    if not run.offload.offload_activations:
        return shape
    return shape.keeping(leaving_bytes(run, axes, stage, devices.kind(run.parallel.device)))


def leaving_bytes(run: Run, axes: Axes, stage: int, kind: str) -> list[list[int]]:
    """The bytes that each unit of a stage keeps, by chunk and unit, and 0 of one that is not among those that leave.
    kind: of device, cpu or cuda.
    """
    leaves, names = run.offload.offload_activations, [unit_names(spec) for spec in specs_of_stage(run, stage)]
    sizes = [[unit.saved for unit in chunk] for chunk in unit_bytes(run, axes, stage, kind)]
    return [
        [size * (not leaves.units or leaves.names([plain_unit(name)])) for size, name in zip(*chunk, strict=True)]
        for chunk in zip(sizes, names, strict=True)
    ]
