"""Run the lists of a step without processes: whether they end, and how long every lane takes.

The rules are NCCL's, the strictest of the backends. A rank issues its instructions in order. A computation starts when
the one before it is done and what it reads is there (`program.effects`). A message starts when all of its ranks have
issued it, what it reads is there, and the messages before it on its lane are over. The i-th message of one rank in a
group, or on a channel between two stages, meets the i-th message of every other rank, whatever their tensors are. A
send is waited for by nobody. A collective over several stages is issued only when the rank's collectives before it are
over, as on a card that runs one at a time.

Where all ranks of a group have the same list (the replicas of a role, the tp indexes of a stage), one of them stands
for all, so its messages never wait for others. Nor do copies between the device and its host: each has its lane. A part
that is updated in host memory waits there for its slot (`passes.slots`). Lanes of the host's processors slow each other
and the computation down where it runs on them too (`program.simulated_rank`).

Several steps run one behind the other: the copies and updates at the end of one go on beside the begin of the next. So
the time of a step in a run is that from the end of one to the end of the next.

A channel has one sender and one receiver, and lists have no branches. So the result does not depend on the order in
which ranks run. Tests check this with `pick`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from megazero.program.instruction import (
    DISK_LANES,
    GRADIENTS_LEAVE,
    LOCAL_LANES,
    UPDATE,
    Instruction,
    Kind,
    Lane,
    Op,
    ProgramError,
    Units,
)
from megazero.program.meetings import Meetings, Message
from megazero.program.passes.kept_graphs import peak_activations
from megazero.program.scope import ON_TIME, Border, shared_scope
from megazero.program.shape import IN_FLIGHT, RankShape, without_state
from megazero.program.simulated_rank import SHARED_LANES, ProcessorQueue, Processors, RankWork, SimulatedRank
from megazero.program.times import ChunkTimes, Span
from megazero.program.traffic import updated_bytes
from megazero.program.values import Effects, Value, describe


@dataclass(frozen=True)
class SimulationReport:
    """The result of a simulation, in the unit of `ChunkTimes`.

    makespan          from the start of the first computation to the end of the last one
    longest           the longest time of one rank, from the start of its own first computation to the end of its last
                      one. It is the cost of a step if the stages do not wait for each other between steps
    bubble            fraction of makespan x ranks in which no computation ran
    busy              time of computation of each rank
    peak_activations  per rank, the largest number of (micro-batch, chunk) pairs whose forward has started and whose
                      backward (with the weights' part) has not ended; 1 in a forward-only run
    spans             each rank's computations in order, updates that take time included
    messages          each rank's messages, in the order in which they were over
    ends              when the last computation of each step ends
    """

    makespan: float
    longest: float
    bubble: float
    busy: tuple[float, ...]
    peak_activations: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    messages: tuple[tuple[Span, ...], ...]
    ends: tuple[float, ...] = ()

    @property
    def step(self) -> float:
        """The time of a step that follows another: from the end of the last but one to the end of the last."""
        return self.ends[-1] - (self.ends[-2] if len(self.ends) > 1 else 0.0)

    @property
    def own_bubble(self) -> float:
        """(longest - work) / longest, the bubble rate of zero-bubble papers (arXiv 2401.10241, section 5.3).

        It is the same as `bubble` where the first stage begins first and ends last, as in 1F1B.
        """
        return 1.0 - sum(self.busy) / (self.longest * len(self.busy)) if self.longest else 0.0


def simulate(
    lists: Sequence[Sequence[Instruction]],
    times: ChunkTimes,
    shapes: Sequence[RankShape] | None = None,
    *,
    border: Border = ON_TIME,
    steps: int = 1,
    pick: Callable[[list[int]], int] | None = None,
) -> SimulationReport:
    """Run the list of one rank of every stage to its end.

    shapes: the ranks' model states; None: the lists have no instructions on it. border: of all lists. steps: how often
    the lists run, one time behind the other. pick: chooses the next stage among those that can run.

    Raises ProgramError: a deadlock, with the blocked instruction of every stage; messages that do not fit together; an
    instruction that reads what none before it has made.
    """
    if shapes is None:
        shapes = [schedule_shape(instructions) for instructions in lists]
    simulation = _Simulation(lists, times, shapes, border, steps)
    simulation.run(pick)
    return simulation.report()


def step_ends(
    lists: Sequence[Sequence[Instruction]], times: ChunkTimes, shapes: Sequence[RankShape], border: Border, steps: int
) -> tuple[float, ...]:
    """`SimulationReport.ends` of the same simulation, without a report of everything else."""
    simulation = _Simulation(lists, times, shapes, border, steps)
    simulation.run(None)
    return simulation.ends()


def step_time(
    lists: Sequence[Sequence[Instruction]], times: ChunkTimes, shapes: Sequence[RankShape], border: Border, steps: int
) -> float:
    """`SimulationReport.step` of the same simulation."""
    ends = step_ends(lists, times, shapes, border, steps)
    return ends[-1] - (ends[-2] if len(ends) > 1 else 0.0)


def schedule_shape(instructions: Sequence[Instruction]) -> RankShape:
    """The shape of a rank whose list has a schedule's instructions only: chunks of one unit, no model state."""
    return without_state([1] * (1 + max((i.chunk for i in instructions if i.is_compute), default=-1)))


class _Simulation:
    def __init__(
        self,
        lists: Sequence[Sequence[Instruction]],
        times: ChunkTimes,
        shapes: Sequence[RankShape],
        border: Border,
        steps: int,
    ) -> None:
        self.times, self.steps = times, steps
        trains = any(i.ends_backward for instructions in lists for i in instructions)
        self.ranks = [
            SimulatedRank(
                number,
                own,
                shared_scope(shape, len(times.forward), trains=trains, border=border),
                Processors(times.beside),
            )
            for number, (own, shape) in enumerate(zip(lists, shapes, strict=True))
        ]
        self.queue = None if times.at_once is None else ProcessorQueue(times.at_once)
        for rank in self.ranks:
            rank.values.update(dict.fromkeys(rank.scope.at_start(), 0.0))
            rank.ends += [0.0] * (steps * rank.is_done)  # a list without instructions
        self.meetings = Meetings(shapes, times.message)
        self._computations = dict[tuple[Kind, int, Units | None], float]()

    def run(self, pick: Callable[[list[int]], int] | None) -> None:
        if pick is None and self.queue is not None:  # who comes first is served first
            pick = partial(min, key=lambda number: self.ranks[number].clock)
        able = deque(rank.number for rank in self.ranks)
        blocked: dict[int, Message] = {}
        while able:
            chosen = able.popleft() if pick is None else pick(sorted(able))
            if pick is not None:
                able.remove(chosen)
            message = self._advance(self.ranks[chosen], one=pick is not None)
            if message is not None:
                blocked[chosen] = message
            elif not self.ranks[chosen].is_done:
                able.append(chosen)
            for over in self.meetings.take_over():
                for number in [number for number, awaited in blocked.items() if awaited is over]:
                    del blocked[number]
                    able.append(number)
        if blocked:
            raise ProgramError(self._deadlock(blocked))
        self.meetings.check_over()

    def ends(self) -> tuple[float, ...]:
        """When the last computation of each step has ended."""
        return tuple(max(of_step) for of_step in zip(*(rank.ends for rank in self.ranks), strict=True))

    def _deadlock(self, blocked: dict[int, Message]) -> str:
        lines = [
            f"  stage {number}: {self.ranks[number].current} (number {self.ranks[number].next} of its list) waits for "
            f"{message.waits}"
            for number, message in sorted(blocked.items())
        ]
        return "deadlock; every stage that is not done is blocked:\n" + "\n".join(lines)

    def _advance(self, rank: SimulatedRank, *, one: bool) -> Message | None:
        """Run a rank until it is done or blocked; returns the message that blocks it. one: at most one instruction."""
        count = len(rank.instructions)
        while rank.next < count:
            if rank.awaited is not None:
                if rank.awaited.end is None:
                    return rank.awaited
                rank.clock, rank.awaited = max(rank.clock, rank.awaited.end), None
            work, there = rank.work, rank.values
            start = rank.clock
            for values in (work.does.needs, work.does.takes):
                for value in values:
                    made = there.get(value)
                    if made is None:
                        raise self._unmade(rank, value)
                    if isinstance(made, Message):
                        if made.end is None:
                            return made
                        made = made.end
                    if made > start:
                        start = made
            message = _ACTIONS.get(work.lane, _Simulation._communicate)(self, rank, rank.current, work, start)
            if message is not None:
                return message
            rank.next += 1
            if rank.next == count:
                rank.ends.append(rank.clock)
                if len(rank.ends) < self.steps:
                    rank.begin_again()
            if one:
                break
        return None

    def _unmade(self, rank: SimulatedRank, value: Value) -> ProgramError:
        what = f"reads {describe(value)}, which no instruction before it has made"
        return ProgramError(what, f"stage {rank.number}", rank.next, rank.current)

    def _compute(self, rank: SimulatedRank, i: Instruction, work: RankWork, start: float) -> None:
        if i.is_compute:
            rank.clock = rank.processors.end(start, self._in_turn(start, self._alone(rank, i)))
            rank.spans.append(Span(i, start, rank.clock))
        elif i.op == UPDATE:
            size = sum(updated_bytes(rank.scope.shape, bucket, i.part) for bucket in i.buckets)
            rank.clock = rank.processors.end(start, self._in_turn(start, self.times.update * size))
            if rank.clock > start:
                rank.spans.append(Span(i, start, rank.clock))
        else:
            rank.clock = start  # what is freed is waited for
        rank.processors.forget(rank.clock)
        self._write(rank, work.does, rank.clock)

    def _alone(self, rank: SimulatedRank, i: Instruction) -> float:
        """The time of a computation, which is the same of all micro-batches."""
        key = i.op, i.model_chunk, i.units
        if key not in self._computations:
            units, of_chunk = rank.scope.units_of(i), rank.scope.shape.units[i.chunk]
            self._computations[key] = self.times.computation(i, units, len(of_chunk))
        return self._computations[key]

    def _in_turn(self, start: float, work: float) -> float:
        """The time from `start` on that work takes while all stages compute, with its wait for processors."""
        if self.queue is None:
            return work
        self.queue.forget(min(rank.clock for rank in self.ranks if not rank.is_done))
        return self.queue.end(start, work * self.times.share(len(self.ranks))) - start

    def _transfer(self, rank: SimulatedRank, i: Instruction, work: RankWork, start: float) -> None:
        """Post one end of a message between stages."""
        # A send follows its computation, and a receive reads nothing: both are posted at the rank's clock.
        message = self.meetings.transfer(rank.number, rank.next, i, rank.clock, rank.messages)
        self._write(rank, work.does, message)

    def _communicate(self, rank: SimulatedRank, i: Instruction, work: RankWork, start: float) -> Message | None:
        group = self.meetings.group_of(rank.number, i)
        crosses = self.meetings.crosses(group)
        if crosses and rank.last is not None and rank.last.end is None:
            return rank.last
        before = rank.lanes.get(work.lane)
        if before is not None:
            if before.end is None:
                return before
            start = max(start, before.end)
        duration = self.times.per_byte.get(work.lane, 0.0) * work.moved + self.times.latency * (work.moved > 0)
        message = self.meetings.collective(group, rank.number, rank.next, i, start, duration, rank.messages)
        rank.lanes[work.lane] = message
        rank.last = message if crosses else rank.last
        rank.awaited = message if self.times.waits else None
        self._write(rank, work.does, message)
        if i.op is Op.REDUCE and rank.scope.shape.buckets[i.buckets[0]].lends_gradient:
            self._limit(rank, i.buckets[0], message)
        return None

    def _move(self, rank: SimulatedRank, i: Instruction, work: RankWork, start: float) -> None:
        """Work on a lane of the rank's own: it waits for what it reads, the lane and a slot, and nobody for it."""
        before = rank.lanes.get(work.lane)
        free = 0.0 if before is None or before.end is None else before.end
        start = max(start, free, rank.slots.begins(i))
        alone = self.times.per_byte.get(work.lane, 0.0) * work.moved
        end = start + alone
        if work.lane in SHARED_LANES:
            end = rank.processors.end(start, alone)
            rank.processors.take(start, end)
        elif work.lane in DISK_LANES and self.times.carrying:
            carried = rank.processors.end(start, self.times.carrying * work.moved)
            rank.processors.take(start, carried)
            end = max(end, carried)
        rank.slots.ran(i, end)
        rank.lanes[work.lane] = message = Message("", end)
        rank.messages.append(Span(i, start, end))
        self._write(rank, work.does, message)
        if i.op in GRADIENTS_LEAVE:
            buckets = [bucket for bucket, _ in rank.in_flight]
            if i.buckets[0] in buckets and rank.scope.shape.buckets[i.buckets[0]].sums_leave:
                rank.in_flight[buckets.index(i.buckets[0])] = i.buckets[0], message

    def _limit(self, rank: SimulatedRank, bucket: int, launched: Message) -> None:
        """The rank waits for the oldest reduction where too many have buffers of their own."""
        rank.in_flight.append((bucket, launched))
        if len(rank.in_flight) > IN_FLIGHT and (oldest := rank.in_flight.popleft()[1]).end is not None:
            rank.clock = max(rank.clock, oldest.end)

    def _write(self, rank: SimulatedRank, does: Effects, made: float | Message) -> None:
        for value in does.takes:
            del rank.values[value]
        for values in (does.makes, does.adds):
            for value in values:
                rank.values[value] = made

    def report(self) -> SimulationReport:
        spans = tuple(tuple(rank.spans) for rank in self.ranks)
        makespan = max((row[-1].end for row in spans if row), default=0.0)
        longest = max((row[-1].end - row[0].start for row in spans if row), default=0.0)
        busy = tuple(sum(span.end - span.start for span in row) for row in spans)
        bubble = 1.0 - sum(busy) / (makespan * len(spans)) if makespan else 0.0
        peaks = tuple(int(peak_activations(rank.instructions)) for rank in self.ranks)
        messages = tuple(tuple(sorted(rank.messages, key=_by_end)) for rank in self.ranks)
        return SimulationReport(makespan, longest, bubble, busy, peaks, spans, messages, self.ends())


_ACTIONS = {
    Lane.COMPUTE: _Simulation._compute,
    Lane.STAGES: _Simulation._transfer,
    **dict.fromkeys(LOCAL_LANES, _Simulation._move),
}
"""By lane what runs an instruction of it; of all others `_communicate`. (Bound methods in a simulation would be a cycle
with its lists in it, which only a collection frees.)
"""


def _by_end(span: Span) -> tuple[float, float, str]:
    return span.end, span.start, str(span.instruction)
