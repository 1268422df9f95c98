"""What a step takes with a placement: seconds in the simulation, and the most bytes of a rank in every tier."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from megazero.config.placement import applied, as_flags
from megazero.config.schema import Run
from megazero.config.validate import problems_of
from megazero.mpu.axes import Axes
from megazero.pipeline.stage_specs import chunks_of
from megazero.plan.planned_model import FAMILIES, PlannedModel
from megazero.plan.rank_state import NOTHING, RankState, StageBytes
from megazero.plan.step_lists import StageLists, buffer_problems
from megazero.plan.step_memory import StageMemory
from megazero.plan.traffic import least_moved
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


class TimeModel(Protocol):
    """What turns a run into seconds."""

    @property
    def has_disks(self) -> bool:
        """Whether anything may rest on disks."""
        ...

    def times(self, run: Run, axes: Axes, kind: str) -> ChunkTimes:
        """The times of a rank's step in seconds. kind: of device, cpu or cuda."""
        ...


@dataclass(frozen=True, eq=False)
class Machine:
    """What a placement is searched for, and what several placements share: where the device's memory is fullest does
    not depend on how much of the optimizer state is there, which is there all the time.

    kind  of device, cpu or cuda
    rates of one machine, or of a cluster
    nccl  whether the run communicates through NCCL
    model whose run it is
    """

    run: Run
    axes: Axes
    kind: str
    rates: TimeModel
    nccl: bool = field(kw_only=True)
    model: PlannedModel = field(kw_only=True, default=FAMILIES)
    _known: dict[tuple[str, Settings], list[Any]] = field(default_factory=dict, init=False, repr=False)

    def placed(self, settings: Mapping[str, Any]) -> PlacedStep:
        """The step of the run with these settings."""
        return PlacedStep(self, tuple(settings.items()))

    def problems(self, run: Run) -> Sequence[str]:
        """Why a run with settings of a placement cannot be. Raises ConfigError as `StageLists` does."""
        return [*problems_of(run, self.axes.world_size), *buffer_problems(run, self.axes, self.kind)]

    def _state(self, run: Run, stage: int) -> RankState:
        return self.model.state(run, self.axes, stage)

    def states(self, step: PlacedStep) -> list[StageBytes]:
        """The model state of a rank of each stage, which no setting in `NO_STATE` changes."""
        stages = range(self.axes.pp)
        return self._once(
            "states", step.without(NO_STATE), lambda: [self._state(step.run, stage).bytes for stage in stages]
        )

    def moved(self, step: PlacedStep) -> list[dict[Lane, int]]:
        """The least bytes of model state that a rank of each stage moves in a step, by lane."""
        states = (self._state(step.run, stage) for stage in range(self.axes.pp))
        return self._once("moved", step.without(NO_STATE), lambda: [least_moved(state.shape) for state in states])

    def walks(self, step: PlacedStep) -> list[Walked]:
        """By stage what a walk through its list finds. It does not depend on the share of the optimizer state that is
        away, but where an update on the device has to fetch its gradients.
        """
        settings = step.settings if step.fetches else step.without(("offload_optimizer",))
        stages = range(self.axes.pp)
        return self._once("walks", settings, lambda: [self._walk(step, stage) for stage in stages])

    def _once(self, what: str, settings: Settings, found: Callable[[], list[Any]]) -> list[Any]:
        """What is found for these settings, at the first time."""
        if (what, settings) not in self._known:
            self._known[what, settings] = found()
        return self._known[what, settings]

    def _walk(self, step: PlacedStep, stage: int) -> Walked:
        # without optimizer state, which is there all the time, one walk serves all shares: `device` adds the state
        state = replace(step.states[stage], optimizer=0, elsewhere=NOTHING)
        memory = StageMemory(step.lists, stage, state, self.kind)
        fullest, resting = memory.fullest, memory.resting
        return Walked(
            Peak(fullest.nbytes + memory.beside, stage, fullest.instruction), fullest.host + resting.host, resting.disk
        )


@dataclass(frozen=True, eq=False)
class PlacedStep:
    """A run's step with the settings of a placement. Each number is found when it is first asked for."""

    machine: Machine
    settings: Settings

    def without(self, names: Collection[str]) -> Settings:
        """Its settings but for some."""
        return tuple((name, value) for name, value in self.settings if name not in names)

    @property
    def flags(self) -> str:
        """The flags that give its settings; empty where all are the defaults."""
        return as_flags(dict(self.settings))

    @cached_property
    def run(self) -> Run:
        """The run with its settings."""
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

    @property
    def _stages(self) -> Iterator[tuple[StageBytes, Walked]]:
        """By stage the model state of a rank, and what a walk through its list finds."""
        return zip(self.states, self.machine.walks(self), strict=True)

    @cached_property
    def lists(self) -> StageLists:
        return StageLists(self.run, self.machine.axes, nccl=self.machine.nccl, model=self.machine.model)

    @cached_property
    def device(self) -> Peak:
        """The most bytes on a device, of all stages. On a CPU too, what has left it does not count."""
        peaks = [replace(walked.peak, nbytes=walked.peak.nbytes + state.optimizer) for state, walked in self._stages]
        return max(peaks, key=lambda peak: peak.nbytes)

    def least_share(self, limit: int) -> int:
        """About the hundredths of the optimizer state that have to be away, so that a device holds at most `limit`
        bytes, if all else stays as it is with these settings.
        """
        share = 1
        for state, walked in self._stages:
            room, whole = limit - walked.peak.nbytes, state.optimizer + sum(state.elsewhere.optimizer)
            share = max(share, math.ceil(100 * (1 - room / whole))) if whole else share
        return min(share, 100)

    @cached_property
    def host_bytes(self) -> int:
        """The most bytes of a rank in host memory: state, slots, buffers of files, and activations."""
        return max(state.elsewhere.memory + walked.host for state, walked in self._stages)

    @property
    def device_bytes(self) -> int:
        return self.device.nbytes

    @cached_property
    def disk(self) -> int:
        """The most bytes of a rank's swap files."""
        return max(state.elsewhere.files + walked.files for state, walked in self._stages)

    @cached_property
    def times(self) -> ChunkTimes:
        """The seconds of its computations and messages."""
        return self.machine.rates.times(self.run, self.machine.axes, self.machine.kind)

    @property
    def computing(self) -> list[float]:
        """By stage the seconds of a step's forwards and backwards."""
        chunks, times, stages = chunks_of(self.run), self.times, range(self.machine.axes.pp)
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
        steps = [self.lists.of(stage) for stage in range(self.machine.axes.pp)]
        lists, shapes = [step.instructions for step in steps], [step.shape for step in steps]
        return step_time(lists, self.times, shapes, steps[0].border, STEPS)
