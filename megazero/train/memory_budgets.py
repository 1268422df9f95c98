"""--device-memory-budget and --host-memory-budget in a run: what is told of them, and what keeps them on a card."""

from __future__ import annotations

from megazero.checkpoint.agreement import broadcast_text
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.mpu.axes import Axes, axes_of
from megazero.mpu.grid import ProcessGrid
from megazero.plan.budget_changes import Budgets
from megazero.plan.budgets import budgets_of, has_budgets, memory_problems
from megazero.plan.leaving_disks import writes_activations
from megazero.plan.step_memory import rank_words
from megazero.plan.tier_peaks import run_peaks
from megazero.system import device as devices
from megazero.telemetry.units import size
from megazero.train.text_blocks import table


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


def budget_sentences(run: Run, axes: Axes, kind: str) -> list[str]:
    """A sentence on what a step takes of each budget, on the rank that takes most; none without budgets, or where the
    vocabulary or the body of attention is not known. kind: of device, cpu or cuda.
    """
    budgets, unknown = budgets_of(run, kind), kind == "cuda" and not devices.cuda_available()
    if not has_budgets(run) or run.model.vocab_size is None or unknown:
        return []
    every, told = run_peaks(run, axes, kind).every(), []
    tiers = (
        ("on the device", "--device-memory-budget", budgets.device, [peaks.device_bytes for peaks in every]),
        ("of memory", "--device-memory-budget", budgets.together, [peaks.total_bytes for peaks in every]),
        ("of host memory", "--host-memory-budget", budgets.host, [peaks.host_bytes for peaks in every]),
    )
    for where, flag, budget, found in tiers:
        if budget is not None:
            whose = rank_words(found.index(max(found)), axes)
            told.append(f"{whose} takes {size(max(found))} {where} at most by arithmetic, of {flag} {size(budget)}")
    return ["; ".join(told)]


def peaks_table(run: Run, world_size: int, kind: str) -> str:
    """The peaks of every stage in each tier; empty without budgets, or where the vocabulary is not known. On a CPU a
    column has the sum of device and host memory.
    """
    if not has_budgets(run) or run.model.vocab_size is None:
        return ""
    every = run_peaks(run, axes_of(run, world_size), kind).every()
    budgets, one = budgets_of(run, kind), kind == "cpu"
    found = [
        [f"{n:,}" for n in (peaks.device_bytes, peaks.host_bytes, *[peaks.total_bytes] * one, peaks.disk)]
        for peaks in every
    ]
    limits = [budgets.device, budgets.host, *[_together(budgets)] * one, None]
    return table(
        ["stage", "device", "host memory", *["together"] * one, "disks"],
        [
            *([str(peaks.stage), *cells] for peaks, cells in zip(every, found, strict=True)),
            ["budget", *("-" if limit is None else f"{limit:,}" for limit in limits)],
        ],
    )


def _together(budgets: Budgets) -> int | None:
    """What both tiers may take of a CPU's one memory."""
    if budgets.device is None or budgets.host is None:
        return budgets.together
    return budgets.device + budgets.host
