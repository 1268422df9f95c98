"""The placement of a run with --placement auto: rank 0 chooses it, and every rank takes it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megazero.checkpoint.agreement import broadcast_text, raise_on_all_ranks
from megazero.checkpoint.manager import FoundCheckpoint
from megazero.checkpoint.resume_changes import Change, compare, run_from
from megazero.config.dump import plain_value
from megazero.config.placement import AUTO, FLAGS, ROWS, applied, as_flags
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.mpu.axes import Axes
from megazero.mpu.grid import ProcessGrid
from megazero.plan.budgets import budgets_of
from megazero.plan.placed_step import Cluster, Machine, PlacedStep
from megazero.plan.placement import EQUAL, PlacementChoice, choose_placement
from megazero.plan.rates import MachineRates, read_rates
from megazero.plan.search_limits import SearchLimits
from megazero.system import device as devices
from megazero.system import host_memory
from megazero.telemetry.units import size
from megazero.train.disk_checks import free_in
from megazero.train.rates import measured_rates


@dataclass(frozen=True)
class Placed:
    """A run whose placement is decided, and what there is to say about it."""

    run: Run
    told: tuple[str, ...] = ()


def placed_run(run: Run, grid: ProcessGrid, ranks_here: int) -> Placed:
    """The run with the placement that rank 0 has chosen, if --placement auto asks for one.

    ranks_here: the ranks of this host, which share the folders. Without --placement-rates all ranks measure
    (`train.rates`). Then it is a collective of the world: an all-reduce and two broadcasts. Raises ConfigError on all
    ranks if nothing keeps to the budgets.
    """
    if run.offload.placement != AUTO:
        return Placed(run)
    rates = measured_rates(run, grid) if run.offload.placement_rates is None else None
    said: dict[str, Any] = {}
    failure: Exception | None = None
    if grid.world.index == 0:
        try:
            found = chosen(run, grid.axes, grid.device.type, rates, ranks_here, nccl=grid.world.is_on_device)
            settings = {field: plain_value(value) for field, value in found.settings}
            said = {"settings": settings, "told": found.told}
        except ConfigError as error:
            said = {"problems": error.problems}
        except Exception as error:
            failure = error
    raise_on_all_ranks(grid.world, grid.device, failure)
    said = json.loads(broadcast_text(grid.world, grid.device, json.dumps(said)) or "{}")
    if "problems" in said:
        raise ConfigError(said["problems"])
    return Placed(with_choice(run, said["settings"]), tuple(said["told"]))


def rates_problems(run: Run) -> tuple[str, ...]:
    """What is wrong with the file of --placement-rates, if the run names one."""
    try:
        if run.offload.placement_rates is not None:
            read_rates(run.offload.placement_rates)
    except ConfigError as error:
        return error.problems
    return ()


def placed_changes(
    changes: Sequence[Change], run: Run, found: FoundCheckpoint | None, axes: Axes
) -> tuple[Change, ...]:
    """The differences from the run of a checkpoint, with those of the placement that was found after the others."""
    if found is None:
        return ()
    rows = {row.field.replace("_", "-") for row in ROWS.values()}
    now = compare(run_from(found.run), run, found.layout, axes.sizes).changes
    placement = [change for change in now if change.field in rows]
    return (*(change for change in changes if change.field not in rows), *placement)


@dataclass(frozen=True)
class ChosenPlacement:
    """Settings of a run (`config.placement.ROWS`), and sentences about them."""

    settings: tuple[tuple[str, Any], ...]
    told: tuple[str, ...]


def chosen(
    run: Run, axes: Axes, kind: str, rates: MachineRates | None, ranks_here: int | None, *, nccl: bool
) -> ChosenPlacement:
    """The choice for this run. rates: measured ones; None: those of --placement-rates. kind: of device, cpu or cuda.
    ranks_here: that share this host's memory and its disks; None: the ranks are elsewhere, and these are no limit.

    Communicates nothing. Raises ConfigError.
    """
    file = run.offload.placement_rates
    used = read_rates(file) if file is not None else rates
    assert used is not None, "without a file the rates are measured"
    limits = _limits(run, kind, int(used.workspace or 0), ranks_here)
    choice = choose_placement(Machine(run, Cluster(axes, kind, nccl), used), limits)
    return ChosenPlacement(choice.best.settings, (*_lines(choice, limits), _rates_line(used, file)))


def _limits(run: Run, kind: str, workspace: int, ranks_here: int | None) -> SearchLimits:
    """The budgets of a run, and what this host has for each of its ranks. On a CPU the device's budget is one of both
    tiers, as in `plan.budgets.budgets_of`.
    """
    device, host = run.offload.device_memory_budget, run.offload.host_memory_budget
    together = budgets_of(run, kind).together
    limits = SearchLimits(device, host, memory=together, workspace=workspace, is_one=kind == "cpu")
    if ranks_here is None:
        return limits
    every, folders = host_memory.limit_bytes(), run.offload.nvme_path
    own = devices.memory_bytes(torch.device("cpu"))
    room = None if every is None else max(0, every // ranks_here - own)
    memory = min((limit for limit in (together, room) if limit is not None), default=None)
    there = bool(folders) and all(map(os.path.isdir, folders))
    disk = free_in(folders) // ranks_here if there else None
    return replace(limits, disk=disk, memory=memory)


def with_choice(run: Run, settings: dict[str, Any]) -> Run:
    """The run with these settings in place of the search, so that its dump and its checkpoints say what it does."""
    return applied(run, {**settings, "placement": FLAGS, "placement_rates": None})


def _lines(choice: PlacementChoice, budgets: SearchLimits) -> Iterator[str]:
    """What was chosen, what it takes, and what the next best would cost."""
    best, other = choice.best, choice.next_best
    yield _flags(best)
    computed = best.computed
    share = f"{computed / best.seconds:.0%}"
    yield f"predicted: a step of {best.seconds:.3g} s, of which {computed:.3g} s ({share}) are computation"
    peak = best.device
    stage = f" of stage {peak.stage}" * (best.machine.cluster.axes.pp > 1)
    own = f"{size(budgets.workspace)} of products, " * (budgets.workspace > 0)
    tiers = [f"device {_of(peak.nbytes, budgets.device)}, {own}fullest{stage} at {peak.instruction}"]
    tiers += [f"host memory {_of(best.host, budgets.host)}"] * (best.host > 0)
    tiers += [f"disks {size(best.disk)}"] * (best.disk > 0)
    yield f"takes, of a rank: {'; '.join(tiers)}"
    if other is None:
        yield f"next best: no other combination keeps to the budgets; {choice.looked_at} steps were simulated"
        return
    more = other.seconds / best.seconds - 1
    cost = "as long" if abs(more) < EQUAL else f"{more:.1%} {'longer' if more > 0 else 'shorter, and less simple'}"
    yield f"next best: {_flags(other)}: {other.seconds:.3g} s, {cost}; {choice.looked_at} steps were simulated"


def _of(nbytes: int, budget: int | None) -> str:
    return size(nbytes) + ("" if budget is None else f" of {size(budget)}")


def _flags(step: PlacedStep) -> str:
    return as_flags(dict(step.settings)) or "all on the device, on time, in horizontal order"


def _rates_line(rates: MachineRates, file: str | None) -> str:
    """The rates, so that a file of --placement-rates can have them."""
    given = rates.plain()
    own = f", and workspace: {given.pop('workspace'):.0f}" if "workspace" in given else ""
    numbers = ", ".join(f"{name}: {_rate(name, value)}" for name, value in given.items())
    return f"rates {'measured now' if file is None else f'of {file}'}, in a second: {{{numbers}}}{own}"


def _rate(name: str, value: float) -> str:
    if name in ("flops", "beside"):
        return f"{value:.3g}"
    return f"{value / 1e9:.3g}GB" if value >= 1e8 else f"{value / 1e6:.3g}MB"
