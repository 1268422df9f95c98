"""A rank on its way through its list, in a simulation (`program.simulate`), and the processors of its host.

On a CPU the computation runs on the host's processors: it is slower while the host updates or copies, and these are
slower beside each other. So lanes are no gift there. On a GPU's host the computation is elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megazero.program.effects import effects
from megazero.program.instruction import LOCAL_LANES, PARAMETER_LOADS, Instruction, Lane
from megazero.program.meetings import Message
from megazero.program.scope import Scope
from megazero.program.times import Span
from megazero.program.traffic import message_bytes, moved_bytes
from megazero.program.values import Effects, Thing, Value

SHARED_LANES = frozenset({Lane.TO_HOST, Lane.TO_DEVICE, Lane.HOST})
"""Lanes whose work the host's processors do. A disk moves its bytes by itself."""


class Processors:
    """When they are at work for lanes beside the computation.

    beside: of what is done in a time alone, the share that is done while another lane is at work, 0 .. 1. With 0 the
    works take as long together as one after the other, whoever goes first. So what is there already keeps its time,
    and what comes later takes longer.
    """

    def __init__(self, beside: float) -> None:
        self._beside = beside
        self._busy: list[tuple[float, float]] = []

    def end(self, start: float, work: float) -> float:
        """When what begins at `start`, and takes `work` alone, ends."""
        at, left = start, work
        for begin, end in self._busy:
            if end <= at:
                continue
            if left <= begin - at:
                break
            if begin > at:
                left, at = left - (begin - at), begin
            done = (end - at) * self._beside
            if left <= done:
                return at + left / self._beside if left > 0 else at
            left, at = left - done, end
        return at + left

    def take(self, start: float, end: float) -> None:
        """A lane is at work in this time."""
        if end <= start or self._beside >= 1:
            return
        apart = [span for span in self._busy if span[1] < start or span[0] > end]
        joined = [span for span in self._busy if not (span[1] < start or span[0] > end)]
        whole = min([start, *(span[0] for span in joined)]), max([end, *(span[1] for span in joined)])
        self._busy = sorted([*apart, whole])

    def forget(self, until: float) -> None:
        """Nothing will begin before this time."""
        while self._busy and self._busy[0][1] <= until:
            del self._busy[0]


class ProcessorQueue:
    """Processors that compute for so many stages at a time. Who comes first is served first, and what is left of the
    time before that is used.
    """

    def __init__(self, at_once: int) -> None:
        self._places = [Processors(0.0) for _ in range(at_once)]

    def end(self, start: float, work: float) -> float:
        """When work that may begin at `start` ends, at the place where it ends first."""
        place = min(self._places, key=lambda place: place.end(start, work))
        end = place.end(start, work)
        place.take(start, end)
        return end

    def forget(self, until: float) -> None:
        """Nothing will begin before this time."""
        for place in self._places:
            place.forget(until)


class RankWork(NamedTuple):
    """What an instruction of a rank is, in every step alike.

    does  what it reads and writes
    lane  where it runs
    moved bytes that it moves on a lane of the rank's own, or of its message on model state
    """

    does: Effects
    lane: Lane
    moved: int


class Slots:
    """When the slots of a rank are free, by ring and number. held: number of those that are taken at the start."""

    def __init__(self, held: int) -> None:
        self._taken = {(False, slot) for slot in range(held)}
        self._begins: dict[tuple[bool, int], float] = {}
        self._over: dict[tuple[bool, int], float] = {}

    def begins(self, i: Instruction) -> float:
        """The time before which an instruction cannot start, because another part has its slot."""
        if i.slot < 0:
            return 0.0
        slot = i.op in PARAMETER_LOADS, i.slot
        if slot not in self._taken:
            self._taken.add(slot)
            self._begins[slot] = self._over.pop(slot, 0.0)
        return self._begins.get(slot, 0.0)

    def ran(self, i: Instruction, end: float) -> None:
        """An instruction ends at this time."""
        if i.slot < 0:
            return
        slot = i.op in PARAMETER_LOADS, i.slot
        self._over[slot] = max(self._over.get(slot, 0.0), end)
        if i.frees_slot:
            self._taken.remove(slot)


@dataclass
class SimulatedRank:
    """A rank on its way through its list.

    clock      when its last computation ends
    values     when what exists was made; or the message that makes it
    lanes      when the last message of a lane ends
    in_flight  reductions that have a buffer of their own, with the bucket; one that leaves the device ends with that
    last       its last collective over several stages
    awaited    the message for which it waits before it goes on (`ChunkTimes.waits`)
    slots      those of the parts that are on their way
    processors those of its host
    works      those of its instructions, as far as it has come
    of_state   those of instructions on model state, which are the same in each micro-batch
    ends       when its last computation of each step ended
    """

    number: int
    instructions: Sequence[Instruction]
    scope: Scope
    processors: Processors
    next: int = 0
    clock: float = 0.0
    values: dict[Value, float | Message] = field(default_factory=dict)
    lanes: dict[Lane, Message] = field(default_factory=dict)
    in_flight: deque[tuple[int, Message]] = field(default_factory=deque)
    last: Message | None = None
    awaited: Message | None = None
    slots: Slots = field(init=False)
    works: list[RankWork] = field(default_factory=list)
    of_state: dict[Instruction, RankWork] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    messages: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = Slots(len(self.scope.held_at_start))

    @property
    def work(self) -> RankWork:
        """That of the current instruction."""
        if self.next == len(self.works):
            i = self.current
            self.works.append(self._work_of(i) if i.micro_batch >= 0 else self._work_on_state(i))
        return self.works[self.next]

    def _work_on_state(self, i: Instruction) -> RankWork:
        if i not in self.of_state:
            self.of_state[i] = self._work_of(i)
        return self.of_state[i]

    def _work_of(self, i: Instruction) -> RankWork:
        lane, shape = i.lane, self.scope.shape
        moved = moved_bytes(i, shape) if lane in LOCAL_LANES else message_bytes(i, shape)
        return RankWork(effects(i, self.scope), lane, moved)

    @property
    def is_done(self) -> bool:
        return self.next == len(self.instructions)

    @property
    def current(self) -> Instruction:
        return self.instructions[self.next]

    def begin_again(self) -> None:
        """Run the list once more, with what it has left."""
        names = {Thing.NORM: Thing.LAST_NORM} if self.scope.border.leaves else {}
        names |= {self.scope.final(number): Thing.OWED for number in self.scope.shape.trained if names}
        left = {(names.get(value[0], value[0]), *value[1:]): made for value, made in self.values.items()}
        self.values = {value: left[value] for value in self.scope.at_start()}
        self.next = 0
