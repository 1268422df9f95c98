"""Bytes that one unit of a model takes, measured by torch's profiler, which sees every allocation of torch's allocator.

It sees those inside kernels too. It shares no code with `megazero.plan.activations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from megazero.mpu.gradient import Write
from megazero.mpu.parameter import ParameterKind, spec_of
from megazero.system.collector import without_collections


@dataclass(frozen=True)
class Bytes:
    """Bytes alive after something, beyond those before it, and the most in between."""

    left: int
    peak: int
    made: tuple[int, ...] = ()


PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise")


class MemoryEvent(NamedTuple):
    """Bytes that a thread allocated, or freed (below 0), at a time in nanoseconds."""

    at: int
    size: int
    thread: int


def allocations(recorded: profile) -> list[MemoryEvent]:
    """What a profiler with profile_memory has seen, in order.

    Without the memory that matrix products take for themselves and give back, for it depends on the processor: oneDNN
    takes some for bf16, and for fp16 where the processor has a unit for that.
    """
    assert recorded.kineto_results is not None
    changes: list[MemoryEvent] = []
    products: dict[int, list[tuple[int, int]]] = {}
    events: Any = recorded.kineto_results.events()
    for event in events:
        at, thread = event.start_ns(), event.start_thread_id()
        if event.name() == "[memory]":
            changes.append(MemoryEvent(at, event.nbytes(), thread))
        elif event.name() in PRODUCTS:
            products.setdefault(thread, []).append((at, at + event.duration_ns()))
    changes.sort(key=lambda change: change.at)
    scratch = {number for thread, spans in products.items() for number in _given_back(changes, thread, spans)}
    return [change for number, change in enumerate(changes) if number not in scratch]


def _given_back(changes: Sequence[MemoryEvent], thread: int, spans: list[tuple[int, int]]) -> Iterator[int]:
    """The numbers of a thread's changes that free what was allocated in the same span, and of those allocations."""
    waiting, (start, stop) = iter(sorted(spans)), (0, -1)
    taken: dict[int, list[int]] = {}
    for number, change in enumerate(changes):
        while change.at > stop:
            found = next(waiting, None)
            if found is None:
                return
            (start, stop), taken = found, {}
        if change.at < start or change.thread != thread:
            continue
        if change.size > 0:
            taken.setdefault(change.size, []).append(number)
        elif taken.get(-change.size):
            yield from (taken[-change.size].pop(), number)


def metered(act: Callable[[], Any]) -> tuple[Any, Bytes]:
    """What `act` returns, and the bytes that it allocated (`allocations`)."""
    # what a test before has left in cycles is not freed meanwhile: to collect it first takes over half a second in a
    # process that has run many tests
    with without_collections(), profile(profile_memory=True) as recorded:
        made = act()
    sizes = [change.size for change in allocations(recorded)]
    alive = list(accumulate(sizes, initial=0))
    return made, Bytes(alive[-1], max(alive), tuple(sizes))


def is_table(parameter: Tensor) -> bool:
    """Whether it belongs to an embedding or a head, whose gradients no backward defers."""
    return spec_of(parameter).kind is ParameterKind.EMBEDDING


class Target:
    """A gradient target that adds each gradient to a buffer at once, or keeps it as a split backward does."""

    def __init__(self, parameter: Tensor, kept: list[Write] | None) -> None:
        wide = torch.promote_types(parameter.dtype, torch.float32)
        self.buffer, self.kept = torch.zeros(parameter.shape, dtype=wide), None if is_table(parameter) else kept

    def add(self, write: Write) -> None:
        if self.kept is None:
            write(self.buffer, True)
        else:
            self.kept.append(write)
