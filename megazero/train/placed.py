"""The placement of a run with --placement auto: rank 0 chooses it, and every rank takes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megazero.checkpoint.agreement import broadcast_text, raise_on_all_ranks
from megazero.checkpoint.manager import FoundCheckpoint
from megazero.checkpoint.resume_changes import Change, compare, run_from
from megazero.config.placement import AUTO, FLAGS, ROWS, applied, as_flags
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.mpu.axes import Axes
from megazero.mpu.grid import ProcessGrid
from megazero.plan.placed_step import Cluster, Machine, PlacedStep
from megazero.plan.placement import PlacementChoice, SearchLimits, choose_placement
from megazero.plan.rates import MachineRates, read_rates
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
            said = {"settings": dict(found.settings), "told": found.told}
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
    run: Run, axes: Axes, kind: str, rates: MachineRates | None, ranks_here: int, *, nccl: bool
) -> ChosenPlacement:
    """The choice for this run. rates: measured ones; None: those of --placement-rates. kind: of device, cpu or cuda.

    Communicates nothing. Raises ConfigError.
    """
    file = run.offload.placement_rates
    used = read_rates(file) if file is not None else rates
    assert used is not None, "without a file the rates are measured"
    room = free_in(run.offload.nvme_path) // ranks_here if run.offload.nvme_path else None
    budgets = SearchLimits(run.parallel.device_memory_budget, run.parallel.host_memory_budget, room)
    choice = choose_placement(Machine(run, Cluster(axes, kind, nccl), used), budgets)
    return ChosenPlacement(choice.best.settings, (_sentence(choice, budgets), _rates_sentence(used, file)))


def with_choice(run: Run, settings: dict[str, Any]) -> Run:
    """The run with these settings in place of the search, so that its dump and its checkpoints say what it does."""
    return applied(run, {**settings, "placement": FLAGS, "placement_rates": None})


def _sentence(choice: PlacementChoice, budgets: SearchLimits) -> str:
    best, other = choice.best, choice.next_best
    peak = best.device
    limit = "" if budgets.device is None else f" of {size(budgets.device)}"
    stage = f" of stage {peak.stage}" * (best.machine.cluster.axes.pp > 1)
    words = (
        f"{_flags(best)}: a predicted step of {best.seconds:.3g} s; the device's memory is fullest{stage} at "
        f"{peak.instruction}, {size(peak.nbytes)}{limit}"
    )
    words += f", and host memory takes {size(best.host)}" if best.host else ""
    words += f"; {choice.looked_at} steps were simulated"
    if other is None:
        return f"{words}; no other combination keeps to the budgets"
    more = other.seconds / best.seconds - 1
    return f"{words}. The next best is {_flags(other)}, with {other.seconds:.3g} s ({more:+.1%})"


def _flags(step: PlacedStep) -> str:
    return as_flags(dict(step.settings)) or "all on the device, on time, in horizontal order"


def _rates_sentence(rates: MachineRates, file: str | None) -> str:
    numbers = ", ".join(f"{name} {value:.3g}" for name, value in rates.plain().items())
    return f"rates {'measured now' if file is None else f'of {file}'}, in a second: {numbers}"
