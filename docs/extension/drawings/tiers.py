"""Four runs of one model, each with more off the device: memory by tier and lanes over time, on one scale."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from megazero.config.parse import parse_run
from megazero.mpu.axes import axes_of
from megazero.plan.step_lists import StageLists
from megazero.plan.step_times import MachineRates, timed_traces
from megazero.program.trace import TimedStep
from megazero.report.tier_picture import PictureScale, tiers_svg

MODEL = (
    "--device cuda --precision bf16 --num-layers 20 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--vocab-size 32000 --data-path x --micro-batch-size 4 --global-batch-size 32 --recompute-granularity full"
)
RATES = MachineRates(40e12, to_host=12e9, to_device=12e9, update=60e9, update_host=6e9, read=3e9, write=2.5e9)
"""Of a card with 16 GB, and of one disk beside it."""


@dataclass(frozen=True)
class DrawnRun:
    """words: what stands above the picture. flags: what the run has besides `MODEL`."""

    words: str
    flags: str


_DISKS = "--offload-optimizer nvme --offload-params nvme --nvme-path disk"
RUNS = MappingProxyType(
    {
        "device": DrawnRun("Everything on the device", ""),
        "optimizer": DrawnRun("Optimizer state in host memory", "--offload-optimizer cpu"),
        "disks": DrawnRun("Optimizer state and parameters on disks", f"{_DISKS} --micro-batch-order horizontal"),
        "late": DrawnRun(
            "The same, vertical order, late updates", f"{_DISKS} --micro-batch-order vertical --late-update"
        ),
    }
)


@cache
def step_of(run: str) -> TimedStep:
    """The step of one of `RUNS`, on one rank."""
    parsed = parse_run(f"{MODEL} {RUNS[run].flags}".split(), 1)
    (found,) = timed_traces(StageLists(parsed, axes_of(parsed, 1), nccl=False), "cuda", RATES)
    assert found.timed is not None
    return found.timed


def tiers(run: str = "device") -> str:
    """One of `RUNS`, on the scale of them all."""
    scale = PictureScale.of([step_of(each) for each in RUNS])
    return tiers_svg(step_of(run), f"{RUNS[run].words}: the step ends after {step_of(run).end:.1f} s", scale=scale)
