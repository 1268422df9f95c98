"""What to change where no layout fits a cluster: which of the user's own flags, or how many more devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from megazero.plan.cluster.candidates import OpenRun
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.layout_flags import LAYOUT, setting, settings_words
from megazero.plan.cluster.layout_search import BestLayouts, LayoutSearch
from megazero.telemetry.units import size

MOST_TIMES = 64
"""So many times the devices are tried at most."""


@dataclass(frozen=True)
class FittingChange:
    """A change, in words and as flags, and the step that fits with it."""

    words: str
    step: ClusterStep


def short_words(layouts: BestLayouts, asked: OpenRun) -> str:
    """What is short of memory on the layout that is nearest, and by how much."""
    step = layouts.least
    if step is None:
        device = asked.cluster.device
        if not asked.rooms.device < layouts.state < inf:  # it has room: then it is arithmetic that leaves no layout
            batch = asked.run.schedule.global_batch_size
            return (
                f"no layout of {asked.cluster.gpus} ranks has tp x pp that divides them, stages with a layer each, and "
                f"replicas x micro-batch that divide the global batch of {batch}"
            )
        return (
            f"the model state alone takes {size(layouts.state)} of each rank at least, and {device.name} has "
            f"{size(device.memory)}"
        )
    limits, device = step.limits, asked.cluster.device
    excess = max((step.taken(stage) for stage in step.alike), key=lambda taken: sum(limits.excess(taken)))
    over = limits.excess(excess)
    p = step.run.parallel
    where = f"tp {p.tp} x pp {p.pp} x dp {step.axes.dp}, ZeRO-{p.zero_stage}, {p.recompute_granularity} recompute"
    if over.host:
        return f"nearest is {where}: {size(over.host)} of host memory too much of {size(device.host_memory)} a rank"
    needed = step.memory_bytes
    return (
        f"nearest is {where}: its fullest rank takes {size(needed)}, {size(needed - device.memory)} more than "
        f"{device.name} has"
    )


def cheapest_change(asked: OpenRun) -> FittingChange | None:
    """The change after which something fits: one flag of the user's that is given up, all of them, or more devices. Of
    several flags that with the fastest step counts. None if nothing helps.
    """
    given = [field for field in LAYOUT if field in asked.fixed]
    released = [(field, _fastest(replace(asked, fixed=asked.fixed - {field}))) for field in given]
    fitting = [(step.seconds, field, step) for field, step in released if step is not None]
    if fitting:
        _, field, step = min(fitting, key=lambda each: each[0])
        return FittingChange(f"in place of {setting(asked.run, field)}: {settings_words(step)}", step)
    if len(given) > 1 and (freed := _fastest(replace(asked, fixed=asked.fixed - {*given}))) is not None:
        flags = ", ".join(setting(asked.run, field) for field in given)
        return FittingChange(f"in place of {flags}: {settings_words(freed)}", freed)
    times = 2
    while times <= MOST_TIMES:
        cluster = replace(asked.cluster, gpus=times * asked.cluster.gpus)
        if (larger := _fastest(replace(asked, cluster=cluster))) is not None:
            return FittingChange(f"--gpus {cluster.gpus}: {settings_words(larger)}", larger)
        times *= 2
    return None


def _fastest(asked: OpenRun) -> ClusterStep | None:
    return next(iter(LayoutSearch(asked, wanted=1).run().steps), None)
