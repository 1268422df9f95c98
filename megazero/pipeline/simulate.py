"""Run a schedule without processes: is it complete, does it end, how long does it take, what does it hold?

The rules are NCCL's, the strictest of the backends. A stage issues its instructions in order. A computation starts when
the one before it is done and its message has arrived. A transfer starts when its send and its receive are both posted
and the channel's earlier transfers are done, and then ends `message` later at both ends. The i-th send of a channel
meets its i-th receive, whatever they carry, and keeps its tensor until then; nobody waits for a send.

Channels have one sender and one receiver and lists have no branches, so what is computed does not depend on the order
in which stages get to run; `pick` exists for tests that try this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megazero.pipeline.schedule import Instruction, Op, boundary

Channel = tuple[int, int, bool]
"""Sending stage, receiving stage, whether it carries gradients."""


class ScheduleError(ValueError):
    """A schedule that is incomplete, in an impossible order, or that deadlocks."""


@dataclass(frozen=True)
class Times:
    """Seconds (or any unit) of each model chunk's forward and backward on one micro-batch, and of one message."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    message: float = 0.0


def uniform_times(chunks: int, forward: float = 1.0, backward: float = 2.0, message: float = 0.0) -> Times:
    """The same times for `chunks` model chunks."""
    return Times((forward,) * chunks, (backward,) * chunks, message)


@dataclass(frozen=True, slots=True)
class Span:
    """When a computation ran."""

    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True)
class Report:
    """What a simulation found.

    makespan          from the first computation's start to the last one's end
    bubble            share of makespan x stages in which no computation ran
    busy              seconds of computation of each stage
    peak_activations  per stage, the most (micro-batch, chunk) pairs between the start of their forward and the end of
                      their backward; in a forward-only run one at a time
    spans             each stage's computations in order
    """

    makespan: float
    bubble: float
    busy: tuple[float, ...]
    peak_activations: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]


def peak_activations(instructions: Sequence[Instruction], weights: Sequence[float] | None = None) -> float:
    """Largest sum over live (micro-batch, chunk) pairs of one stage; `weights` per own chunk, such as bytes (default 1)."""
    trains = any(i.op is Op.BACKWARD for i in instructions)
    live = peak = 0.0
    for instruction in instructions:
        if instruction.is_compute:
            weight = 1.0 if weights is None else weights[instruction.chunk]
            live += weight if instruction.op is Op.FORWARD else -weight
            peak = max(peak, live)
            live = live if trains else 0.0
    return peak


def check_complete(schedule: Sequence[Sequence[Instruction]], micro_batches: int, virtual_stages: int, backward: bool = True) -> None:
    """Raise ScheduleError unless every (micro-batch, chunk) is computed once, each message sent and received once, by the right
    stages, and gradients of every chunk are reduced in its last backward."""
    stages = len(schedule)
    last = stages * virtual_stages - 1
    for stage, instructions in enumerate(schedule):
        wanted: Counter[tuple[Op, int, int, int]] = Counter()
        for chunk in range(virtual_stages):
            own = chunk * stages + stage
            inner = [(Op.RECV_FORWARD, -1)] * (own > 0) + [(Op.SEND_FORWARD, 1)] * (own < last)
            inner += [(Op.RECV_BACKWARD, 1)] * (own < last and backward) + [(Op.SEND_BACKWARD, -1)] * (own > 0 and backward)
            ops = [(Op.FORWARD, -1)] + [(Op.BACKWARD, -1)] * backward
            ops += [(op, (stage + step) % stages) for op, step in inner] if stages > 1 else []
            wanted.update((op, i, chunk, peer) for op, peer in ops for i in range(micro_batches))
        found = Counter((i.op, i.micro_batch, i.chunk, i.peer) for i in instructions)
        if found != wanted:
            missing = [str(Instruction(*key)) for key in (wanted - found)]
            extra = [str(Instruction(*key)) for key in (found - wanted)]
            raise ScheduleError(f"stage {stage}: missing {missing or 'nothing'}, too many {extra or 'none'}")
        flags = {i.chunk: i.reduce for i in instructions if i.op is Op.BACKWARD}
        if not all(flags.values()):
            raise ScheduleError(f"stage {stage}: gradients of chunks {[c for c, r in flags.items() if not r]} are not reduced at the end")


@dataclass
class _Wire:
    """One channel: when each of its sends and receives was posted, what they carry, and when the transfers ended."""

    sends: list[tuple[tuple[int, int], float]] = field(default_factory=list)
    receives: list[tuple[tuple[int, int], float]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)


@dataclass
class _Stage:
    instructions: Sequence[Instruction]
    next: int = 0
    clock: float = 0.0
    spans: list[Span] = field(default_factory=list)
    arrivals: dict[tuple[bool, int, int], tuple[Channel, int]] = field(default_factory=dict)
    """For (backward, micro-batch, chunk): the channel of the posted receive and its number there."""
    ended: dict[tuple[Op, int, int], float] = field(default_factory=dict)


def simulate(
    schedule: Sequence[Sequence[Instruction]],
    times: Times,
    *,
    pick: Callable[[list[int]], int] | None = None,
) -> Report:
    """Run every stage's list to its end. Raises ScheduleError with the blocked instruction of every stage if it has none."""
    return _Simulation(schedule, times).run(pick)


class _Simulation:
    def __init__(self, schedule: Sequence[Sequence[Instruction]], times: Times) -> None:
        self.stages = [_Stage(instructions) for instructions in schedule]
        self.times = times
        self.chunks = len(times.forward)
        self.wires: dict[Channel, _Wire] = {}

    def run(self, pick: Callable[[list[int]], int] | None) -> Report:
        waiting = {stage for stage in range(len(self.stages)) if not self._is_done(stage)}
        while waiting:
            able = [stage for stage in sorted(waiting) if self._is_able(stage)]
            if not able:
                blocked = "\n".join(
                    f"  stage {s}: {self._current(s)} (number {self.stages[s].next} of its list) waits for {self._why_blocked(s)}"
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
                raise ScheduleError(f"{kind} {source} -> {target}: {len(wire.sends)} sends, {len(wire.receives)} receives")
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
        """What the next instruction of a stage waits for; None if it can run."""
        i = self._current(stage)
        return self._missing_input(stage, i) if i.is_compute else None

    def _missing_input(self, stage: int, i: Instruction) -> str | None:
        state, model_chunk = self.stages[stage], i.chunk * len(self.stages) + stage
        if i.op is Op.BACKWARD and (Op.FORWARD, i.micro_batch, i.chunk) not in state.ended:
            return "its own forward"
        if model_chunk == (0 if i.op is Op.FORWARD else self.chunks - 1):
            return None
        if len(self.stages) == 1:
            other = i.chunk - 1 if i.op is Op.FORWARD else i.chunk + 1
            return None if (i.op, i.micro_batch, other) in state.ended else f"chunk {other}"
        posted = state.arrivals.get((i.is_backward, i.micro_batch, i.chunk))
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
            if (Op.BACKWARD if i.is_backward else Op.FORWARD, i.micro_batch, i.chunk) not in state.ended:
                raise ScheduleError(f"stage {stage}: {i} comes before its computation")
        else:
            state.arrivals[i.is_backward, i.micro_batch, i.chunk] = channel, len(wire.receives)
        posted = wire.sends if i.is_send else wire.receives
        posted.append(((boundary(i, stage, len(self.stages)), i.micro_batch), state.clock))
        self._transfer(channel, wire)

    def _transfer(self, channel: Channel, wire: _Wire) -> None:
        number = len(wire.ends)
        if number >= min(len(wire.sends), len(wire.receives)):
            return
        (sent, send_time), (expected, receive_time) = wire.sends[number], wire.receives[number]
        if sent != expected:
            raise ScheduleError(
                f"message {number} of stage {channel[0]} to stage {channel[1]}: boundary {sent[0]} of micro-batch {sent[1]} is sent, "
                f"boundary {expected[0]} of micro-batch {expected[1]} is received"
            )
        start = max(send_time, receive_time, wire.ends[-1] if wire.ends else 0.0)
        wire.ends.append(start + self.times.message)

    def _compute(self, stage: int, i: Instruction) -> None:
        state, model_chunk = self.stages[stage], i.chunk * len(self.stages) + stage
        start = state.clock
        posted = state.arrivals.pop((i.is_backward, i.micro_batch, i.chunk), None)
        if posted is not None:
            start = max(start, self.wires[posted[0]].ends[posted[1]])
        duration = (self.times.forward if i.op is Op.FORWARD else self.times.backward)[model_chunk]
        state.clock = state.ended[i.op, i.micro_batch, i.chunk] = start + duration
        state.spans.append(Span(i, start, state.clock))

    def _report(self) -> Report:
        spans = tuple(tuple(stage.spans) for stage in self.stages)
        makespan = max((row[-1].end for row in spans if row), default=0.0)
        busy = tuple(sum(span.end - span.start for span in row) for row in spans)
        bubble = 1.0 - sum(busy) / (makespan * len(spans)) if makespan else 0.0
        peaks = tuple(int(peak_activations(stage.instructions)) for stage in self.stages)
        return Report(makespan, bubble, busy, peaks, spans)
