"""The memory of a training step on a rank of every stage, by arithmetic: what --memory-trace writes before any step,
and the most bytes in every tier, on the device, in host memory and on disks.

The device's are what the step's list allocates, and the host's what has left it. On a CPU they are the same memory, and
their sum counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from megazero.config.derive import uses_files
from megazero.config.dtypes import grad_reduce_dtype, state_dtype
from megazero.config.schema import Run
from megazero.mpu.axes import Axes
from megazero.pipeline.stage_specs import chunks_of
from megazero.plan.planned_model import FAMILIES, PlannedModel, StageSizes
from megazero.plan.rank_state import StageBytes, has_nccl
from megazero.plan.step_lists import ActivationPieces, StageLists
from megazero.program.instruction import PARAMETER_LOADS, Instruction, Piece
from megazero.program.memory import MemoryColumn, StepBytes, UnitSizes
from megazero.program.memory_walk import Fullest, fullest, host_buffers, peak, spare_buffers
from megazero.program.passes.slots import slot_bytes
from megazero.program.scope import Scope, shared_scope
from megazero.program.shape import IN_FLIGHT
from megazero.program.trace import MemoryTrace, TierBytes, trace

LARGE_PAGE = 1 << 21
"""Bytes of a large page (`disk.buffers.own_pages`): Linux's on x86, and on Arm with pages of 4 KiB. A machine says its
own in /sys/kernel/mm/transparent_hugepage/hpage_pmd_size; a plan may be of a machine that is not there.
"""


@dataclass(frozen=True)
class TierPeaks:
    """The bytes of a rank of one stage.

    device  at the moment of a step with most of them, by column (`program.memory.MemoryColumn`)
    moment  that moment, in words
    host    of host memory, by what it is for. It is taken from the first step to the last
    disk    of the rank's swap files
    """

    stage: int
    device: Mapping[str, int]
    moment: str
    host: Mapping[str, int]
    disk: int

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def total_bytes(self) -> int:
        """Of both, for a CPU, where they are one memory."""
        return self.device_bytes + self.host_bytes


@dataclass(frozen=True, eq=False)
class StageMemory:
    """The memory of a rank of a stage in a training step. Each number is found when it is first asked for.

    state  the bytes of its model state
    kind   of device, cpu or cuda. It decides the body of attention, and so what attention keeps
    """

    steps: StageLists
    stage: int
    state: StageBytes
    kind: str

    @cached_property
    def activations(self) -> ActivationPieces:
        """What of its activations goes to disks."""
        return self.steps.activations(self.stage)

    @cached_property
    def _sizes(self) -> StageSizes:
        return self.steps.model.sizes(self.steps.run, self.steps.axes, self.stage, self.kind)

    @cached_property
    def _walked(self) -> tuple[tuple[Instruction, ...], Scope, StepBytes]:
        """What a walk through its list needs."""
        state, on_cpu, of_units = self.state, self.kind == "cpu", self._sizes
        instructions, scope, sizes = self._without_units
        sizes = replace(
            sizes,
            hidden=of_units.hidden,
            units=of_units.units,
            uneven=of_units.uneven,
            graphs=of_units.graphs,
            optimizer=state.optimizer,
            host=state.elsewhere.memory if on_cpu else 0,
            host_buffer=self.activations.buffer_bytes,
            copies=of_units.copies,
            feedback=state.feedback,
            logits=of_units.logits,
        )
        return instructions, scope, sizes

    @property
    def _without_units(self) -> tuple[tuple[Instruction, ...], Scope, StepBytes]:
        """The same, where units and hidden states have no bytes."""
        run, step = self.steps.run, self.steps.of(self.stage)
        gradient = state_dtype(run.optimizer.precision)
        reduced = grad_reduce_dtype(run.optimizer.precision, run.parallel.grad_reduce_dtype)
        sizes = StepBytes(
            0,
            tuple((UnitSizes(),) * len(chunk) for chunk in step.shape.units),
            in_flight=IN_FLIGHT if run.parallel.overlap else 0,
            cast=0.0 if reduced == gradient else reduced.itemsize / gradient.itemsize,
        )
        scope = shared_scope(step.shape, chunks_of(run).count, trains=True, border=step.border)
        return step.instructions, scope, sizes

    @property
    def trace(self) -> MemoryTrace:
        """The memory at each instruction of its list."""
        units = {
            (chunk, unit): words
            for chunk, names in enumerate(self.steps.model.names(self.steps.run, self.stage))
            for unit, words in enumerate(names)
        }
        return trace(rank_words(self.stage, self.steps.axes), *self._walked, units)

    @cached_property
    def fullest(self) -> Fullest:
        """The number of bytes of the peak of `trace`, and of `waiting`."""
        return fullest(*self._walked)

    @property
    def beside(self) -> int:
        """The bytes on the device all the time that `trace` and `fullest` do not have."""
        return sum(self._sizes.beside.values())

    @property
    def spare(self) -> int:
        """The bytes of the pool of spare buffers for whole gradients (`zero.storage.BufferPool`) between two steps. It
        is 0 where gradients are whole anyway.
        """
        # Under a budget of activations, units are not known before a card has tried its bodies of attention.
        return sum(spare_buffers(*self._without_units))

    @cached_property
    def waiting(self) -> int:
        """Bytes of host memory in which activations wait for their backward."""
        return sum(host_buffers(*self._walked))

    @cached_property
    def unused_slots(self) -> int:
        """The bytes of slots of host memory that its list fills with nothing: a slot is as large as the largest part,
        and there may be more slots than parts. Memory that disks read into has large pages, each of which is there as a
        whole.
        """
        shape, filled = self.steps.of(self.stage).shape, dict[tuple[bool, int, Piece], int]()
        sizes = slot_bytes(shape)
        for i in self.steps.of(self.stage).instructions:
            if i.slot < 0 or i.part < 0:
                continue
            loads, part = i.op in PARAMETER_LOADS, shape.buckets[i.buckets[0]].parts[i.part]
            for piece, size in (sizes.loads if loads else sizes.updates).items():
                key = loads, i.slot, piece
                filled[key] = max(filled.get(key, 0), min(size, part.bytes_of(piece)))
        page = LARGE_PAGE if uses_files(self.steps.run) else 1
        touched = (
            min((sizes.loads if loads else sizes.updates)[piece], math.ceil(nbytes / page) * page)
            for (loads, _, piece), nbytes in filled.items()
        )
        return max(0, self.state.elsewhere.slots - sum(touched))

    @property
    def resting(self) -> TierBytes:
        """What lies in host memory and in files all the time: state, slots, and buffers of the files."""
        off, pieces = self.state.elsewhere, self.activations
        return TierBytes(0, off.memory + pieces.buffers, off.files + pieces.files)

    @cached_property
    def peaks(self) -> TierPeaks:
        """The most bytes in every tier."""
        fullest_moment, off = peak(*self._walked, spare_buffers(*self._walked)), self.state.elsewhere
        # on a CPU the walk counts them, as host memory is the device's: here they are the host's
        elsewhere = MemoryColumn.OFFLOADED, MemoryColumn.HOST
        host = {
            "model state": off.host,
            "model state on its way": off.slots,
            "buffers of the swap files": off.buffers + self.activations.buffers,
            "activations": self.waiting if self.steps.run.offload.offload_activations else 0,
        }
        return TierPeaks(
            self.stage,
            {
                **{column.value: size for column, size in fullest_moment.columns.items() if column not in elsewhere},
                **self._sizes.beside,
            },
            f"number {fullest_moment.number} of its list, {fullest_moment.instruction}",
            {what: size for what, size in host.items() if size},
            self.resting.disk,
        )


def stage_memories(steps: StageLists, kind: str) -> list[StageMemory]:
    """The memory of a rank of each stage."""
    states = (steps.model.state(steps.run, steps.axes, stage).bytes for stage in range(steps.axes.pp))
    return [StageMemory(steps, stage, state, kind) for stage, state in enumerate(states)]


@cache
def run_memories(run: Run, axes: Axes, kind: str, model: PlannedModel = FAMILIES) -> list[StageMemory]:
    """The same of a run of a model, once for all who ask: of long lists peaks can take seconds."""
    return stage_memories(StageLists(run, axes, nccl=has_nccl(run.parallel, axes), model=model), kind)


def run_peaks(run: Run, axes: Axes, kind: str) -> list[TierPeaks]:
    """The peaks of each stage of a run. Raises ConfigError as `plan.recompute.recompute_table` does."""
    return [stage.peaks for stage in run_memories(run, axes, kind)]


def rank_of(stage: int, stages: int) -> str:
    """Whose memory it is, where the number of stages is told beside it."""
    return f"a rank of stage {stage}" if stages > 1 else "a rank"


def rank_words(stage: int, axes: Axes) -> str:
    """Whose memory it is, with the number of stages."""
    return rank_of(stage, axes.pp) + f" of {axes.pp}" * (axes.pp > 1)
