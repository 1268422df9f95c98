"""A run's step in time: in every tier what the walk and the plan of the tiers say, and lanes as long as their bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from megazero.config.parse import parse_run
from megazero.mpu.axes import axes_of
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import run_peaks
from megazero.plan.step_times import MachineRates, timed_traces
from megazero.program.instruction import Lane
from megazero.program.memory import MemoryColumn
from megazero.program.trace import MemoryTrace, TimedStep
from megazero.program.traffic import traffic

RATES = MachineRates(1e9, to_host=2e7, to_device=3e7, update=4e7, update_host=5e6, read=6e6, write=7e6, messages=8e6)
PER_BYTE = {Lane.TO_HOST: 2e7, Lane.TO_DEVICE: 3e7, Lane.FROM_DISK: 6e6, Lane.TO_DISK: 7e6, Lane.SHARDS: 8e6}
MODEL = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 500 --data-path x "
    "--micro-batch-size 1 --global-batch-size 8 --precision bf16"
)
ON_DISKS = "--nvme-path d --nvme-buffer-bytes 4MB"
CASES = {
    "device": ("", 1),
    "ZeRO-3": ("--zero-stage 3", 2),
    "optimizer cpu, two stages": ("--pp 2 --offload-optimizer cpu --nvme-buffer-bytes 1MB", 2),
    "all on disks": (f"--offload-optimizer nvme --offload-params nvme {ON_DISKS}", 1),
    "late, vertical": (
        f"--offload-optimizer nvme --offload-params nvme {ON_DISKS} --late-update --micro-batch-order vertical",
        1,
    ),
    "activations": ("--offload-activations cpu", 1),
    "activations on disks": (f"--offload-activations nvme {ON_DISKS}", 1),
}


def traces(case: str, kind: str = "cuda") -> tuple[StageLists, list[MemoryTrace]]:
    words, ranks = CASES[case]
    run = parse_run(f"{MODEL} {words} --device {kind}".split(), ranks)
    steps = StageLists(run, axes_of(run, ranks), nccl=False)
    return steps, timed_traces(steps, kind, RATES)


def timed(trace: MemoryTrace) -> TimedStep:
    assert trace.timed is not None
    return trace.timed


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("case", CASES)
def test_every_tier_has_what_the_plan_says(case: str, kind: str) -> None:
    """The peaks that a run is refused by; activations in host memory as the walk has them."""
    steps, found = traces(case, kind)
    peaks = run_peaks(steps.run, steps.axes, kind)
    assert {timed(trace).peaks.device for trace in found} == {peak.device_bytes for peak in peaks}
    assert {timed(trace).peaks.disk for trace in found} == {peak.disk for peak in peaks}
    resting = {peak.host_bytes - peak.host.get("activations", 0) for peak in peaks}
    waiting = [max(s.columns.get(MemoryColumn.HOST, 0) for s in trace.samples) for trace in found]
    hosts = {timed(trace).peaks.host - most for trace, most in zip(found, waiting, strict=True)}
    assert hosts == resting and any(waiting) == case.startswith("activations")


@pytest.mark.parametrize("case", CASES)
def test_moments_cover_the_step_and_have_every_sample(case: str) -> None:
    for trace in traces(case)[1]:
        step = timed(trace)
        assert step.moments[0].start == 0.0 and step.end == max(s.end for spans in step.lanes.values() for s in spans)
        for before, after in pairwise(step.moments):
            assert before.end == after.start
        assert {moment.held.device for moment in step.moments} <= {sample.total for sample in trace.samples}


@pytest.mark.parametrize("case", CASES)
def test_a_lane_is_as_long_as_its_bytes(case: str) -> None:
    steps, found = traces(case)
    if steps.axes.pp > 1:
        found.sort(key=lambda trace: trace.rank)
    for stage, trace in enumerate(found):
        step, listed = timed(trace), steps.of(stage)
        moved = traffic(listed.instructions, listed.shape)
        for lane, rate in PER_BYTE.items():
            spans = step.lanes.get(lane, ())
            activations = not case.startswith("activations") or lane is Lane.SHARDS
            if activations or lane in step.lanes:
                assert sum(s.end - s.start for s in spans) == pytest.approx(moved.get(lane, 0) / rate), lane
            for one, other in pairwise(spans):
                assert one.end <= other.start + 1e-12, "a lane does one thing at a time"


def test_disks_that_are_twice_as_fast_make_a_step_shorter() -> None:
    steps, (slow,) = traces("all on disks")
    (fast,) = timed_traces(steps, "cuda", replace(RATES, read=1.2e7, write=1.4e7))
    assert timed(fast).end < timed(slow).end and timed(fast).peaks == timed(slow).peaks
