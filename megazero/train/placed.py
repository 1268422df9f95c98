"""The placement of a run with --placement auto: what a search chooses within budgets, in settings and in words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megazero.config.schema import Run
from megazero.config.tiers import Tier
from megazero.mpu.axes import Axes
from megazero.plan.budgets import budgets_of
from megazero.plan.placed_step import Machine, PlacedStep
from megazero.plan.placement import EQUAL, PlacementChoice, choose_placement
from megazero.plan.search import SearchLimits
from megazero.plan.step_times import MachineRates
from megazero.system import device as devices
from megazero.system import host_memory
from megazero.telemetry.units import size
from megazero.train.requirements import free_on


@dataclass(frozen=True)
class Room:
    """What this host has for each of its ranks; None: no limit, or not known.

    memory  bytes of host memory beside what the rank's process takes already
    disk    bytes of the folders of --nvme-path
    """

    memory: int | None = None
    disk: int | None = None


def room_here(run: Run, ranks_here: int) -> Room:
    """The room on this host. ranks_here: the ranks that share its memory and its disks. Looks at the machine."""
    every, folders = host_memory.limit_bytes(), run.offload.nvme_path
    taken = devices.memory_bytes(torch.device("cpu"))
    memory = None if every is None else max(0, every // ranks_here - taken)
    known = bool(folders) and all(map(os.path.isdir, folders))
    return Room(memory, free_on(run.offload, [Tier.DISK]) // ranks_here if known else None)


@dataclass(frozen=True)
class ChosenPlacement:
    """Settings of a run (`config.placement.ROWS`), and sentences about them."""

    settings: tuple[tuple[str, Any], ...]
    told: tuple[str, ...]


def chosen(run: Run, axes: Axes, kind: str, rates: MachineRates, room: Room | None, *, nccl: bool) -> ChosenPlacement:
    """The choice for this run. rates: those of --placement-rates, or measured ones. kind: of device, cpu or cuda.
    room: None if the ranks are on other hosts.

    Communicates nothing. Raises ConfigError if nothing keeps to the budgets.
    """
    return chosen_on(Machine(run, axes, kind, rates, nccl=nccl), rates, room)


def chosen_on(machine: Machine, rates: MachineRates, room: Room | None) -> ChosenPlacement:
    """The same on a machine that is there. rates: by which it has times."""
    run = machine.run
    limits = _limits(run, machine.kind, int(rates.workspace or 0), room or Room())
    choice = choose_placement(machine, limits)
    told = (*_lines(choice, limits), _rates_line(rates, run.offload.placement_rates))
    return ChosenPlacement(choice.best.settings, told)


def _limits(run: Run, kind: str, workspace: int, room: Room) -> SearchLimits:
    """The budgets of a run, and what the host has for a rank. On a CPU the device's budget is one of both tiers, as in
    `plan.budgets.budgets_of`.
    """
    off, together = run.offload, budgets_of(run, kind).together
    memory = min((limit for limit in (together, room.memory) if limit is not None), default=None)
    return SearchLimits(
        off.device_memory_budget,
        off.host_memory_budget,
        disk=room.disk,
        workspace=workspace,
        memory=memory,
        is_one=kind == "cpu",
    )


def _lines(choice: PlacementChoice, budgets: SearchLimits) -> Iterator[str]:
    """What was chosen, what it takes, and what the next best would cost."""
    best, other = choice.best, choice.next_best
    yield _flags(best)
    computed = best.computed
    share = f"{computed / best.seconds:.0%}"
    yield f"predicted: a step of {best.seconds:.3g} s, of which {computed:.3g} s ({share}) are computation"
    peak = best.device
    stage = f" of stage {peak.stage}" * (best.machine.axes.pp > 1)
    own = f"{size(budgets.workspace)} of products, " * (budgets.workspace > 0)
    tiers = [f"device {_of(peak.nbytes, budgets.device)}, {own}fullest{stage} at {peak.instruction}"]
    tiers += [f"host memory {_of(best.host_bytes, budgets.host)}"] * (best.host_bytes > 0)
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
    return step.flags or "all on the device, on time, in horizontal order"


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
