"""What a step takes with a placement: seconds in the simulation, and the most bytes of a rank in every tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megazero.config.placement import applied
from megazero.config.schema import Run
from megazero.mpu.axes import Axes
from megazero.pipeline.stage_specs import chunks_of
from megazero.plan.bytes import StageBytes, stage_bytes
from megazero.plan.offloaded import NOTHING
from megazero.plan.rates import MachineRates
from megazero.plan.recompute import activation_plan, recompute_table
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import host_bytes, step_peak
from megazero.plan.step_times import step_times
from megazero.program.instruction import Instruction
from megazero.program.simulate import simulate
from megazero.program.times import ChunkTimes

STEPS = 3
"""Steps that are simulated: the time of the last one counts, which follows others."""

Settings = tuple[tuple[str, Any], ...]
"""Field of a run -> value, of the rows of a placement (`config.placement.ROWS`)."""


@dataclass(frozen=True)
class Peak:
    """The most bytes of a rank of some stage in its step, and the instruction at which they are there."""

    nbytes: int
    stage: int
    instruction: Instruction


@dataclass(frozen=True)
class Cluster:
    """What a placement is searched for, besides the run.

    kind  of device, cpu or cuda
    nccl  whether the run communicates through NCCL
    """

    axes: Axes
    kind: str
    nccl: bool


class Machine:
    """The walks that several placements share: where the device's memory is fullest does not depend on how much of
    the optimizer state is there, which is there all the time.
    """

    def __init__(self, run: Run, cluster: Cluster, rates: MachineRates) -> None:
        self.run, self.cluster, self.rates = run, cluster, rates
        self._walks: dict[Settings, list[tuple[Peak, int]]] = {}

    def placed(self, settings: Mapping[str, Any]) -> PlacedStep:
        """The step of the run with these settings."""
        return PlacedStep(self, tuple(settings.items()))

    def walks(self, step: PlacedStep) -> list[tuple[Peak, int]]:
        """By stage: the peak without optimizer state, and the bytes of activations in host memory."""
        key = tuple((name, value) for name, value in step.settings if name != "offload_optimizer")
        if key not in self._walks:
            self._walks[key] = [self._walk(step, stage) for stage in range(self.cluster.axes.pp)]
        return self._walks[key]

    def _walk(self, step: PlacedStep, stage: int) -> tuple[Peak, int]:
        state, kind = replace(step.states[stage], optimizer=0, elsewhere=NOTHING), self.cluster.kind
        found = step_peak(step.lists, stage, state, kind)
        return Peak(found.total, stage, found.instruction), host_bytes(step.lists, stage, kind)


@dataclass(frozen=True, eq=False)
class PlacedStep:
    """A run's step with the settings of a placement. Each number is found when it is first asked for."""

    machine: Machine
    settings: Settings

    @cached_property
    def run(self) -> Run:
        """The run with them."""
        return applied(self.machine.run, dict(self.settings))

    @cached_property
    def states(self) -> list[StageBytes]:
        """The model state of a rank of each stage."""
        return stage_bytes(self.run, self.machine.cluster.axes)

    @cached_property
    def lists(self) -> StageLists:
        return StageLists(self.run, self.machine.cluster.axes, nccl=self.machine.cluster.nccl)

    @cached_property
    def device(self) -> Peak:
        """The most bytes on a device, of all stages. On a CPU too, what has left it does not count."""
        found = [
            replace(walked, nbytes=walked.nbytes + state.optimizer)
            for (walked, _), state in zip(self.machine.walks(self), self.states, strict=True)
        ]
        return max(found, key=lambda peak: peak.nbytes)

    @cached_property
    def host(self) -> int:
        """The most bytes of a rank in host memory: state, slots, buffers of files, and activations."""
        walks = self.machine.walks(self)
        return max(state.elsewhere.memory + held for state, (_, held) in zip(self.states, walks, strict=True))

    @cached_property
    def disk(self) -> int:
        """The most bytes of a rank's swap files."""
        return max(state.elsewhere.files for state in self.states)

    @cached_property
    def times(self) -> ChunkTimes:
        """The seconds of its computations and messages."""
        axes, kind = self.machine.cluster.axes, self.machine.cluster.kind
        hidden = activation_plan(self.run, kind).hidden_bytes
        return step_times(self.run, recompute_table(self.run, axes, kind), hidden, self.machine.rates)

    @cached_property
    def least_seconds(self) -> float:
        """What no step with this much off the device falls below, without a list: each lane has its work to do."""
        chunks, rates = chunks_of(self.run), self.machine.rates
        busy = [0.0]
        for stage, state in enumerate(self.states):
            of_chunks = (self.times.forward[n] + self.times.backward[n] for n in chunks.of(stage))
            to_host, to_device, read, written, updated = state.elsewhere.moved
            busy += [sum(of_chunks) * self.lists.micro_batches, to_host / rates.to_host, to_device / rates.to_device]
            busy += [updated / rates.update_host]
            busy += [moved / rate for moved, rate in ((read, rates.read), (written, rates.write)) if rate is not None]
        return max(busy)

    @cached_property
    def seconds(self) -> float:
        """The time of a step that follows another, in the simulation."""
        steps = [self.lists.of(stage) for stage in range(self.machine.cluster.axes.pp)]
        lists, shapes = [step.instructions for step in steps], [step.shape for step in steps]
        return simulate(lists, self.times, shapes, border=steps[0].border, steps=STEPS).step
