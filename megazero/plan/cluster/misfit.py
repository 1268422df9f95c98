"""What to change where no layout fits a cluster: which of the user's own flags, or how many more devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megazero.config.options import run_options
from megazero.plan.cluster.candidates import OpenRun
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.layout_search import BestLayouts, LayoutSearch
from megazero.telemetry.units import size

LAYOUT = (
    "micro_batch_size recompute_granularity sequence_parallel zero_stage zero_shard_size offload_optimizer "
    "offload_params offload_gradients offload_activations virtual_stages pipeline_schedule tp pp"
).split()
"""The fields that a search sets, in the order in which a user would rather give them up."""
MOST_TIMES = 64
"""So many times the devices are tried at most."""


@dataclass(frozen=True)
class Change:
    """A change, in words and as flags, and the step that fits with it."""

    words: str
    step: ClusterStep


def short_words(layouts: BestLayouts, asked: OpenRun) -> str:
    """What is short of memory on the layout that is nearest, and by how much."""
    step = layouts.least
    if step is None:
        width = "the model state alone has no room on any layout"
        return f"{width}: {asked.cluster.device.name} has {size(asked.cluster.device.memory)}"
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


def cheapest_change(asked: OpenRun) -> Change | None:
    """The change after which something fits: one flag of the user's that is given up, all of them, or more devices. Of
    several flags that with the fastest step counts. None if nothing helps.
    """
    given = [field for field in LAYOUT if field in asked.fixed]
    released = [(field, _fastest(replace(asked, fixed=asked.fixed - {field}))) for field in given]
    fitting = [(step.seconds, field, step) for field, step in released if step is not None]
    if fitting:
        _, field, step = min(fitting, key=lambda each: each[0])
        return Change(f"in place of {_setting(asked, field)}: {settings_words(step)}", step)
    if len(given) > 1 and (freed := _fastest(replace(asked, fixed=asked.fixed - {*given}))) is not None:
        flags = ", ".join(_setting(asked, field) for field in given)
        return Change(f"in place of {flags}: {settings_words(freed)}", freed)
    times = 2
    while times <= MOST_TIMES:
        cluster = replace(asked.cluster, gpus=times * asked.cluster.gpus)
        if (larger := _fastest(replace(asked, cluster=cluster))) is not None:
            return Change(f"--gpus {cluster.gpus}: {settings_words(larger)}", larger)
        times *= 2
    return None


def _fastest(asked: OpenRun) -> ClusterStep | None:
    return next(iter(LayoutSearch(asked, wanted=1).run().steps), None)


def _setting(asked: OpenRun, field: str) -> str:
    known = run_options()[field]
    value = known.value_in(asked.run)
    return known.flag if value is True else f"{known.flag} {value}"


def settings_words(step: ClusterStep) -> str:
    """The flags of a step's layout, and what they take."""
    return f"{layout_flags(step)} ({step.seconds:.3g} s a step, {size(step.memory_bytes)} a rank)"


def layout_flags(step: ClusterStep) -> str:
    """The flags that give the step's layout, where they are not the defaults; tp, pp, micro-batch and ZeRO always."""
    always = ("tp", "pp", "micro_batch_size", "zero_stage")
    words = []
    for field in (*always, *(field for field in LAYOUT if field not in always)):
        known = run_options()[field]
        value = known.value_in(step.run)
        if field in always or value not in (None, known.default):
            words.append(known.flag if value is True else f"{known.flag} {value}")
    return " ".join(words)
