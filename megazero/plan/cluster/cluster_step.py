"""A run's step on a cluster: its seconds in the simulation, and the bytes of its fullest ranks beside a device's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megazero.config.derive import gathers_parameters
from megazero.config.inventory import parameters
from megazero.config.schema import Run
from megazero.mpu.axes import Axes, axes_of
from megazero.pipeline.schedule import ChunkMap
from megazero.pipeline.stage_specs import chunks_of
from megazero.plan.budgets import keeps_all
from megazero.plan.cluster.beside_tensors import Allowance, allowance_of_run
from megazero.plan.cluster.cluster_times import ClusterRates
from megazero.plan.cluster.hardware import Cluster
from megazero.plan.cluster.least_memory import SPLIT, equal_stages
from megazero.plan.flops import recomputed_flops, step_flops, trained_parameters
from megazero.plan.rank_state import has_nccl, micro_batches_of, stage_state
from megazero.plan.recompute import recompute_table
from megazero.plan.search import SearchLimits
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import StageMemory, TierPeaks
from megazero.plan.traffic import run_traffic
from megazero.program.instruction import Instruction, Lane
from megazero.program.shape import RankShape
from megazero.program.simulate import SimulationReport, simulate, step_ends
from megazero.program.times import ChunkTimes

FILLINGS = 2
"""So often the micro-batches of a short step fill the pipeline, at least."""
STEPS = 2
"""Steps that are simulated: the time of the last one counts, which follows another."""


class TakenBytes(NamedTuple):
    """The most bytes of a rank in every tier."""

    device_bytes: int
    host_bytes: int
    disk: int


@dataclass(frozen=True, eq=False)
class ClusterStep:
    """A step of a run on a cluster. Each number is found when it is first asked for.

    The run knows its vocabulary and its device, and is legal on so many ranks.
    """

    run: Run
    cluster: Cluster

    @cached_property
    def axes(self) -> Axes:
        return axes_of(self.run, self.cluster.gpus)

    @property
    def kind(self) -> str:
        return self.cluster.device.kind

    @property
    def micro_batches(self) -> int:
        return micro_batches_of(self.run, self.axes)

    @cached_property
    def allowance(self) -> Allowance:
        return allowance_of_run(self.cluster.device, self.run, self.axes)

    @cached_property
    def limits(self) -> SearchLimits:
        """What a rank may take."""
        device = self.cluster.device
        room = self.allowance.room(device.memory)
        if self.kind == "cpu":
            return SearchLimits(memory=room, is_one=True)
        return SearchLimits(device=room, host=int(device.host_memory))

    @cached_property
    def _lists(self) -> StageLists:
        """Of a short step: its micro-batches fill the pipeline, empty it and fill it again, so that a rank never holds
        more of them in the whole step.
        """
        return self._lists_of(self._few)

    def _lists_of(self, micro_batches: int) -> StageLists:
        schedule = self.run.schedule
        batch = micro_batches * schedule.micro_batch_size * self.axes.dp
        run = replace(self.run, schedule=replace(schedule, global_batch_size=batch))
        return StageLists(run, self.axes, nccl=self._nccl)

    @property
    def _nccl(self) -> bool:
        return has_nccl(self.run.parallel, self.axes)

    @cached_property
    def alike(self) -> Mapping[int, range]:
        """The stages by the first of equal ones, which holds most."""
        return equal_stages(self.run)

    @cached_property
    def _known(self) -> dict[int, StageMemory]:
        return {}

    def memory(self, stage: int) -> StageMemory:
        """The memory of a rank of a stage."""
        if stage not in self._known:
            state = stage_state(self._lists.run, self.axes, stage).bytes
            self._known[stage] = StageMemory(self._lists, stage, state, self.kind)
        return self._known[stage]

    @cached_property
    def _taken(self) -> dict[int, TakenBytes]:
        return {}

    def taken(self, stage: int) -> TakenBytes:
        """The most bytes of a rank of a stage in every tier."""
        if stage not in self._taken:
            memory = self.memory(stage)
            fullest, resting = memory.fullest, memory.resting
            # where the two are one memory, the walk has counted what rests in the host's as well
            device = fullest.nbytes - resting.host * self.limits.is_one
            self._taken[stage] = TakenBytes(device, fullest.host + resting.host, resting.disk)
        return self._taken[stage]

    @cached_property
    def fits(self) -> bool:
        """Whether the fullest rank of each tier fits. A step that does not is not looked at to its end."""
        return all(self.limits.hold(self.taken(stage)) for stage in self.alike)

    @property
    def peaks(self) -> list[TierPeaks]:
        """The fullest moment of the first of equal stages, and what is alive then."""
        return [self.memory(stage).peaks for stage in self.alike]

    @cached_property
    def tensors(self) -> int:
        """The most bytes of a step's tensors on a rank, in host memory too where it is the device's."""
        return max(taken.device_bytes + taken.host_bytes * self.limits.is_one for taken in self._all_taken)

    @property
    def _all_taken(self) -> list[TakenBytes]:
        return [self.taken(stage) for stage in self.alike]

    @property
    def memory_bytes(self) -> int:
        """The bytes of the fullest rank, with the allowance of the device."""
        return self.allowance.of(self.tensors)

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory of the rank that takes most of it."""
        return max(taken.host_bytes for taken in self._all_taken)

    @cached_property
    def times(self) -> ChunkTimes:
        return ClusterRates(self.cluster).times(self.run, self.axes, self.kind)

    @cached_property
    def least_seconds(self) -> float:
        """What the step never falls below: `least_step` of its times, and its messages on model state."""
        split = self.run.parallel.pipeline_schedule in SPLIT
        computed = least_step(self.times, chunks_of(self.run), self.micro_batches, split=split)
        return max(computed, least_messages(self.run, self.axes, self.times.per_byte))

    @property
    def _repeated(self) -> int:
        """How often the last filling of the pipeline in a short step is repeated in the whole step."""
        if keeps_all(self.run):
            return 0
        return max(0, self.micro_batches // self.axes.pp - FILLINGS)

    @property
    def _few(self) -> int:
        """Micro-batches of a short step."""
        return self.micro_batches - self._repeated * self.axes.pp

    @cached_property
    def simulated(self) -> SimulationReport:
        """All stages through their whole lists once."""
        lists = self._lists_of(self.micro_batches)
        return simulate(*self._simulation(lists), border=lists.of(0).border)

    @cached_property
    def short(self) -> SimulationReport:
        """All stages through the lists of a short step, or of the whole one if it has no more micro-batches."""
        return simulate(*self._simulation(self._lists), border=self._lists.of(0).border)

    def _simulation(self, lists: StageLists) -> tuple[list[tuple[Instruction, ...]], ChunkTimes, list[RankShape]]:
        """What a simulation takes of lists."""
        stages = [lists.of(stage) for stage in range(self.axes.pp)]
        return [stage.instructions for stage in stages], self.times, [stage.shape for stage in stages]

    def _ends(self, lists: StageLists, steps: int) -> tuple[float, ...]:
        """When each of several steps ends."""
        return step_ends(*self._simulation(lists), lists.of(0).border, steps)

    @property
    def work(self) -> list[float]:
        """By stage the seconds in which it computes a micro-batch."""
        chunks, times = chunks_of(self.run), self.times
        return [sum(times.forward[n] + times.backward[n] for n in chunks.of(stage)) for stage in range(self.axes.pp)]

    @cached_property
    def _short_ends(self) -> tuple[float, ...]:
        """Of short steps. The second one begins with what the first has left: gathers of updated parameters."""
        return self._ends(self._lists, STEPS)

    @property
    def _short_seconds(self) -> float:
        return self._short_ends[-1] - self._short_ends[-2]

    @property
    def short_seconds(self) -> float:
        """What the step never falls below where it repeats itself: a short step, and the work of the busiest stage for
        the other micro-batches.
        """
        return self._short_seconds + self._repeated * self.axes.pp * self._busiest

    @property
    def _busiest(self) -> float:
        """Seconds of a micro-batch on the busiest stage; of the mean of stages that share processors, at least."""
        return max(max(self.work) * self.times.alone(self.axes.pp), sum(self.work) / self.axes.pp)

    @cached_property
    def seconds(self) -> float:
        """The time of a step that follows another. Between its first and its last micro-batches a step repeats itself
        with each filling of the pipeline, so that two short steps say how long the whole one takes. Where it hardly
        waits, the shorter one may wait more than its share.
        """
        if not self._repeated:
            return self._short_seconds
        fewer = self._ends(self._lists_of(self._few - self.axes.pp), 1)
        return max(self.short_seconds, self._short_seconds + self._repeated * (self._short_ends[0] - fewer[0]))

    @property
    def model_flops(self) -> float:
        """Operations of a step over all ranks, without what is computed again."""
        return step_flops(self.run) * self.run.schedule.global_batch_size

    @property
    def hardware_flops(self) -> float:
        """The same with what is computed again."""
        table, samples = recompute_table(self.run, self.axes, self.kind), self.run.schedule.global_batch_size
        return self.model_flops + recomputed_flops(self.run.model, samples, table)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: of what the devices could compute, the share that the model needs."""
        peak = self.cluster.device.flops[self.run.optimizer.precision] * self.cluster.gpus
        return self.model_flops / (self.seconds * peak)

    @property
    def tokens_per_second(self) -> float:
        return self.run.schedule.global_batch_size * self.run.model.seq_length / self.seconds


def least_step(times: ChunkTimes, chunks: ChunkMap, micro_batches: int, *, split: bool) -> float:
    """A time that no step of these chunks falls below, whatever the order of its computations.

    A stage computes its chunks for all micro-batches one after the other. Before its first computation the chunks in
    front of its first one have computed a forward, each after the other, and behind its last one these chunks compute a
    backward, with a message from stage to stage. Where the weights' part of a backward is apart (split), that may be a
    stage's last computation, and nothing has to follow.
    """

    alone = times.alone(chunks.stages)

    def least(stage: int) -> float:
        numbers = list(chunks.of(stage))
        work = micro_batches * sum(times.forward[n] + times.backward[n] for n in numbers)
        before = range(min(numbers))
        reach = sum(times.forward[n] for n in before)
        back = 0.0 if split else sum(times.backward[n] for n in before)
        messages = times.message * len(before) * (1 if split else 2)
        return alone * (work + reach + back) + messages

    return max(least(stage) for stage in range(chunks.stages))


TURNS = 4
"""Units that a rank keeps gathered, at most, where a micro-batch turns back, and where the next one follows."""


IN_CHUNKS = 0.75
"""The share of its messages that a list with several chunks on a rank sends at least: some of them bring a bucket for
two chunks.
"""


def least_messages(run: Run, axes: Axes, per_byte: Mapping[Lane, float]) -> float:
    """Seconds in which the messages on the model state of some stage pass their lanes, at least: an even share of the
    parameters that tp divides.
    """
    traffic = run_traffic(run, axes)
    inside, units = traffic.inside, run.model.num_layers / axes.pp
    if gathers_parameters(run):
        inside *= max(0.0, 1 - TURNS / (2 * units))
    if run.parallel.virtual_stages > 1:
        inside *= IN_CHUNKS
    share = (parameters(run.model) if run.lora.lora_rank is None else trained_parameters(run)) / (axes.tp * axes.pp)
    return share * (inside * per_byte[Lane.SHARDS] + traffic.across * per_byte[Lane.ACROSS])
