"""The order in which ranks launch collectives and messages: a recorder, and what must hold between the ranks.

NCCL runs what a group is given in the order of the launches, and does not compare: two ranks that launch in different
orders, or with other counts, hang or give wrong sums. gloo often finishes all the same. So the orders are recorded and
compared.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from megazero.mpu import collectives
from megazero.mpu.absent import AbsentGroup
from megazero.mpu.collectives import CommunicationHandle
from megazero.mpu.grid import Group
from megazero.mpu.p2p import Channels, Tag

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
MESSAGES = ("hidden states", "gradients")


class Line(NamedTuple):
    """What orders launches: a process group, or with NCCL the two ranks of a channel (sender, receiver)."""

    ranks: tuple[int, ...]
    name: str

    def __str__(self) -> str:
        sender, *others = self.ranks
        if self.name in MESSAGES:
            return f"{self.name} from rank {sender} to rank {others[0]}"
        return f"group {self.name[:6]} of ranks {list(self.ranks)}"


class Launch(NamedTuple):
    line: Line
    what: str


Trace = dict[str, list[Launch | int]]
"""What one rank did, by thread: its launches, and as a number the wait for the launch with this index in the list."""


class _Recorder:
    def __init__(self, carried: bool) -> None:
        self.carried, self.trace, self.sent = carried, Trace(), dict[Channels, list[Callable[[], None]]]()
        self.recording = True

    def launch(self, line: Line, what: str) -> Callable[[], None]:
        """Add a launch; returns a function that adds the wait for it."""
        events = self.trace.setdefault(threading.current_thread().name, [])
        number = len(events)
        events.append(Launch(line, what))
        return lambda: events.append(number)

    def collective(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def recorded(*arguments: Any, **named: Any) -> Any:
            bound = signature.bind(*arguments, **named)
            bound.apply_defaults()
            group: Group = bound.arguments["group"]
            # what was imported meanwhile keeps this function
            if not self.recording or group.handle is None or isinstance(group, AbsentGroup):
                return original(*arguments, **named)
            parts = [_described(name, value) for name, value in bound.arguments.items() if name != "group"]
            line = Line(group.ranks, group.handle.group_name)
            wait = self.launch(line, ", ".join([original.__name__, *parts]))
            if original.__name__ == "barrier":
                wait()
            return self._handle(original, arguments, named, wait)

        return recorded

    def message(self, original: Callable[..., Any], *, sends: bool) -> Callable[..., Any]:
        def recorded(channels: Channels, tensor: Tensor, stage: int, tag: Tag) -> Any:
            own, other = channels.grid.rank, channels.grid.pp.ranks[stage]
            line = Line((own, other) if sends else (other, own), MESSAGES[tag.backward])
            wait = self.launch(line, f"{tag}, {_described('tensor', tensor)}")
            if sends:
                self.sent.setdefault(channels, []).append(wait)
            return self._handle(original, (channels, tensor, stage, tag), {}, wait)

        return recorded

    def flush(self, original: Callable[[Channels], None]) -> Callable[[Channels], None]:
        def recorded(channels: Channels) -> None:
            for wait in self.sent.pop(channels, []):
                wait()
            original(channels)

        return recorded

    def _handle(
        self, original: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any], wait: Callable[[], None]
    ) -> Any:
        handle = original(*arguments, **named) if self.carried else CommunicationHandle()

        def waited() -> None:
            wait()
            handle.wait()

        return handle if handle is None else CommunicationHandle(after=waited)


def _described(name: str, value: object) -> str:
    return f"{value.numel()} {str(value.dtype)[6:]}" if isinstance(value, Tensor) else f"{name} {value}"


@contextmanager
def recorded_launches(*, carried: bool = True) -> Iterator[Trace]:
    """A context in which this process's launches are recorded, as the program asks for them, whatever carries them.

    carried: False: nothing is communicated, and results are whatever their memory holds. So a planted fault cannot hang
    """
    recorder = _Recorder(carried)
    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            original: Callable[..., Any] = getattr(collectives, name)
            for module in [module for key, module in sys.modules.items() if key.startswith("megazero.")]:
                if vars(module).get(name) is original:
                    patch.setattr(module, name, recorder.collective(original))
        patch.setattr(Channels, "send", recorder.message(Channels.send, sends=True))
        patch.setattr(Channels, "receive", recorder.message(Channels.receive, sends=False))
        patch.setattr(Channels, "flush", recorder.flush(Channels.flush))
        yield recorder.trace
    recorder.recording = False


# --- what must hold --------------------------------------------------------------------------------------------------


def differences(traces: Sequence[Trace]) -> list[str]:
    """For each line whose members launched differently: the first launch that differs, in words."""
    launched: dict[Line, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for rank, trace in enumerate(traces):
        for events in trace.values():
            for event in events:
                if isinstance(event, Launch):
                    launched[event.line][rank].append(event.what)
    found = []
    for line, by_rank in launched.items():
        first, *others = line.ranks
        for other in others:
            pairs = zip_longest(by_rank[first], by_rank[other], fillvalue="nothing")
            unequal = next(((n, a, b) for n, (a, b) in enumerate(pairs) if a != b), None)
            if unequal is not None:
                number, ours, theirs = unequal
                found.append(f"{line}: launch {number} is {ours} on rank {first}, and {theirs} on rank {other}")
    return found


ONE_QUEUE = "one queue"
RULES = {
    "streams": "each group has a stream of its own",
    "one at a time": "a card runs one collective at a time",
    ONE_QUEUE: "one hardware queue, as with CUDA_DEVICE_MAX_CONNECTIONS=1",
}
"""How a card may run launches.

Under each rule a rank's launches and waits are worked off in order, and a wait lasts until all members have started
that launch. A launch starts at once with streams; in one queue when the line's launch before it is complete, and what
comes later is behind it; one at a time when all earlier collectives of the rank are complete (messages take few
multiprocessors, and run beside them).
"""


class _Agent:
    """A thread of a rank that works off its list."""

    def __init__(self, rank: int, thread: str, events: list[Launch | int]) -> None:
        self.rank, self.thread, self.events, self.at = rank, thread, events, 0
        self.numbers: dict[int, int] = {}
        """Of each launch in the list: its number on its line."""
        self.last_collective: tuple[Line, int] | None = None

    @property
    def current(self) -> Launch | int:
        return self.events[self.at]


def deadlock(traces: Sequence[Trace], rule: str) -> str | None:
    """Where ranks stop for ever under a rule of `RULES`, in words; None if all come to the end.

    For traces without `differences`. Groups that share two ranks, or more groups in a circle, deadlock where launches
    wait for each other and ranks take the groups in different orders.
    """
    agents = [_Agent(rank, thread, events) for rank, trace in enumerate(traces) for thread, events in trace.items()]
    started: dict[Line, dict[int, int]] = defaultdict(lambda: defaultdict(int))

    def complete(line: Line, number: int) -> bool:
        return all(started[line][rank] > number for rank in line.ranks)

    def needed(agent: _Agent) -> tuple[Line, int] | None:
        """What the agent's current event waits for."""
        event = agent.current
        if not isinstance(event, Launch):
            launch = agent.events[event]
            assert isinstance(launch, Launch)
            return launch.line, agent.numbers[event]
        if rule == ONE_QUEUE:
            return event.line, started[event.line][agent.rank] - 1
        return agent.last_collective if rule == "one at a time" and event.line.name not in MESSAGES else None

    def blocked(agent: _Agent) -> bool:
        awaited = needed(agent)
        return awaited is not None and not complete(*awaited)

    moved = True
    while moved:
        moved = False
        for agent in agents:
            while agent.at < len(agent.events) and not blocked(agent):
                event = agent.current
                if isinstance(event, Launch):
                    number = agent.numbers[agent.at] = started[event.line][agent.rank]
                    started[event.line][agent.rank] += 1
                    if event.line.name not in MESSAGES:
                        agent.last_collective = event.line, number
                agent.at += 1
                moved = True
    stuck = []
    for agent in agents:
        awaited = needed(agent) if agent.at < len(agent.events) else None
        if awaited is not None:
            line, number = awaited
            missing = [rank for rank in line.ranks if started[line][rank] <= number]
            stuck.append(f"rank {agent.rank} waits for launch {number} of {line}, which ranks {missing} have not begun")
    return f"deadlock where {RULES[rule]}: {'; '.join(stuck)}" if stuck else None


def check(traces: Sequence[Trace], rules: Iterable[str] = RULES) -> None:
    """All ranks of a group launch the same in the same order, and under none of these rules is there a deadlock."""
    wrong = differences(traces) or [found for rule in rules if (found := deadlock(traces, rule)) is not None]
    assert not wrong, "\n".join(wrong)
