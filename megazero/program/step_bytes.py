"""The bytes of what a rank holds in a step beside its buckets: hidden states, and what units keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megazero.program.simulate import IN_FLIGHT


class UnitMemory(Protocol):
    """Bytes of one unit for one micro-batch (`plan.activations`).

    input     of its input that the unit keeps until backward: all, a tp rank's part, or 0
    kept      all else that it keeps from its forward to its backward
    forward   the most that its forward holds, its output included and its input not
    backward  the most that its backward holds, what it keeps and its input's gradient included, and its output's
              gradient and its input not
    deferred  what it keeps from the input's half of a split backward to the weights' half
    """

    @property
    def input(self) -> int: ...
    @property
    def kept(self) -> int: ...
    @property
    def forward(self) -> int: ...
    @property
    def backward(self) -> int: ...
    @property
    def deferred(self) -> int: ...


@dataclass(frozen=True)
class UnitSizes:
    """`UnitMemory` as plain numbers."""

    input: int = 0
    kept: int = 0
    forward: int = 0
    backward: int = 0
    deferred: int = 0


@dataclass(frozen=True)
class StepBytes:
    """The sizes of what a rank holds, beside its buckets' columns.

    hidden     of the hidden states between two units of one micro-batch, and of a message between stages
    units      by the rank's own number of a chunk and by unit
    optimizer  of all optimizer columns on the device: master weights and moments
    host       of what is not there, in host memory, where that is the device's own: on a CPU
    feedback   of what error feedback keeps of gradients
    logits     of a block of logits that is kept from step to step, as on a CPU
    host_buffer
               of each host buffer through which activations go on to disks; 0: each is as large as what it holds
    in_flight  number of reductions with a buffer of their own that are on their way at a time; 0 without overlap
    cast       of the copy that is reduced, for each byte of a gradient, where gradients travel in another dtype
    """

    hidden: int
    units: tuple[tuple[UnitMemory, ...], ...]
    optimizer: int = 0
    host: int = 0
    feedback: int = 0
    logits: int = 0
    host_buffer: int = 0
    in_flight: int = IN_FLIGHT
    cast: float = 0.0
