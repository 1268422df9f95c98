"""A run's step on a cluster: its seconds in the simulation, and the bytes of its fullest ranks beside a device's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import mul
from typing import NamedTuple

from megazero.config.derive import NONE as STORED
from megazero.config.derive import keeps_account, micro_batch_order, pipeline_schedule
from megazero.config.schema import Run
from megazero.mpu.axes import Axes, axes_of
from megazero.pipeline.stage_specs import chunks_of, specs_of_stage
from megazero.plan.activations import moments
from megazero.plan.cluster.beside_tensors import BESIDE, Allowance, allowance_of_run
from megazero.plan.cluster.cluster_times import ClusterRates
from megazero.plan.cluster.hardware import Cluster
from megazero.plan.cluster.least_memory import FILLINGS, SPLIT, full_step, fullest_stages, schedule_orders, short_step
from megazero.plan.cluster.least_seconds import largest_update, least_messages, least_step, state_delays
from megazero.plan.cluster.programs import OURS, Program
from megazero.plan.flops import recomputed_flops, step_flops
from megazero.plan.rank_state import has_nccl, micro_batches_of, stage_state
from megazero.plan.recompute import activation_plan, instructions_of, recompute_table
from megazero.plan.search import SearchLimits
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import StageMemory, TierPeaks
from megazero.program.instruction import UPDATE, Instruction
from megazero.program.schedule_time import NONE, ScheduleGraph, StateDelays
from megazero.program.shape import RankShape
from megazero.program.simulate import SimulationReport, simulate, step_ends
from megazero.program.times import ChunkTimes
from megazero.program.traffic import updated_bytes
from megazero.system.host_memory import KEPT_HOLES

STEPS = 2
"""Steps that are simulated: the time of the last one counts, which follows another."""
BY_PROGRAM = "program"
"""What a program other than ours keeps, in a table of what is alive."""
LONG = 20_000
"""Computations of all stages up to which the schedule of a step is looked at to its end."""


@lru_cache(maxsize=512)
def schedule_graph(name: str, stages: int, micro_batches: int, virtual_stages: int) -> ScheduleGraph:
    """The computations of a schedule: many layouts of a search have the same."""
    orders, chunks = schedule_orders(name, stages, micro_batches, virtual_stages)
    return ScheduleGraph.of(orders, [chunks.of(stage) for stage in range(stages)])


class TakenBytes(NamedTuple):
    """The most bytes of a rank in every tier."""

    device_bytes: int
    host_bytes: int
    disk: int


@dataclass(frozen=True, eq=False)
class ClusterStep:
    """A step of a run on a cluster. Each number is found when it is first asked for.

    The run knows its vocabulary and its device, and is legal on so many ranks.

    program  which runs it
    """

    run: Run
    cluster: Cluster
    program: Program = OURS

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
        return allowance_of_run(self.cluster, self.run, self.axes)

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
        """Of a step in which a rank holds as much as in the whole one. On a CPU, which slots of host memory have pages
        depends on all micro-batches.
        """
        needs_all = self.kind == "cpu" and keeps_account(self.run)
        return self._lists_of(self.micro_batches if needs_all else full_step(self.run, self.axes))

    def _lists_of(self, micro_batches: int) -> StageLists:
        return self._whole_lists.with_micro_batches(micro_batches)

    @cached_property
    def _whole_lists(self) -> StageLists:
        return StageLists(self.run, self.axes, nccl=has_nccl(self.run.parallel, self.axes))

    @cached_property
    def alike(self) -> Mapping[int, range]:
        """The stages by the first of equal ones, which holds most."""
        return fullest_stages(self.run)

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
            added = self._added(stage) + self._kept_by_program(stage)
            taken = device + added, fullest.host + resting.host, resting.disk
            self._taken[stage] = TakenBytes(*taken)
        return self._taken[stage]

    def _added(self, stage: int) -> int:
        """What the memory of a process has beside a rank's tensors for how they lie there: holes in its heap, and slots
        that no page was made for. A run that keeps something on disks returns what is above all of its tensors, or
        above a part more than what stays then. 0 but on a CPU.
        """
        if not self.limits.is_one:
            return 0
        memory = self.memory(stage)
        holes, unused = round(self.allowance.holes * memory.fullest.passing), memory.unused_slots
        if keeps_account(self.run):
            holes = min(holes, unused + round(KEPT_HOLES * (memory.fullest.nbytes + self.allowance.fixed)))
        return holes - unused

    def _kept_by_program(self, stage: int) -> int:
        """The bytes that a program other than ours keeps beside a rank's tensors."""
        if self.program == OURS:
            return 0
        run, specs = self.run, specs_of_stage(self.run, stage)
        alive = [moment.live for moment in moments(instructions_of(run, self.axes, stage), len(specs))]
        table = recompute_table(run, self.axes, self.kind)
        whole = [sum(table[number] == STORED for number in spec.blocks) for spec in specs]
        heads, length = run.model.num_attention_heads // run.parallel.tp, run.model.seq_length
        scores = heads * length**2 * run.schedule.micro_batch_size * (run.model.attention_dropout > 0)
        return self.program.more(
            self.memory(stage).state.parameters,
            scores * max(sum(map(mul, live, whole)) for live in alive),
            activation_plan(run, self.kind).hidden_bytes * max(map(sum, alive)) * (self.axes.pp > 1),
        )

    def has_room(self, stage: int) -> bool:
        """Whether a rank of a stage fits."""
        return self.limits.hold(self.taken(stage))

    @cached_property
    def fits(self) -> bool:
        """Whether the fullest rank of each tier fits. A step that does not is not looked at to its end."""
        return all(map(self.has_room, self.alike))

    @property
    def peaks(self) -> list[TierPeaks]:
        """The fullest moment of the first of equal stages, and what is alive then, with what is beside tensors."""
        return [self._with_allowance(stage) for stage in self.alike]

    def _with_allowance(self, stage: int) -> TierPeaks:
        peaks, added, kept = self.memory(stage).peaks, self._added(stage), self._kept_by_program(stage)
        if kept:
            peaks = replace(peaks, device={**peaks.device, BY_PROGRAM: kept})
        tensors = peaks.total_bytes if self.limits.is_one else peaks.device_bytes
        beside = self.allowance.of(tensors + added) - tensors
        return replace(peaks, device={**peaks.device, BESIDE: beside}) if beside else peaks

    @property
    def passing(self) -> int:
        """Of the bytes of the fullest rank those that come and go in a step."""
        return self.memory(max(self.alike, key=self.tensors_of)).fullest.passing

    @cached_property
    def tensors(self) -> int:
        """The most bytes of a step's tensors on a rank, on a CPU with the holes between them."""
        return max(map(self.tensors_of, self.alike))

    def tensors_of(self, stage: int) -> int:
        """The same of a rank of a stage, in host memory too where it is the device's."""
        taken = self.taken(stage)
        return taken.device_bytes + taken.host_bytes * self.limits.is_one

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

    @property
    def rates(self) -> ClusterRates:
        return ClusterRates(self.cluster, self.program)

    @cached_property
    def times(self) -> ChunkTimes:
        return self.rates.times(self.run, self.axes, self.kind)

    @cached_property
    def least_seconds(self) -> float:
        """What the step never falls below: `least_step` of its times, and its messages on model state."""
        split = pipeline_schedule(self.run.parallel) in SPLIT
        computed = least_step(self._alone, chunks_of(self.run), self.micro_batches, split=split)
        return max(computed, least_messages(self.run, self.axes, self.times.per_byte))

    @cached_property
    def _alone(self) -> ChunkTimes:
        """The times, where stages share processors those of one that does not wait for the others."""
        return self.times.alone(self.axes.pp)

    def _short(self, fillings: int) -> int:
        return short_step(self.run, self.axes, fillings)

    @property
    def work(self) -> list[float]:
        """By stage the seconds in which it computes a micro-batch."""
        return self._work(self.times)

    def _work(self, times: ChunkTimes) -> list[float]:
        chunks = chunks_of(self.run)
        return [sum(times.forward[n] + times.backward[n] for n in chunks.of(stage)) for stage in range(self.axes.pp)]

    @cached_property
    def scheduled_least(self) -> float:
        """What the step never falls below: its schedule with few micro-batches, and the work of the busiest stage for
        the others.
        """
        few, state = self._short(FILLINGS), state_delays(self.run, self.axes, self.times)
        return self._scheduled(few, state) + (self.micro_batches - few) * max(self._work(self._alone))

    @cached_property
    def scheduled(self) -> float:
        """Seconds of the schedule of all micro-batches, without messages on model state. The middle of a long step
        repeats itself with each filling of the pipeline.
        """
        p = self.run.parallel
        many = self._short(max(FILLINGS, LONG // (2 * p.pp * p.pp * p.virtual_stages)))
        seconds = self._scheduled(many)
        if many == self.micro_batches:
            return seconds
        return seconds + (self.micro_batches - many) / p.pp * (seconds - self._scheduled(many - p.pp))

    def _scheduled(self, micro_batches: int, state: StateDelays = NONE) -> float:
        """The same of so many micro-batches, with these messages; 0 in an order that is not the schedule's own."""
        p = self.run.parallel
        if micro_batch_order(self.run) == "vertical":
            return 0.0
        return schedule_graph(pipeline_schedule(p), p.pp, micro_batches, p.virtual_stages).seconds(self._alone, state)

    @cached_property
    def simulated(self) -> SimulationReport:
        """All stages through their whole lists once."""
        lists = self._lists_of(self.micro_batches)
        return simulate(*self._simulation(lists), border=lists.of(0).border)

    def _simulation(self, lists: StageLists) -> tuple[list[tuple[Instruction, ...]], ChunkTimes, list[RankShape]]:
        """What a simulation takes of lists."""
        stages = [lists.of(stage) for stage in range(self.axes.pp)]
        return [stage.instructions for stage in stages], self.times, [stage.shape for stage in stages]

    def _ends(self, lists: StageLists, steps: int) -> tuple[float, ...]:
        """When each of several steps with these lists ends."""
        return step_ends(*self._simulation(lists), lists.of(0).border, steps)

    @cached_property
    def _shortest(self) -> StageLists:
        """Of a step whose micro-batches fill the pipeline once."""
        return self._lists_of(self._short(1))

    @cached_property
    def _shortest_scheduled(self) -> float:
        return self._scheduled(self._shortest.micro_batches)

    @cached_property
    def begun_least(self) -> float:
        """What the step never falls below: its schedule, and what messages on model state add to a short step before
        which there is none. Worth its time where they come with each micro-batch. A stage with little to update begins
        the next step while the one with most still updates.
        """
        if not self._sends_inside:
            return self.scheduled
        (first,) = self._ends(self._shortest, 1)
        added = first - self._shortest_scheduled - largest_update(self.run, self.axes, self.times)
        return self.scheduled + max(0.0, added)

    @cached_property
    def seconds(self) -> float:
        """The time of a step that follows another: that of its schedule, and what messages on model state add. They add
        as much to a short step, of which the second begins with what the first has left: gathers of updated parameters.
        What they add for each filling of the pipeline is the difference between two short steps.

        On a CPU all of these share processors, so that nothing adds up, and the whole step is simulated.
        """
        if self.kind == "cpu":
            first, second = self._ends(self._lists_of(self.micro_batches), STEPS)
            return second - first
        few, pp = self._shortest.micro_batches, self.axes.pp
        first, second = self._ends(self._shortest, STEPS)
        seconds = self.scheduled + second - first - self._shortest_scheduled
        if few == self.micro_batches or not self._sends_inside:
            return seconds
        (more,) = self._ends(self._lists_of(few + pp), 1)
        added = more - first - (self._scheduled(few + pp) - self._shortest_scheduled)
        return max(seconds, seconds + (self.micro_batches - few) / pp * added)

    @property
    def _sends_inside(self) -> bool:
        """Whether messages on model state, or copies of it, come with each micro-batch."""
        off = self.run.offload
        copied = off.offload_gradients, off.offload_params, off.offload_activations
        return self.run.parallel.zero_stage > 1 or any(map(bool, copied))

    def update_seconds(self, stage: int) -> float:
        """Seconds of the updates of a rank of a stage on its device."""
        step = self._lists.of(stage)
        updates = (i for i in step.instructions if i.op == UPDATE)
        return self.times.update * sum(
            updated_bytes(step.shape, bucket, i.part) for i in updates for bucket in i.buckets
        )

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
