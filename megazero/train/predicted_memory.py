"""The memory of a step, predicted before the first one: what keeps the budgets of memory on a card, and the file of
--memory-trace.
"""

from __future__ import annotations

from pathlib import Path

from megazero.checkpoint.agreement import attempt_on_all_ranks, broadcast_text
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.mpu.grid import ProcessGrid
from megazero.plan.budgets import has_budgets, memory_problems
from megazero.plan.leaving_disks import writes_activations
from megazero.plan.rates import ASSUMED, read_rates
from megazero.plan.step_lists import StageLists
from megazero.plan.timed_steps import timed_traces
from megazero.program.trace import write
from megazero.system import device as devices
from megazero.telemetry.units import size
from megazero.train.logs import as_config_error


def keep_budgets(run: Run, grid: ProcessGrid) -> None:
    """On a card: refuse a run that is above its budgets, on all ranks, and make the device's budget the limit of
    torch's allocator. Nothing may be allocated yet.

    Elsewhere a run has been refused before any process group exists (`requirements.budget_problems`): what attention
    keeps depends on its body, which is tried on the rank's own card. A collective of the world: a broadcast of a text.
    """
    if grid.device.type == "cpu" or not (has_budgets(run) or writes_activations(run)):
        return
    found = memory_problems(run, grid.world.size, grid.device.type) if grid.rank == 0 else []
    told = broadcast_text(grid.world, grid.device, "\n".join(found) or None) if grid.world.size > 1 else None
    if problems := found or (told.splitlines() if told else []):
        raise ConfigError(problems)
    if run.offload.device_memory_budget is not None:
        devices.limit_memory(grid.device, run.offload.device_memory_budget)


def write_memory_trace(steps: StageLists, path: Path, kind: str) -> str:
    """Write the memory of a step, and return a sentence on it. kind: as in `plan.step_memory.stage_trace`. Times are
    at the rates of --placement-rates, or at assumed ones.

    Raises ConfigError if it cannot be written.
    """
    file = steps.run.offload.placement_rates
    found = timed_traces(steps, kind, ASSUMED[kind] if file is None else read_rates(file))
    with as_config_error("--memory-trace"):
        files = write(found, path)
    peak = found[0].peak
    words, assumed = ", ".join(map(str, files)), "; its times are at assumed rates: --placement-rates has yours"
    return (
        f"{words}: the tensors of a step take {size(peak.total)} at most by arithmetic, on {found[0].rank} during "
        f"number {peak.number} of its list, {peak.instruction}" + assumed * (file is None and path.suffix == ".html")
    )


def trace_of_run(steps: StageLists, grid: ProcessGrid) -> str | None:
    """Rank 0 writes the file of --memory-trace, if the run has the flag, and gets the sentence. With the flag it is a
    collective of all ranks, which fail together.
    """
    path = steps.run.trainer.memory_trace
    if path is None:
        return None
    told: list[str] = []

    def act() -> None:
        told.append(write_memory_trace(steps, Path(path), grid.device.type))

    with as_config_error("--memory-trace"):
        attempt_on_all_ranks(grid.world, grid.device, act if grid.rank == 0 else None)
    return told[0] if told else None


def trace_of_plan(steps: StageLists, kind: str) -> str | None:
    """The same in a dry run: for any number of ranks, in this process alone. None without the flag."""
    path = steps.run.trainer.memory_trace
    return None if path is None else write_memory_trace(steps, Path(path), kind)
