"""What to change where no layout fits a cluster: which of the user's own flags, or how many more devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from megazero.config.options import run_options
from megazero.config.validate import problems_of
from megazero.plan.cluster.candidates import OpenRun
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.hardware import USUAL_NODE, Cluster
from megazero.plan.cluster.layout_flags import LAYOUT, setting, settings_words
from megazero.plan.cluster.layout_search import BestLayouts, LayoutSearch
from megazero.telemetry.units import size

MOST_TIMES = 64
"""So many times the devices are tried at most."""
FRUGAL: Mapping[str, Any] = MappingProxyType(
    {
        "micro_batch_size": 1,
        "recompute_granularity": "full",
        "pipeline_schedule": "1f1b",
        "virtual_stages": 1,
    }
)
"""Settings with which a layout takes little memory. With these a search for one that fits is short."""
BUDGET = "activation_memory_budget"
"""A field that no search sets, and that may be in the way."""
PLACES = (
    "tp pp zero_stage zero_shard_size offload_optimizer offload_params offload_gradients offload_activations".split()
)
"""Settings that say what lies where."""


@dataclass(frozen=True)
class FittingChange:
    """A change, in words and as flags, and the step that fits with it."""

    words: str
    step: ClusterStep


def short_words(layouts: BestLayouts, asked: OpenRun) -> str:
    """What is short of memory on the layout that is nearest, and by how much."""
    step, device = layouts.least, asked.cluster.device
    if step is None and not _has_layout(asked):
        budget = asked.run.parallel.activation_memory_budget
        return (
            f"no layout of {asked.cluster.gpus} ranks has tp x pp that divides them, stages with a layer each, and "
            f"replicas x micro-batch that divide the global batch of {asked.run.schedule.global_batch_size}"
            + (f", and keeps --activation-memory-budget {budget:,}" if budget is not None else "")
        )
    if step is None and layouts.state.short == 0:
        return f"no layout of {asked.cluster.gpus} ranks is legal: {next(_wrong(asked), 'none keeps its budget')}"
    if step is None:
        state, leaves = layouts.state, _may_leave(asked)
        away = f" and {size(state.away)} of host memory" * leaves
        beside = f" and {size(device.host_memory)}" * leaves
        return (
            f"the model state alone takes {size(state.device)}{away} of each rank at least, and {device.name} has "
            f"{size(device.memory)}{beside}: {size(state.short)} more than there is room for"
        )
    limits = step.limits
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


def _has_layout(asked: OpenRun) -> bool:
    """Whether arithmetic leaves a layout, whatever it takes."""
    return any(True for split in asked.splits() for _ in asked.computed(split))


def _wrong(asked: OpenRun) -> Iterator[str]:
    """What is wrong with layouts."""
    for split in asked.splits():
        for settings in asked.computed(split):
            for placement in asked.placed(split, {}):
                yield from problems_of(
                    asked.with_settings({**settings, **placement}), asked.cluster.gpus, own_data=True
                )


def _may_leave(asked: OpenRun) -> bool:
    """Whether model state may rest in host memory, apart from the device's."""
    off = asked.run.offload
    leaves = off.offload_optimizer or off.offload_params or off.offload_gradients or any(asked.offloads)
    return bool(leaves) and asked.cluster.device.kind != "cpu"


def cheapest_change(asked: OpenRun) -> FittingChange | None:
    """The change after which something fits: one flag of the user's that is given up, all of them, other devices, or
    all of these. Of several flags that with the fastest step counts. None if nothing helps.
    """
    given = [field for field in (BUDGET, *LAYOUT) if field in asked.fixed]
    released = [(field, _fastest(_without(asked, [field]))) for field in given]
    fitting = [(step.seconds, field, step) for field, step in released if step is not None]
    if fitting:
        _, field, step = min(fitting, key=lambda each: each[0])
        return FittingChange(f"in place of {setting(asked.run, field)}: {settings_words(step)}", step)
    free = _without(asked, given)
    if len(given) > 1 and (freed := _fitting(free)) is not None:
        return FittingChange(_instead(asked, given, freed) + settings_words(freed), freed)
    if (larger := _with_devices(asked)) is not None:
        return FittingChange(f"--gpus {larger.cluster.gpus}: {settings_words(larger)}", larger)
    if given and (larger := _with_devices(free)) is not None:
        words = f"{_instead(asked, given, larger)}--gpus {larger.cluster.gpus} {settings_words(larger)}"
        return FittingChange(words, larger)
    return None


def _instead(asked: OpenRun, given: list[str], step: ClusterStep) -> str:
    """The user's flags that a step has not, in words."""
    values = run_options()
    changed = [field for field in given if values[field].value_in(asked.run) != values[field].value_in(step.run)]
    return f"in place of {', '.join(setting(asked.run, field) for field in changed)}: "


def _with_devices(asked: OpenRun) -> ClusterStep | None:
    """The step with the least of the numbers of devices that are tried with which something fits."""
    fitting = (_fitting(replace(asked, cluster=cluster)) for cluster in _clusters(asked))
    return next((step for step in fitting if step is not None), None)


def _clusters(asked: OpenRun) -> Iterator[Cluster]:
    """Clusters of other numbers of devices: twice as many, and so on; and first a few less, where it is no memory that
    is short. Nodes are as large as they usually are, if the user does not say it, and the last one is full.
    """
    gpus = asked.cluster.gpus
    fewer = () if _has_layout(asked) else range(gpus - 1, max(0, gpus - USUAL_NODE), -1)
    for number in (*fewer, *(gpus << doubled for doubled in range(1, MOST_TIMES.bit_length()))):
        nodes_of = asked.cluster.nodes_of if "nodes_of" in asked.fixed else min(USUAL_NODE, number)
        if number <= nodes_of or number % nodes_of == 0:
            yield asked.cluster.of(number, nodes_of)


def _without(asked: OpenRun, fields: list[str]) -> OpenRun:
    """The same where these fields are open. Their values are those of nobody: what a search leaves alone has them."""
    defaults = {field: run_options()[field].default for field in fields}
    if "micro_batch_size" in defaults:
        defaults["micro_batch_size"] = 1  # divides every batch
    return replace(asked, run=asked.with_settings(defaults), fixed=asked.fixed - {*fields})


def _fitting(asked: OpenRun) -> ClusterStep | None:
    """A step that fits, where more is open than a search for the fastest can try in time: one with a frugal layout, and
    then the fastest that lies as that does.
    """
    step = _fastest(_with(asked, FRUGAL))
    if step is None:
        return None
    known = {field: run_options()[field].value_in(step.run) for field in PLACES}
    return _fastest(_with(asked, known)) or step


def _with(asked: OpenRun, settings: Mapping[str, Any]) -> OpenRun:
    """The same with these settings as if the user had said those that are open."""
    more = {field: value for field, value in settings.items() if field not in asked.fixed}
    return replace(asked, run=asked.with_settings(more), fixed=asked.fixed | {*more})


def _fastest(asked: OpenRun) -> ClusterStep | None:
    return next(iter(LayoutSearch(asked, wanted=1).run().steps), None)
