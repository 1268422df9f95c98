"""How long the computations and messages of a schedule take, without model state: what `program.simulate` says of the
same lists, in a fortieth of its time.

Lists have no branches, and a channel has one sender and one receiver. So the order in which the computations of all
stages can run is found once for a schedule, and each set of times is one pass over it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megazero.program.instruction import Instruction, Kind, Op, ProgramError
from megazero.program.times import ChunkTimes

FIRST = -1
"""Number of the computation that makes the input of one that reads tokens, or the loss that its forward has made."""


@dataclass(frozen=True, eq=False)
class Computations:
    """The computations of a schedule, by numbers alone: a list of each column, as a graph has thousands of them.

    stage     where each runs
    duration  number of its kind and model chunk among `ScheduleGraph.kinds`
    input     number of the computation that makes what it reads; FIRST: it reads no other's
    channel   number of the channel on which its input comes; FIRST: its stage makes it
    """

    stage: list[int] = field(default_factory=list)
    duration: list[int] = field(default_factory=list)
    input: list[int] = field(default_factory=list)
    channel: list[int] = field(default_factory=list)

    def add(self, stage: int, duration: int, made: int, channel: int) -> None:
        self.stage.append(stage)
        self.duration.append(duration)
        self.input.append(made)
        self.channel.append(channel)

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """The columns of each computation."""
        return zip(self.stage, self.duration, self.input, self.channel, strict=True)


@dataclass(frozen=True)
class StateDelays:
    """Messages on model state that no order of them avoids.

    gathers     by model chunk the time before which its first forward cannot end
    reductions  by stage the time of reductions that come behind the begin of its first last backward
    every       by model chunk the time of reductions that come behind the begin of each backward
    spared      of these, the time of those for whose end nobody waits, at most
    """

    gathers: Mapping[int, float] = field(default_factory=dict)
    reductions: Sequence[float] = ()
    every: Mapping[int, float] = field(default_factory=dict)
    spared: float = 0.0


NONE = StateDelays()


@dataclass(frozen=True, eq=False)
class ScheduleGraph:
    """The computations of all stages, in an order in which they can run.

    kinds     kind and model chunk, by number of duration
    channels  number of channels between stages
    firsts    the number of each model chunk's first forward -> the chunk
    lasts     the numbers of the computations that make the last gradients of a chunk
    """

    stages: int
    computations: Computations
    kinds: tuple[tuple[Kind, int], ...]
    channels: int
    firsts: Mapping[int, int]
    lasts: tuple[int, ...]

    @classmethod
    def of(cls, orders: Sequence[Sequence[Instruction]], chunks: Sequence[Sequence[int]]) -> ScheduleGraph:
        """That of the computations of all stages, in order. chunks: by stage the numbers of its chunks in the model.

        Raises ProgramError where stages wait for each other.
        """
        return _Ordering(orders, chunks).graph()

    def seconds(self, times: ChunkTimes, state: StateDelays = NONE) -> float:
        """From the start of the first computation to the end of the last, in the unit of the times, and to the end of
        the messages on model state.

        A message starts when its sender and the computation before the last one of its receiver are done, which posts
        a receive one computation ahead, and the channel is free.
        """
        durations, message = [times.of(*kind) for kind in self.kinds], times.message
        clocks, posted, free = [0.0] * self.stages, [0.0] * self.stages, [0.0] * self.channels
        lanes, every, spared = [0.0] * self.stages, self._every(state), state.spared
        gathered = {number: state.gathers[chunk] for number, chunk in self.firsts.items()} if state.gathers else {}
        starts, ends = list[float](), list[float]()
        # comparisons in place of `max`, whose calls would take half of the time
        for number, (stage, duration, made, channel) in enumerate(self.computations.rows()):
            start = clocks[stage]
            arrival, posted[stage] = posted[stage], start
            if channel >= 0:
                if ends[made] > arrival:
                    arrival = ends[made]
                if free[channel] > arrival:
                    arrival = free[channel]
                free[channel] = arrival = arrival + message
                if arrival > start:
                    start = arrival
            end = start + durations[duration]
            if gathered and number in gathered:
                end = max(end, gathered.pop(number))
            if reduced := every[duration]:
                lanes[stage] = over = (start if start > lanes[stage] else lanes[stage]) + reduced
                if over - spared > end:
                    end = over - spared
            clocks[stage] = end
            starts.append(start)
            ends.append(end)
        return max([*clocks, *self._reduced(starts, state.reductions)])

    def _every(self, state: StateDelays) -> list[float]:
        """By kind of computation the time of reductions behind each."""
        last = {chunk: kind for kind, chunk in self.kinds if kind in (Op.BACKWARD, Op.BACKWARD_WEIGHT)}
        return [state.every.get(chunk, 0.0) * (last[chunk] is kind) for kind, chunk in self.kinds]

    def _reduced(self, starts: Sequence[float], reductions: Sequence[float]) -> list[float]:
        """By stage when its last reductions are over, at least."""
        if not reductions:
            return []
        first = dict[int, float]()
        for number in self.lasts:
            stage = self.computations.stage[number]
            first[stage] = min(starts[number], first.get(stage, math.inf))
        return [start + reductions[stage] for stage, start in first.items()]


class _Ordering:
    """The search for an order in which all computations can run."""

    def __init__(self, orders: Sequence[Sequence[Instruction]], chunks: Sequence[Sequence[int]]) -> None:
        self._orders, self._chunks = orders, chunks
        self._last = max(map(max, chunks))
        self._made = dict[tuple[bool, int, int], tuple[int, int]]()
        """(whether it is a gradient, micro-batch, model chunk) -> number of the computation and its stage."""
        self._kinds = dict[tuple[Kind, int], int]()
        self._channels = dict[tuple[int, int, bool], int]()
        self._order = Computations()
        self._firsts, self._lasts = dict[int, int](), dict[int, int]()

    def graph(self) -> ScheduleGraph:
        at, moved = [0] * len(self._orders), True
        while moved:
            moved = False
            for stage, instructions in enumerate(self._orders):
                while at[stage] < len(instructions) and self._add(stage, instructions[at[stage]]):
                    at[stage], moved = at[stage] + 1, True
        for stage, instructions in enumerate(self._orders):
            if at[stage] < len(instructions):
                raise ProgramError("never runs", f"stage {stage}", at[stage], instructions[at[stage]])
        of_chunks = {number: chunk for chunk, number in self._firsts.items()}
        return ScheduleGraph(
            len(self._orders),
            self._order,
            tuple(self._kinds),
            len(self._channels),
            of_chunks,
            tuple(self._lasts.values()),
        )

    def _add(self, stage: int, i: Instruction) -> bool:
        """Put a computation behind all others, if its input is made."""
        op, chunk, number = i.op, self._chunks[stage][i.chunk], len(self._order.stage)
        made, source, is_backward = FIRST, stage, op is not Op.FORWARD
        # tokens, the loss and the input's part of a split backward are its own stage's, in an order that lists keep
        if op is not Op.BACKWARD_WEIGHT and chunk != (self._last if is_backward else 0):
            maker = self._made.get((is_backward, i.micro_batch, chunk + (1 if is_backward else -1)))
            if maker is None:
                return False
            made, source = maker
        channel = FIRST
        if source != stage:
            channel = self._channels.setdefault((source, stage, is_backward), len(self._channels))
        if op is not Op.BACKWARD_WEIGHT:
            self._made[is_backward, i.micro_batch, chunk] = number, stage
        if op is Op.FORWARD:
            self._firsts.setdefault(chunk, number)
        elif op is not Op.BACKWARD_INPUT:
            self._lasts[chunk] = number
        duration = self._kinds.setdefault((op, chunk), len(self._kinds))
        self._order.add(stage, duration, made, channel)
        return True
