"""The times that a simulation takes, of each model chunk's computations and of messages, and the one that it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megazero.program.instruction import Instruction, Kind, Lane, Op, Units
from megazero.system.given import given_count, given_time


@dataclass(frozen=True)
class ChunkTimes:
    """Times of one micro-batch, in seconds or any other unit.

    forward   of each model chunk
    backward  of each model chunk, both parts together
    message   of one message between stages
    weight    of each model chunk: the weights' part of `backward`; None: half of it
    units     of each model chunk: the relative times of its units; None: all the same
    per_byte  of a message on another lane: the time for each byte that a rank sends, or moves on a lane of its own; 0
              for lanes that are not named
    latency   of each such message, in addition
    update    of an update, for each byte of gradients that the rank updates
    beside    the share of its speed that work keeps while a lane of the host's processors is at work
              (`program.simulated_rank`): 1 where the computation runs elsewhere
    carrying  of the host's processors for each byte that disks read or write: 0 where a disk moves them by itself
    waits     whether a rank waits for each message on model state before it goes on (--no-overlap)
    at_once   where stages share processors: how many of them compute at a time. Times are those of a stage while all of
              them compute, so that so many alone are faster; None: none waits for the processors of another
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    message: float = 0.0
    weight: tuple[float, ...] | None = None
    units: tuple[tuple[float, ...], ...] | None = None
    per_byte: Mapping[Lane, float] = field(default_factory=dict)
    latency: float = 0.0
    update: float = 0.0
    beside: float = 1.0
    carrying: float = 0.0
    waits: bool = False
    at_once: int | None = None

    def alone(self, stages: int) -> ChunkTimes:
        """The times of a stage while no more than `at_once` of so many compute."""
        share = self.share(stages)
        if share == 1:
            return self
        forward, backward = (tuple(seconds * share for seconds in of) for of in (self.forward, self.backward))
        weight = None if self.weight is None else tuple(seconds * share for seconds in self.weight)
        return replace(self, forward=forward, backward=backward, weight=weight)

    def share(self, stages: int) -> float:
        """The share of its time that a stage takes while no more than `at_once` of so many compute."""
        return 1.0 if self.at_once is None else min(1.0, self.at_once / stages)

    def computation(self, i: Instruction, units: Units, count: int) -> float:
        """The time of a computation of the units [first, stop) of a chunk of `count` units."""
        whole = self.of(i.op, i.model_chunk)
        first, stop = units
        if stop - first == count:
            return whole
        if self.units is None:
            return whole * (stop - first) / count
        shares = self.units[i.model_chunk]
        return whole * sum(shares[first:stop]) / sum(shares)

    def of(self, op: Kind, model_chunk: int) -> float:
        """The time of a computation of a whole chunk."""
        if op is Op.FORWARD:
            return self.forward[model_chunk]
        whole = self.backward[model_chunk]
        if op is Op.BACKWARD:
            return whole
        weight = whole / 2 if self.weight is None else self.weight[model_chunk]
        return weight if op is Op.BACKWARD_WEIGHT else whole - weight


def uniform_times(
    chunks: int, forward: float = 1.0, backward: float = 2.0, message: float = 0.0, weight: float | None = None
) -> ChunkTimes:
    """The same times for each of `chunks` model chunks. weight: the weights' part of `backward`.

    Raises ValueError for no chunks and for a time that is negative or not finite, TypeError for what is no number.
    """
    given_count("chunks", chunks)
    for name, time in {"forward": forward, "backward": backward, "message": message}.items():
        given_time(name, time)
    if weight is not None:
        given_time("weight", weight)
    return ChunkTimes(
        (forward,) * chunks, (backward,) * chunks, message, None if weight is None else (weight,) * chunks
    )


def profiled_times(
    stages: int, virtual_stages: int, forward: float, backward_input: float, backward_weight: float, message: float
) -> ChunkTimes:
    """Times that are given for a whole stage, divided equally among its chunks; that of a message is not divided."""
    v = virtual_stages
    return uniform_times(stages * v, forward / v, (backward_input + backward_weight) / v, message, backward_weight / v)


class Span(NamedTuple):
    """The start and the end of an instruction. Simulations make one for each: a tuple is made in half the time."""

    instruction: Instruction
    start: float
    end: float
