"""The step of a rank of every stage in time: when each lane works and what lies in which tier, at given rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megazero.plan.bytes import StageBytes, stage_bytes
from megazero.plan.leaving_disks import activation_pieces
from megazero.plan.rates import MachineRates
from megazero.plan.recompute import activation_plan, recompute_table
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import stage_trace
from megazero.plan.step_times import step_times
from megazero.program.simulate import simulate
from megazero.program.trace import MemoryTrace, TierBytes, TimedStep, timed_step


def timed_traces(steps: StageLists, kind: str, rates: MachineRates) -> list[MemoryTrace]:
    """The memory of a step on a rank of each stage with its times, that with the largest peak first.

    kind: of device, cpu or cuda, as in `plan.step_memory.stage_trace`.
    """
    states = stage_bytes(steps.run, steps.axes)
    found = [stage_trace(steps, stage, state, kind) for stage, state in enumerate(states)]
    timed = _timed(steps, kind, rates, found, states)
    both = [replace(trace, timed=step) for trace, step in zip(found, timed, strict=True)]
    return sorted(both, key=lambda each: -each.peak.total)


def _timed(
    steps: StageLists, kind: str, rates: MachineRates, traces: Sequence[MemoryTrace], states: Sequence[StageBytes]
) -> list[TimedStep]:
    """By stage; times are seconds. All stages begin at 0 with a step that follows another."""
    run, stages = steps.run, [steps.of(stage) for stage in range(steps.axes.pp)]
    hidden = activation_plan(run, kind).hidden_bytes
    times = step_times(run, recompute_table(run, steps.axes, kind), hidden, rates)
    lists, shapes = [each.instructions for each in stages], [each.shape for each in stages]
    report = simulate(lists, times, shapes, border=stages[0].border)
    return [
        timed_step(lists[stage], report, stage, trace.samples, resting(steps, stage, state))
        for stage, (trace, state) in enumerate(zip(traces, states, strict=True))
    ]


def resting(steps: StageLists, stage: int, state: StageBytes) -> TierBytes:
    """What lies in host memory and in files all the time: state, slots, and buffers of the files."""
    pieces, off = activation_pieces(steps.of(stage)), state.elsewhere
    files = off.files + pieces.file_bytes(len(steps.run.offload.nvme_path))
    return TierBytes(0, off.memory + pieces.buffers, files)
