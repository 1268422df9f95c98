"""The memory of a step on a rank of every stage of a user's model: what `plan.step_memory` asks of it, by the measured
bytes of its units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megazero.config.dtypes import compute_dtype
from megazero.config.schema import Run
from megazero.mpu.axes import Axes, Coordinates
from megazero.own.planned_state import OwnChunks, OwnRankState
from megazero.own.settings import alike
from megazero.own.unit_bytes import OwnModelBytes, OwnUnitBytes
from megazero.pipeline.stage_specs import chunks_of
from megazero.plan.planned_model import StageSizes
from megazero.program.instruction import LEAVE, Instruction
from megazero.program.memory import HiddenBytes, UnitSizes
from megazero.program.shape import RankShape

BUFFERS = "buffers of modules"
"""What buffers are called beside the columns of a peak."""


@dataclass(frozen=True, eq=False)
class OwnPlannedModel:
    """A `plan.planned_model.PlannedModel` of a user's model.

    chunks    how the model is divided in all runs that are asked for
    measured  finds the bytes of its units, by what backward computes again (`recompute_granularity`)
    """

    chunks: OwnChunks
    measured: Callable[[str], OwnModelBytes]
    _states: dict[Any, OwnRankState] = field(default_factory=dict, init=False, repr=False)

    def state(self, run: Run, axes: Axes, stage: int, *, nccl: bool | None = None) -> OwnRankState:
        key = run.parallel, run.offload, run.optimizer, axes, stage, nccl
        if key not in self._states:
            self._states[key] = self.chunks.state(run, axes, Coordinates(stage, 0, 0, 0), nccl=nccl)
        return self._states[key]

    def names(self, run: Run, stage: int) -> Sequence[Sequence[str]]:
        return [[f"unit {self.chunks.names[n]}" for n in numbers] for numbers in self.chunks.of_stage(run, stage)]

    def listed(self, shape: RankShape, run: Run, axes: Axes, stage: int) -> RankShape:
        """As an engine makes its list: a share of activations that leave the device is one of the units."""
        return alike(shape, run, begins=stage == 0)

    def walked(self, shape: RankShape, run: Run, axes: Axes, stage: int) -> RankShape:
        if not run.offload.offload_activations:
            return shape
        return shape.keeping(
            [[unit.input + unit.kept - unit.stays for unit in units] for units in self._units(run, stage)]
        )

    def largest_written(self, instructions: Sequence[Instruction], shape: RankShape) -> int:
        return max((shape.kept_by(i.chunk, i.units) for i in instructions if i.op == LEAVE), default=0)

    def sizes(self, run: Run, axes: Axes, stage: int, kind: str) -> StageSizes:
        every = [self._chunk(run, number).entering for number in range(len(self.chunks.chunks))]
        uneven = {(chunk, unit): size for chunk, sizes in enumerate(every) for unit, size in enumerate(sizes)}
        here = (number for numbers in self.chunks.of_stage(run, stage) for number in numbers)
        buffers = sum(self._measured(run).buffers[number] for number in here)
        graphs = OwnGraphs([self._chunk(run, number) for number in chunks_of(run).of(stage)])
        return StageSizes(self._units(run, stage), 0, uneven, graphs, beside={BUFFERS: buffers} if buffers else {})

    def largest_message(self, run: Run) -> int:
        """The most bytes that one stage hands to the next of a micro-batch."""
        chunks = range(1, len(self.chunks.chunks))
        return max((self._chunk(run, number).entering[0].states for number in chunks), default=0)

    def _measured(self, run: Run) -> OwnModelBytes:
        return self.measured(run.parallel.recompute_granularity)

    def _units(self, run: Run, stage: int) -> tuple[tuple[UnitSizes, ...], ...]:
        return tuple(self._chunk(run, number).sizes for number in chunks_of(run).of(stage))

    def _chunk(self, run: Run, model_chunk: int) -> OwnChunk:
        numbers = self.chunks.chunks[model_chunk]
        measured, width = self._measured(run), compute_dtype(run.optimizer.precision).itemsize
        trained = [
            {
                each.name: each.spec(0, run.parallel.tp).local_numel * (each.dtype.itemsize if each.dtype else width)
                for each in self.chunks.inventory[number]
                if each.is_trained
            }
            for number in numbers
        ]
        return OwnChunk([measured.units[number] for number in numbers], trained, measured.handed)


@dataclass(frozen=True, eq=False)
class OwnChunk:
    """The bytes of a chunk for a micro-batch. What several units keep counts as the first one's, which frees it last.

    trained  bytes of the gradients of each unit's trained parameters, by name
    handed   bytes of the tensors that units hand on, by number
    """

    units: Sequence[OwnUnitBytes]
    trained: Sequence[Mapping[str, int]]
    handed: Sequence[int]

    @cached_property
    def _kept_before(self) -> list[set[int]]:
        """The numbers of what units in front of each one keep."""
        return [{number for unit in self.units[:place] for number in unit.holds} for place in range(len(self.units))]

    @cached_property
    def entering(self) -> tuple[HiddenBytes, ...]:
        """Of what enters each unit."""
        return tuple(
            HiddenBytes(sum(self.handed[n] for n in unit.takes if n not in kept), unit.gradients)
            for unit, kept in zip(self.units, self._kept_before, strict=True)
        )

    @cached_property
    def sizes(self) -> tuple[UnitSizes, ...]:
        """Of each unit."""
        return tuple(
            UnitSizes(
                input=sum(self.handed[n] for n in unit.takes if n in unit.holds and n not in kept),
                kept=unit.kept,
                forward=unit.forward,
                backward=unit.backward,
                deferred=sum(own.values()),
                stays=self._stay(unit, kept),
            )
            for unit, own, kept in zip(self.units, self.trained, self._kept_before, strict=True)
        )

    def _stay(self, unit: OwnUnitBytes, kept_before: set[int]) -> int:
        """Bytes among what counts as a unit's that another unit, or a message, has too when it is to leave."""
        return sum(self.handed[n] for n in unit.holds if n in unit.hands and n not in kept_before)

    def waiting(self, unit: int, units: range) -> int:
        """Bytes of gradients that wait while the backward of a unit of these runs: of parameters that a later one has
        too, which autograd adds up.
        """
        here = {name for own in self.trained[units.start : unit + 1] for name in own}
        later = {name: size for own in self.trained[unit + 1 : units.stop] for name, size in own.items()}
        return sum(size for name, size in later.items() if name in here)


@dataclass(frozen=True, eq=False)
class OwnGraphs:
    """A `program.memory.GraphMemory`. chunks: of a rank."""

    chunks: Sequence[OwnChunk]

    def backward(self, chunk: int, unit: int, units: range) -> int:
        measured = self.chunks[chunk].units[unit]
        most = measured.backward if unit == units.stop - 1 else measured.inner
        return most + self.chunks[chunk].waiting(unit, units)
