"""Messages that several simulated ranks issue: each starts when its last rank has come to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megazero.program.instruction import Instruction, Op, ProgramError
from megazero.program.shape import RankShape
from megazero.program.times import Span

Channel = tuple[int, int, bool]
"""(sending stage, receiving stage, whether it carries gradients)."""
WORLD, TIED = "all ranks", "the ranks of a tied embedding"
"""The groups with ranks on several stages."""


@dataclass(eq=False, slots=True)
class Message:
    """A message that ends at `end`; None: not all of its ranks have issued it. waits: how a rank waits for it."""

    waits: str
    end: float | None = None


@dataclass(slots=True)
class _Issue:
    """A rank's end of a message: whose it is, the number in its list, and since when it could start."""

    stage: int
    number: int
    instruction: Instruction
    start: float
    message: Message
    spans: list[Span]
    label: object
    """What it is, the same for all ranks of the message."""

    def __str__(self) -> str:
        return f"number {self.number} of stage {self.stage}'s list, {self.instruction}"


@dataclass
class _Line:
    """Messages that are run in the order in which they are issued, by member."""

    issued: dict[object, list[_Issue]]
    met: int = 0
    end: float = 0.0


@dataclass
class Meetings:
    """Where messages of several ranks meet.

    shapes    of the ranks, one for each stage
    transfer_time  of a message between stages
    """

    shapes: Sequence[RankShape]
    transfer_time: float
    _channels: dict[Channel, _Line] = field(default_factory=dict)
    _groups: dict[str, _Line] = field(default_factory=dict)
    _over: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._shared = [_shared(shape) for shape in self.shapes]
        """For each stage, which of the tied embedding's buckets each of its own is."""
        tied = [stage for stage, shared in enumerate(self._shared) if shared]
        members = {WORLD: range(len(self.shapes)), TIED: tied}
        self._groups = {group: _Line({stage: [] for stage in stages}) for group, stages in members.items()}

    def group_of(self, stage: int, i: Instruction) -> str | None:
        """The group of a collective over several stages; None for one among the ranks of one role."""
        if i.op is Op.NORM:
            return WORLD
        for number in i.buckets:
            bucket = self.shapes[stage].buckets[number]
            if i.op is Op.GATHER and bucket.rests_whole:
                continue
            if bucket.spans_stages and bucket.shards_span != (i.op is Op.REDUCE_ACROSS):
                return TIED
        return None

    def crosses(self, group: str | None) -> bool:
        """Whether the group of a collective has members on several stages."""
        return group is not None and len(self._groups[group].issued) > 1

    def take_over(self) -> list[Message]:
        """The messages that have ended since the last call."""
        over, self._over = self._over, []
        return over

    def transfer(self, stage: int, number: int, i: Instruction, start: float, spans: list[Span]) -> Message:
        """Issue one end of a message between stages. Raises ProgramError if the ends do not fit."""
        channel = (stage, i.peer, i.is_backward) if i.is_send else (i.peer, stage, i.is_backward)
        if channel not in self._channels:
            self._channels[channel] = _Line({True: [], False: []})
        line = self._channels[channel]
        message = Message(f"its message from stage {i.peer}")
        label = i.boundary, i.micro_batch
        line.issued[i.is_send].append(_Issue(stage, number, i, start, message, spans, label))
        self._meet(line, self.transfer_time)
        return message

    def collective(
        self,
        group: str | None,
        stage: int,
        number: int,
        i: Instruction,
        start: float,
        duration: float,
        spans: list[Span],
    ) -> Message:
        """Issue a collective of this group. Raises ProgramError if another rank's message of this turn is another."""
        if group is None:
            spans.append(Span(i, start, start + duration))
            return Message("", start + duration)
        line = self._groups[group]
        others = ", ".join(str(other) for other in line.issued if other != stage)
        message = Message(f"the same of stages {others}")
        label = i.op, tuple(self._shared[stage].get(bucket) for bucket in i.buckets)
        line.issued[stage].append(_Issue(stage, number, i, start, message, spans, label))
        self._meet(line, duration)
        return message

    def _meet(self, line: _Line, duration: float) -> None:
        """Run the line's next message if all of its members have issued it."""
        if line.met >= min(map(len, line.issued.values())):
            return
        issues = [issues[line.met] for issues in line.issued.values()]
        first = issues[0]
        for other in issues[1:]:
            if first.label != other.label:
                what = f"is message {line.met} of a group, where {first} is; {_differ(first, other)}"
                raise ProgramError(what, f"stage {other.stage}", other.number, other.instruction)
        start = max(line.end, *(issue.start for issue in issues))
        line.met, line.end = line.met + 1, start + duration
        for issue in issues:
            issue.message.end = line.end
            issue.spans.append(Span(issue.instruction, start, line.end))
            self._over.append(issue.message)

    def check_over(self) -> None:
        """Raise ProgramError unless every message has been issued by all of its ranks."""
        for line in (*self._channels.values(), *self._groups.values()):
            for issues in line.issued.values():
                for issue in issues[line.met :]:
                    counts = ", ".join(str(len(issues)) for issues in line.issued.values())
                    what = f"is never met: the ends of its channel or group have {counts} messages"
                    raise ProgramError(what, f"stage {issue.stage}", issue.number, issue.instruction)


def _shared(shape: RankShape) -> dict[int, int]:
    """Its buckets that several stages hold, in order: the k-th of each stage are the same bucket."""
    spanning = [number for number, bucket in enumerate(shape.buckets) if bucket.spans_stages]
    return {number: group for group, number in enumerate(spanning)}


def _differ(one: _Issue, other: _Issue) -> str:
    if not one.instruction.is_transfer:
        return "the ranks of a group have different orders"
    sent, received = (one, other) if one.instruction.is_send else (other, one)
    return (
        f"boundary {sent.instruction.boundary} of micro-batch {sent.instruction.micro_batch} is sent, boundary "
        f"{received.instruction.boundary} of micro-batch {received.instruction.micro_batch} is received"
    )
