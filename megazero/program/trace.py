"""A rank's step, before it runs: the bytes at every instruction, and in time what its lanes do and what lies in every
tier meanwhile.

The simulation says when an instruction runs (`simulate`), and the walk how many bytes are alive while it does
(`memory_walk`). The walk goes through the list in its order, which is that of the computations. So the bytes of what
stands between two computations count for the second one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megazero.program.instruction import READ_LANES, WRITE_LANES, Instruction, Lane
from megazero.program.memory import MemoryColumn, Sample, StepBytes, UnitKey
from megazero.program.memory_walk import peak, samples, spare_buffers
from megazero.program.scope import Scope
from megazero.program.simulate import SimulationReport
from megazero.program.times import Span

LANES: Mapping[Lane, str] = MappingProxyType(
    {
        Lane.COMPUTE: "compute",
        Lane.STAGES: "stages",
        Lane.SHARDS: "shards",
        Lane.ACROSS: "across",
        Lane.TENSOR: "tensor",
        **READ_LANES,
        Lane.TO_DEVICE: "to device",
        Lane.TO_HOST: "to host",
        Lane.HOST: "host",
        **WRITE_LANES,
    }
)
"""The lanes of a picture from top to bottom, with their names there."""


@dataclass(frozen=True)
class TierBytes:
    """Bytes in every tier."""

    device: int
    host: int
    disk: int


@dataclass(frozen=True)
class HeldBytes:
    """What lies in every tier from `start` to `end`."""

    start: float
    end: float
    held: TierBytes


@dataclass(frozen=True)
class TimedStep:
    """A step of one rank. Times are those of the simulation.

    moments  one after the other, from 0 to the end of the last lane
    lanes    what runs on each lane, in order of time; lanes on which nothing takes time are left out
    """

    moments: tuple[HeldBytes, ...]
    lanes: Mapping[Lane, tuple[Span, ...]]

    @property
    def end(self) -> float:
        return self.moments[-1].end

    @property
    def peaks(self) -> TierBytes:
        """The most bytes of each tier; not all of them at the same time."""
        held = [moment.held for moment in self.moments]
        return TierBytes(*(max(getattr(each, tier) for each in held) for tier in ("device", "host", "disk")))


@dataclass(frozen=True)
class MemoryTrace:
    """The memory of one rank's step.

    rank     whose it is, in words
    samples  at every instruction
    peak     the first instruction at which most bytes are alive, with every allocation
    units    the names of its units
    timed    the same step in time, where rates are known
    """

    rank: str
    samples: Sequence[Sample]
    peak: Sample
    units: Mapping[UnitKey, str]
    timed: TimedStep | None = None


def trace(
    rank: str, instructions: Sequence[Instruction], scope: Scope, sizes: StepBytes, units: Mapping[UnitKey, str]
) -> MemoryTrace:
    """The memory of a rank that runs this list, not for the first time. units: the names of its units."""
    of = instructions, scope, sizes, spare_buffers(instructions, scope, sizes)
    return MemoryTrace(rank, tuple(samples(*of)), peak(*of), dict(units))


def timed_step(
    instructions: Sequence[Instruction], report: SimulationReport, rank: int, walked: Iterable[Sample], rests: TierBytes
) -> TimedStep:
    """The step of a rank.

    instructions  its list
    report        a simulation of one step
    rank          its number there
    walked        a sample of each instruction
    rests         what lies in host memory and on disks all the time; of the device nothing
    """
    spans = report.spans[rank]
    lanes = lanes_of(report, rank)
    ends = [span.end for of_lane in lanes.values() for span in of_lane]
    times = iter(spans)
    moments, most, start = list[HeldBytes](), TierBytes(0, 0, 0), 0.0
    span = next(times, None)
    for i, sample in zip(instructions, walked, strict=True):
        most = _larger(most, _held(sample, rests))
        if span is not None and i is span.instruction:
            moments.append(HeldBytes(start, span.end, most))
            most, start, span = TierBytes(0, 0, 0), span.end, next(times, None)
    assert span is None, f"{span} is not in the list, or not in its order"
    if most.device and start < max(ends, default=0.0):
        moments.append(HeldBytes(start, max(ends), most))
    return TimedStep(tuple(moments), lanes)


def lanes_of(report: SimulationReport, rank: int) -> dict[Lane, tuple[Span, ...]]:
    """What takes time on each lane of a rank, in the order of `LANES`."""
    by_lane: dict[Lane, list[Span]] = {lane: [] for lane in LANES}
    for span in sorted((*report.spans[rank], *report.messages[rank]), key=lambda span: span.start):
        if span.end > span.start and span.instruction.lane in by_lane:
            by_lane[span.instruction.lane].append(span)
    return {lane: tuple(spans) for lane, spans in by_lane.items() if spans}


def _held(sample: Sample, rests: TierBytes) -> TierBytes:
    """What a sample has in every tier. On a CPU state that has left the device counts for the host."""
    device = sample.total - sample.columns.get(MemoryColumn.OFFLOADED, 0)
    return TierBytes(device, rests.host + sample.columns.get(MemoryColumn.HOST, 0), rests.disk)


def _larger(one: TierBytes, other: TierBytes) -> TierBytes:
    return TierBytes(max(one.device, other.device), max(one.host, other.host), max(one.disk, other.disk))
