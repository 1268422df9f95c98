"""Whether a run keeps --device-memory-budget and --host-memory-budget on every stage, by arithmetic; and the order of
the micro-batches where the user leaves it open and there are budgets.

With parameters on disks vertical order reads each unit once for all micro-batches, and keeps the activations of all of
them (`config.derive.micro_batch_order`). Under a budget the groups are as large as there is room for; where not even
small ones have room the order is horizontal. So a run that fits is never refused for an order that nobody asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megazero.config.derive import micro_batch_order, pipeline_schedule
from megazero.config.placement import AUTO, applied
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.mpu.axes import Axes, axes_of
from megazero.plan.budget_changes import BudgetSearch, Tried, peaks_within
from megazero.plan.rank_state import micro_batches_of, stage_bytes
from megazero.plan.search import Question, SearchLimits, search
from megazero.plan.step_lists import buffer_problems
from megazero.plan.step_memory import TierPeaks, rank_words, run_peaks

SHOWN = 3
"""Columns of a peak that are named, and changes that are offered."""
ON_DEVICE, OF_HOST, OF_BOTH = "on the device", "of host memory", "of memory"
"""Names of tiers after a number of bytes."""
ENOUGH = 2
"""Micro-batches of a step that a search looks at, at least."""
HOPELESS = 16
"""Where the state is so many times what a host holds, flags of one host are no way out, and none is searched for."""


class HostRoom(NamedTuple):
    """Bytes that all processes of a host may have together, and those of a rank before it builds its model."""

    limit: int
    process: int


def budgets_of(run: Run, kind: str) -> SearchLimits:
    """The budgets of a run. On a CPU the device's is of all its memory, unless another one says what part of the memory
    is for what has left the device.
    """
    device, host = run.offload.device_memory_budget, run.offload.host_memory_budget
    return SearchLimits(memory=device, is_one=True) if kind == "cpu" and host is None else SearchLimits(device, host)


def has_budgets(run: Run) -> bool:
    """Whether a run has a budget of a tier."""
    return run.offload.device_memory_budget is not None or run.offload.host_memory_budget is not None


class FullestTier(NamedTuple):
    """A tier that has a budget: its name after a number of bytes, and the first stage of those that take most of it."""

    name: str
    flag: str
    budget: int
    stage: int
    most: int


def fullest(peaks: Sequence[TierPeaks], budgets: SearchLimits) -> list[FullestTier]:
    """What the ranks of a run take at most of each tier that has a budget."""
    tiers = (
        (ON_DEVICE, "--device-memory-budget", budgets.device, [stage.device_bytes for stage in peaks]),
        (OF_HOST, "--host-memory-budget", budgets.host, [stage.host_bytes for stage in peaks]),
        (OF_BOTH, "--device-memory-budget", budgets.together, [stage.total_bytes for stage in peaks]),
    )
    return [
        FullestTier(name, flag, budget, taken.index(max(taken)), max(taken))
        for name, flag, budget, taken in tiers
        if budget is not None
    ]


def memory_problems(run: Run, world_size: int, kind: str) -> list[str]:
    """A sentence if a step of the run is above its budgets: where, how much, of what, and what makes it fit. Or one if
    buffers of activations do not hold what they should.

    kind: of device, cpu or cuda; it decides the body of attention, and so what attention keeps. The run must know its
    vocabulary. A search for what makes it fit walks through the steps of some other runs.
    """
    budgets, axes = budgets_of(run, kind), axes_of(run, world_size)
    try:
        # before the peaks: a run whose buffers hold no unit has no list to walk through
        if (small := buffer_problems(run, axes, kind)) or not has_budgets(run):
            return small
        peaks = run_peaks(run, axes, kind)
    except ConfigError as error:  # the budget of activations cannot be kept
        return list(error.problems)
    return excess_problems(peaks, budgets, axes, lambda first: _changes(run, world_size, kind, budgets, first))


def excess_problems(
    peaks: Sequence[TierPeaks], budgets: SearchLimits, axes: Axes, changes: Callable[[int], BudgetSearch]
) -> list[str]:
    """A sentence if these peaks of each stage are above the budgets. changes: what is searched for a change that fits,
    of the stage that takes most.
    """
    worst = max(peaks, key=lambda stage: sum(budgets.excess(stage)))
    if budgets.hold(worst):
        return []
    whose = rank_words(worst.stage, axes)
    return [f"{_excess(worst, budgets, whose)}; {_what_fits(changes(worst.stage), budgets)}"]


def host_problems(run: Run, world_size: int, kind: str, here: range, memory: HostRoom) -> list[str]:
    """A sentence if the model state that the ranks of a host keep in its memory is more than it has, and what fits.

    Activations and all else come on top, so a run that is refused here could not have trained. On a CPU the device's
    tier is part of the host's memory. here: the ranks of the host. The rest as in `memory_problems`.
    """
    axes = axes_of(run, world_size)
    states = [state.elsewhere.memory + state.total * (kind == "cpu") for state in stage_bytes(run, axes)]
    needed = sum(states[axes.coordinates(rank).pp] for rank in here)
    if needed <= memory.limit:
        return []
    problem = f"the model state of all ranks of this host ({len(here)}) takes {needed:,} bytes of its memory, and all "
    problem += f"processes here may have {memory.limit:,}"
    if needed > HOPELESS * memory.limit:
        hosts = math.ceil(needed / memory.limit)
        return [
            f"{problem}: it takes {hosts} such hosts, and a layout of --tp, --pp or --zero-stage 3 over their ranks"
        ]
    of_rank = max(0, memory.limit // len(here) - memory.process)
    budgets = SearchLimits(memory=of_rank, is_one=True) if kind == "cpu" else SearchLimits(host=of_rank)
    first = max((axes.coordinates(rank).pp for rank in here), key=states.__getitem__)
    return [f"{problem}; {_what_fits(_changes(run, world_size, kind, budgets, first), budgets)}"]


def _excess(peaks: TierPeaks, budgets: SearchLimits, whose: str) -> str:
    """Which budgets are exceeded, and by what."""
    left = {f"{what} that left the device" if what in peaks.device else what: n for what, n in peaks.host.items()}
    parts = {ON_DEVICE: peaks.device, OF_HOST: peaks.host, OF_BOTH: {**peaks.device, **left}}
    return "; ".join(
        f"{tier.flag} {tier.budget:,}: {whose} takes {tier.most:,} bytes {tier.name}"
        f"{f' at {peaks.moment}' * (tier.name != OF_HOST)}: {_largest(parts[tier.name])}"
        for tier in fullest([peaks], budgets)
        if tier.most > tier.budget
    )


def _largest(parts: Mapping[str, int]) -> str:
    """The largest parts of a peak in words, and the sum of the others."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    words = [f"{size:,} of {what}" for what, size in ordered[:SHOWN]]
    rest = sum(size for _, size in ordered[SHOWN:])
    return ", ".join([*words, f"{rest:,} of all else"] if rest else words)


def what_fits(run: Run, world_size: int, kind: str, room: int, first: int) -> str:
    """What to change of a run so that its tensors take no more than `room` bytes of a device, in words. first: a stage
    that takes more. kind: of device, cpu or cuda. A search, which walks through the steps of some other runs.
    """
    limits = SearchLimits(memory=room, is_one=True) if kind == "cpu" else SearchLimits(device=room)
    return _what_fits(_changes(run, world_size, kind, limits, first), limits)


def _changes(run: Run, world_size: int, kind: str, budgets: SearchLimits, first: int) -> BudgetSearch:
    """A search that looks at a step of few micro-batches (`shortened`)."""
    return BudgetSearch(shortened(run, axes_of(run, world_size)), world_size, kind, budgets, first)


def _what_fits(changes: BudgetSearch, budgets: SearchLimits) -> str:
    """What to change, in words."""
    if fitting := changes.single(SHOWN):
        return f"nearest: {', or '.join(_offered(tried, budgets) for tried in fitting)}"
    tried = changes.together()
    if tried is None:
        return "no single flag makes it fit, and none takes less memory"
    if tried.fits:
        return f"no single flag makes it fit; nearest: {_offered(tried, budgets)}"
    return f"no single flag makes it fit; nearest, and still too much: {_offered(tried, budgets)}"


def shortened(run: Run, axes: Axes) -> Run:
    """The run with as many micro-batches in a step as fill its pipeline and show what one leaves behind for the next.

    In horizontal order each micro-batch frees what it took, so that a step's peak is that of its first few. A list of
    hundreds of micro-batches takes seconds, and a search walks through dozens of lists. Where all micro-batches count
    (`keeps_all`) the run stays as it is.
    """
    p, rows = run.parallel, run.schedule.micro_batch_size * axes.dp
    enough = max(ENOUGH, 4 * p.pp * p.virtual_stages)
    if keeps_all(run) or micro_batches_of(run, axes) <= enough:
        return run
    return replace(run, schedule=replace(run.schedule, global_batch_size=enough * rows, rampup_batch_size=None))


def keeps_all(run: Run) -> bool:
    """Whether what a step holds depends on all of its micro-batches: in vertical order and under GPipe all of them live
    at once, and where a share of activations leaves, which ones do depends on all.
    """
    together = micro_batch_order(run) == "vertical" or pipeline_schedule(run.parallel) == "gpipe"
    return together or run.offload.offload_activations.share < 1


def _offered(tried: Tried, budgets: SearchLimits) -> str:
    """A change, and the bytes of the tiers that have a budget with it."""
    sizes = " and ".join(f"{tier.most:,} bytes {tier.name}" for tier in fullest(tried.peaks, budgets))
    return f"{tried.change} ({sizes}{' a rank' * budgets.is_one})"


def leaves_order_to_budgets(run: Run) -> bool:
    """Whether the order of a run's micro-batches depends on its budgets: the user gives neither the order nor a size of
    groups, and parameters rest on disks.
    """
    p = run.parallel
    is_open = p.micro_batch_order is None and p.vertical_group_size is None and run.offload.placement != AUTO
    limited = p.activation_memory_budget is not None or has_budgets(run)
    return is_open and limited and micro_batch_order(run) == "vertical"


def order_within_budgets(run: Run, axes: Axes, kind: str) -> Mapping[str, Any]:
    """The order and the size of its groups, by field: those of the largest groups tried with which the run keeps its
    budgets, each half of the one before; else horizontal order. Empty for a run that does not leave it to budgets, or
    whose vocabulary is not known.

    kind: of device, cpu or cuda. Walks through the lists of a few steps. Communicates nothing.
    """
    if not leaves_order_to_budgets(run) or run.model.vocab_size is None:
        return {}
    budgets = budgets_of(run, kind)

    def fits(order: Mapping[str, Any]) -> bool:
        peaks = peaks_within(applied(run, order), axes, kind, budgets)
        return peaks is not None and all(map(budgets.hold, peaks))

    orders = ({"micro_batch_order": "vertical", "vertical_group_size": size} for size in _sizes(run, axes))
    return next(iter(search(Question[Mapping[str, Any]](fits), orders).best), {"micro_batch_order": "horizontal"})


def _sizes(run: Run, axes: Axes) -> Iterator[int | None]:
    """Sizes of groups, the largest first. None: all of a step."""
    yield None
    size = micro_batches_of(run, axes)
    while size > 2:
        size = -(-size // 2)
        yield size


def order_notes(asked: Run, run: Run, micro_batches: int) -> list[str]:
    """A sentence on the order that follows from parameters on disks; none where the user says which. asked: the run as
    the user has it. run: the same with its order. micro_batches: of a step.
    """
    given = asked.parallel.micro_batch_order is not None or asked.offload.placement == AUTO
    if given or micro_batches < 2 or not run.offload.offload_params.in_files:
        return []
    words, most = f"--offload-params {run.offload.offload_params}", run.parallel.vertical_group_size
    if micro_batch_order(run) == "horizontal":
        return [
            f"{words}: the order of the micro-batches is horizontal, because the budgets have no room for the "
            "activations of several, so each of them reads all parameters from disks"
        ]
    together = f"all {micro_batches}" if most is None or most >= micro_batches else f"at most {most}"
    return [
        f"{words}: the order of the micro-batches is vertical, so that a layer's parameters are read once for "
        f"{together} of them, whose activations are alive together; with less memory: --vertical-group-size, or "
        "--micro-batch-order horizontal"
    ]
