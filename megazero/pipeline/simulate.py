"""Run a schedule without processes: check that it is complete and ends, and compute its time and peak activations.

The rules are NCCL's, the strictest of the backends. A stage issues its instructions in order. A computation starts when
the previous one is done and its message has arrived. A transfer starts when its send and its receive are both posted
and the channel's earlier transfers are done. It ends at both ends after the time `message`. The i-th send of a channel
matches its i-th receive, whatever their tensors are. No stage waits for a send. Since receives are posted one
computation ahead, a message that takes less than a computation delays its receiver by its own time only.

A channel has one sender and one receiver, and lists have no branches. So the result does not depend on the order in
which stages run. Tests check this with `pick`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megazero.pipeline.chunk_times import ChunkTimes
from megazero.program.instruction import Instruction, Op

Channel = tuple[int, int, bool]
"""(sending stage, receiving stage, whether it carries gradients)."""


class ScheduleError(ValueError):
    """The schedule is incomplete, its order is impossible, or it deadlocks."""


@dataclass(frozen=True, slots=True)
class ComputationSpan:
    """The start and the end of a computation."""

    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True)
class SimulationReport:
    """The result of a simulation, in the unit of `ChunkTimes`.

    makespan          from the start of the first computation to the end of the last one
    longest           the longest time of one stage, from the start of its own first computation to the end of its last
                      one. It is the cost of a step if the stages do not wait for each other between steps
    bubble            fraction of makespan x stages in which no computation ran
    busy              time of computation of each stage
    peak_activations  per stage, the largest number of (micro-batch, chunk) pairs whose forward has started and whose
                      backward (with the weights' part) has not ended; 1 in a forward-only run
    spans             each stage's computations in order
    """

    makespan: float
    longest: float
    bubble: float
    busy: tuple[float, ...]
    peak_activations: tuple[int, ...]
    spans: tuple[tuple[ComputationSpan, ...], ...]

    @property
    def own_bubble(self) -> float:
        """(longest - work) / longest, the bubble rate of zero-bubble papers (arXiv 2401.10241, section 5.3).

        It is the same as `bubble` where the first stage begins first and ends last, as in 1F1B.
        """
        return 1.0 - sum(self.busy) / (self.longest * len(self.busy)) if self.longest else 0.0


def peak_activations(
    instructions: Sequence[Instruction], weights: Sequence[float] | None = None, kept: Sequence[float] | None = None
) -> float:
    """Largest sum of weights over the live (micro-batch, chunk) pairs of one stage.

    weights  for each of the stage's chunks, such as bytes (default: 1)
    kept     for each chunk, the part of its weight that lives between the parts of a split backward (default: all)
    """
    trains = any(i.ends_backward for i in instructions)
    live = peak = 0.0
    for i in instructions:
        if not i.is_compute:
            continue
        whole = 1.0 if weights is None else weights[i.chunk]
        later = whole if kept is None else kept[i.chunk]
        live += {Op.FORWARD: whole, Op.BACKWARD: -whole, Op.BACKWARD_INPUT: later - whole, Op.BACKWARD_WEIGHT: -later}[
            i.op
        ]
        peak = max(peak, live)
        live = live if trains else 0.0
    return peak


def check_complete(
    schedule: Sequence[Sequence[Instruction]], micro_batches: int, virtual_stages: int, backward: bool = True
) -> None:
    """Raise ScheduleError unless a schedule is complete.

    Every (micro-batch, chunk) must be computed once (a split backward in both parts), and each message be sent and
    received once by the right stages.
    """
    holders = _holders(schedule, len(schedule) * virtual_stages)
    split = any(i.op is Op.BACKWARD_WEIGHT for instructions in schedule for i in instructions)
    backwards = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if split else (Op.BACKWARD,)
    for stage, instructions in enumerate(schedule):
        wanted: Counter[tuple[Op, int, int, int]] = Counter()
        for number, (holder, chunk) in enumerate(holders):
            if holder != stage:
                continue
            ops = [(op, -1) for op in (Op.FORWARD, *backwards * backward)]
            for neighbour, receive, send in (
                (number - 1, Op.RECV_FORWARD, Op.SEND_BACKWARD),
                (number + 1, Op.RECV_BACKWARD, Op.SEND_FORWARD),
            ):
                if 0 <= neighbour < len(holders) and holders[neighbour][0] != stage:
                    ops += [
                        (op, holders[neighbour][0])
                        for op in (receive, send)
                        if backward or op in (Op.RECV_FORWARD, Op.SEND_FORWARD)
                    ]
            wanted.update((op, i, chunk, peer) for op, peer in ops for i in range(micro_batches))
        found = Counter((i.op, i.micro_batch, i.chunk, i.peer) for i in instructions)
        if found != wanted:
            missing = [str(Instruction(*key)) for key in (wanted - found)]
            extra = [str(Instruction(*key)) for key in (found - wanted)]
            raise ScheduleError(f"stage {stage}: missing {missing or 'nothing'}, too many {extra or 'none'}")


def _holders(schedule: Sequence[Sequence[Instruction]], count: int) -> list[tuple[int, int]]:
    """(stage, own chunk) of every model chunk. Raises ScheduleError unless each is on exactly one stage."""
    found = {
        (i.model_chunk, stage, i.chunk)
        for stage, instructions in enumerate(schedule)
        for i in instructions
        if i.op is Op.FORWARD
    }
    if sorted(number for number, _, _ in found) != list(range(count)):
        raise ScheduleError(
            f"model chunks 0 to {count - 1} are not on one stage each: (model chunk, stage, chunk) are {sorted(found)}"
        )
    return [(stage, chunk) for _, stage, chunk in sorted(found)]


@dataclass
class _Wire:
    """One channel: (boundary, micro-batch) and posting time of its sends and receives; the ends of its transfers."""

    sends: list[tuple[tuple[int, int], float]] = field(default_factory=list)
    receives: list[tuple[tuple[int, int], float]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)


@dataclass
class _Stage:
    instructions: Sequence[Instruction]
    next: int = 0
    clock: float = 0.0
    spans: list[ComputationSpan] = field(default_factory=list)
    arrivals: dict[tuple[bool, int, int], tuple[Channel, int]] = field(default_factory=dict)
    """For (backward, micro-batch, chunk): the channel of the posted receive and its number in the channel."""
    ended: set[tuple[bool, int, int]] = field(default_factory=set)
    """(backward, micro-batch, model chunk) that have run; for a split backward its input part."""


def simulate(
    schedule: Sequence[Sequence[Instruction]],
    times: ChunkTimes,
    *,
    pick: Callable[[list[int]], int] | None = None,
) -> SimulationReport:
    """Run every stage's list to its end.

    pick: chooses the next stage among those that can run. Raises ScheduleError with the blocked instruction of every
    stage on a deadlock.
    """
    return _Simulation(schedule, times).run(pick)


class _Simulation:
    def __init__(self, schedule: Sequence[Sequence[Instruction]], times: ChunkTimes) -> None:
        self.stages = [_Stage(instructions) for instructions in schedule]
        self.times = times
        self.chunks = len(times.forward)
        self.wires: dict[Channel, _Wire] = {}
        self.own = [{i.model_chunk: i.chunk for i in instructions if i.op is Op.FORWARD} for instructions in schedule]

    def run(self, pick: Callable[[list[int]], int] | None) -> SimulationReport:
        waiting = {stage for stage in range(len(self.stages)) if not self._is_done(stage)}
        while waiting:
            able = [stage for stage in sorted(waiting) if self._is_able(stage)]
            if not able:
                blocked = "\n".join(
                    f"  stage {s}: {self._current(s)} (number {self.stages[s].next} of its list) waits for "
                    f"{self._why_blocked(s)}"
                    for s in sorted(waiting)
                )
                raise ScheduleError(f"deadlock; every stage that is not done is blocked:\n{blocked}")
            chosen = pick(able) if pick else able[0]
            self._step(chosen)
            while pick is None and self._is_able(chosen):
                self._step(chosen)
            if self._is_done(chosen):
                waiting.remove(chosen)
        for (source, target, backward), wire in self.wires.items():
            if len(wire.sends) != len(wire.receives):
                kind = "gradients" if backward else "hidden states"
                raise ScheduleError(
                    f"{kind} {source} -> {target}: {len(wire.sends)} sends, {len(wire.receives)} receives"
                )
        return self._report()

    def _is_done(self, stage: int) -> bool:
        return self.stages[stage].next == len(self.stages[stage].instructions)

    def _is_able(self, stage: int) -> bool:
        return not self._is_done(stage) and self._why_blocked(stage) is None

    def _current(self, stage: int) -> Instruction:
        return self.stages[stage].instructions[self.stages[stage].next]

    def _channel(self, stage: int, i: Instruction) -> Channel:
        return (stage, i.peer, i.is_backward) if i.is_send else (i.peer, stage, i.is_backward)

    def _why_blocked(self, stage: int) -> str | None:
        """A description of what the next instruction of a stage waits for; None if it can run."""
        i = self._current(stage)
        return self._missing_input(stage, i) if i.is_compute else None

    def _missing_input(self, stage: int, i: Instruction) -> str | None:
        ended = self.stages[stage].ended
        if i.op is Op.BACKWARD_WEIGHT:
            return None if (True, i.micro_batch, i.model_chunk) in ended else "the input's part of its backward"
        if i.is_backward and (False, i.micro_batch, i.model_chunk) not in ended:
            return "its own forward"
        giver = i.model_chunk + (1 if i.is_backward else -1)
        if giver in (-1, self.chunks) or (i.is_backward, i.micro_batch, giver) in ended:
            return None
        if giver in self.own[stage]:
            return f"chunk {self.own[stage][giver]}"
        posted = self.stages[stage].arrivals.get((i.is_backward, i.micro_batch, i.chunk))
        if posted is None:
            return "a receive that was never posted"
        channel, number = posted
        return None if number < len(self.wires[channel].ends) else f"its message from stage {channel[0]}"

    def _step(self, stage: int) -> None:
        state, i = self.stages[stage], self._current(stage)
        state.next += 1
        if i.is_compute:
            self._compute(stage, i)
            return
        channel = self._channel(stage, i)
        wire = self.wires.setdefault(channel, _Wire())
        if i.is_send:
            if (i.is_backward, i.micro_batch, i.model_chunk) not in state.ended:
                raise ScheduleError(f"stage {stage}: {i} comes before its computation")
        else:
            state.arrivals[i.is_backward, i.micro_batch, i.chunk] = channel, len(wire.receives)
        posted = wire.sends if i.is_send else wire.receives
        posted.append(((i.boundary, i.micro_batch), state.clock))
        self._transfer(channel, wire)

    def _transfer(self, channel: Channel, wire: _Wire) -> None:
        number = len(wire.ends)
        if number >= min(len(wire.sends), len(wire.receives)):
            return
        (sent, send_time), (expected, receive_time) = wire.sends[number], wire.receives[number]
        if sent != expected:
            raise ScheduleError(
                f"message {number} of stage {channel[0]} to stage {channel[1]}: boundary {sent[0]} of micro-batch "
                f"{sent[1]} is sent, "
                f"boundary {expected[0]} of micro-batch {expected[1]} is received"
            )
        start = max(send_time, receive_time, wire.ends[-1] if wire.ends else 0.0)
        wire.ends.append(start + self.times.message)

    def _compute(self, stage: int, i: Instruction) -> None:
        state = self.stages[stage]
        start = state.clock
        posted = (
            None if i.op is Op.BACKWARD_WEIGHT else state.arrivals.pop((i.is_backward, i.micro_batch, i.chunk), None)
        )
        if posted is not None:
            start = max(start, self.wires[posted[0]].ends[posted[1]])
        state.clock = start + self.times.of(i.op, i.model_chunk)
        if i.op is not Op.BACKWARD_WEIGHT:
            state.ended.add((i.is_backward, i.micro_batch, i.model_chunk))
        state.spans.append(ComputationSpan(i, start, state.clock))

    def _report(self) -> SimulationReport:
        spans = tuple(tuple(stage.spans) for stage in self.stages)
        makespan = max((row[-1].end for row in spans if row), default=0.0)
        longest = max((row[-1].end - row[0].start for row in spans if row), default=0.0)
        busy = tuple(sum(span.end - span.start for span in row) for row in spans)
        bubble = 1.0 - sum(busy) / (makespan * len(spans)) if makespan else 0.0
        peaks = tuple(int(peak_activations(stage.instructions)) for stage in self.stages)
        return SimulationReport(makespan, longest, bubble, busy, peaks, spans)
