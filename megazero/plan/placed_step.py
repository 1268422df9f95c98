"""What a step takes with a placement: seconds in the simulation, and the most bytes of a rank in every tier."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from megazero.config.placement import applied
from megazero.config.schema import Run
from megazero.mpu.axes import Axes
from megazero.pipeline.stage_specs import chunks_of
from megazero.plan.bytes import StageBytes, stage_bytes, stage_shape
from megazero.plan.offloaded import NOTHING, least_moved
from megazero.plan.rates import MachineRates
from megazero.plan.step_lists import StageLists, activation_pieces
from megazero.plan.step_memory import step_fullest
from megazero.plan.step_times import step_times
from megazero.program.instruction import Instruction, Lane
from megazero.program.simulate import step_time
from megazero.program.simulated_rank import SHARED_LANES
from megazero.program.times import ChunkTimes

STEPS = 3
"""Steps that are simulated: the time of the last one counts, which follows others."""

NO_STATE = ("offload_activations", "late_update", "micro_batch_order", "vertical_group_size")
"""Settings of a placement that change nothing in what a rank's model state is."""

Settings = tuple[tuple[str, Any], ...]
"""Field of a run -> value, of the rows of a placement (`config.placement.ROWS`)."""


@dataclass(frozen=True)
class Peak:
    """The most bytes of a rank of some stage in its step, and the instruction at which they are there."""

    nbytes: int
    stage: int
    instruction: Instruction


class Walked(NamedTuple):
    """Of a rank: its peak without optimizer state, and the bytes of activations in host memory and in swap files."""

    peak: Peak
    host: int
    files: int


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
        self._walks: dict[Settings, list[Walked]] = {}
        self._states: dict[Settings, list[StageBytes]] = {}
        self._moved: dict[Settings, list[dict[Lane, int]]] = {}

    def placed(self, settings: Mapping[str, Any]) -> PlacedStep:
        """The step of the run with these settings."""
        return PlacedStep(self, tuple(settings.items()))

    def states(self, step: PlacedStep) -> list[StageBytes]:
        """The model state of a rank of each stage, which no setting in `NO_STATE` changes."""
        key = step.without(NO_STATE)
        if key not in self._states:
            self._states[key] = stage_bytes(step.run, self.cluster.axes)
        return self._states[key]

    def moved(self, step: PlacedStep) -> list[dict[Lane, int]]:
        """The least bytes of model state that a rank of each stage moves in a step, by lane."""
        key, axes = step.without(NO_STATE), self.cluster.axes
        if key not in self._moved:
            self._moved[key] = [least_moved(stage_shape(step.run, axes, stage)) for stage in range(axes.pp)]
        return self._moved[key]

    def walks(self, step: PlacedStep) -> list[Walked]:
        """By stage what a walk through its list finds. It does not depend on the share of the optimizer state that is
        away, but where an update on the device has to fetch its gradients.
        """
        key = step.settings if step.fetches else step.without(("offload_optimizer",))
        if key not in self._walks:
            self._walks[key] = [self._walk(step, stage) for stage in range(self.cluster.axes.pp)]
        return self._walks[key]

    def _walk(self, step: PlacedStep, stage: int) -> Walked:
        # without optimizer state, which is there all the time, one walk serves all shares: `device` adds the state
        state, kind = replace(step.states[stage], optimizer=0, elsewhere=NOTHING), self.cluster.kind
        fullest, pieces = step_fullest(step.lists, stage, state, kind), activation_pieces(step.lists.of(stage))
        files = pieces.file_bytes(len(self.run.offload.nvme_path))
        return Walked(Peak(fullest.nbytes, stage, fullest.instruction), fullest.host + pieces.buffers, files)


@dataclass(frozen=True, eq=False)
class PlacedStep:
    """A run's step with the settings of a placement. Each number is found when it is first asked for."""

    machine: Machine
    settings: Settings

    def without(self, names: Collection[str]) -> Settings:
        """Its settings but for some."""
        return tuple((name, value) for name, value in self.settings if name not in names)

    @cached_property
    def run(self) -> Run:
        """The run with them."""
        return applied(self.machine.run, dict(self.settings))

    @property
    def fetches(self) -> bool:
        """Whether gradients leave the device, and some of the optimizer state does not."""
        optimizer = self.run.offload.offload_optimizer
        stays = not optimizer or optimizer.share < 1
        return stays and bool(self.run.offload.offload_gradients)

    @cached_property
    def states(self) -> list[StageBytes]:
        """The model state of a rank of each stage."""
        return self.machine.states(self)

    @cached_property
    def lists(self) -> StageLists:
        return StageLists(self.run, self.machine.cluster.axes, nccl=self.machine.cluster.nccl)

    @cached_property
    def device(self) -> Peak:
        """The most bytes on a device, of all stages. On a CPU too, what has left it does not count."""
        peaks = [
            replace(walked.peak, nbytes=walked.peak.nbytes + state.optimizer)
            for walked, state in zip(self.machine.walks(self), self.states, strict=True)
        ]
        return max(peaks, key=lambda peak: peak.nbytes)

    def least_share(self, limit: int) -> int:
        """About the hundredths of the optimizer state that have to be away, so that a device holds at most `limit`
        bytes, if all else stays as it is with these settings.
        """
        share = 1
        for walked, state in zip(self.machine.walks(self), self.states, strict=True):
            room, whole = limit - walked.peak.nbytes, state.optimizer + sum(state.elsewhere.optimizer)
            share = max(share, math.ceil(100 * (1 - room / whole))) if whole else share
        return min(share, 100)

    @cached_property
    def host(self) -> int:
        """The most bytes of a rank in host memory: state, slots, buffers of files, and activations."""
        walks = zip(self.states, self.machine.walks(self), strict=True)
        return max(state.elsewhere.memory + walked.host for state, walked in walks)

    @property
    def device_bytes(self) -> int:
        return self.device.nbytes

    @property
    def host_bytes(self) -> int:
        return self.host

    @cached_property
    def disk(self) -> int:
        """The most bytes of a rank's swap files."""
        walks = zip(self.states, self.machine.walks(self), strict=True)
        return max(state.elsewhere.files + walked.files for state, walked in walks)

    @cached_property
    def times(self) -> ChunkTimes:
        """The seconds of its computations and messages."""
        return step_times(self.run, self.machine.cluster.axes, self.machine.cluster.kind, self.machine.rates)

    @property
    def computing(self) -> list[float]:
        """By stage the seconds of a step's forwards and backwards."""
        chunks, times, stages = chunks_of(self.run), self.times, range(self.machine.cluster.axes.pp)
        once = [sum(times.forward[n] + times.backward[n] for n in chunks.of(stage)) for stage in stages]
        return [seconds * self.lists.micro_batches for seconds in once]

    @property
    def computed(self) -> float:
        """The seconds in which the busiest stage computes."""
        return max(self.computing)

    @cached_property
    def least_seconds(self) -> float:
        """What no step with this much off the device falls below, without a list: each lane has its work to do."""
        times, busy = self.times, self.computing
        for computed, moved in zip(tuple(busy), self.machine.moved(self), strict=True):
            lanes = {lane: nbytes * times.per_byte[lane] for lane, nbytes in moved.items()}
            busy += lanes.values()
            if not times.beside:  # one after the other
                busy.append(computed + sum(seconds for lane, seconds in lanes.items() if lane in SHARED_LANES))
        return max(busy)

    @cached_property
    def seconds(self) -> float:
        """The time of a step that follows another, in the simulation."""
        steps = [self.lists.of(stage) for stage in range(self.machine.cluster.axes.pp)]
        lists, shapes = [step.instructions for step in steps], [step.shape for step in steps]
        return step_time(lists, self.times, shapes, steps[0].border, STEPS)
