"""The flags that give the layout of a planned step."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from megazero.config.options import run_options
from megazero.config.schema import Run
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.explained import is_fragile
from megazero.telemetry.units import size

LAYOUT = (
    "micro_batch_size recompute_granularity sequence_parallel zero_stage zero_shard_size offload_optimizer "
    "offload_params offload_gradients offload_activations virtual_stages pipeline_schedule tp pp"
).split()
"""The fields that a search sets, in the order in which a user would rather give them up."""
ALWAYS = ("tp", "pp", "micro_batch_size", "zero_stage")
"""Fields that are named even where they have their defaults."""


def setting(run: Run, field: str) -> str:
    """A field of a run as a flag."""
    known = run_options()[field]
    value = known.value_in(run)
    if isinstance(value, bool):
        return known.flag if value else known.negations[0]
    return f"{known.flag} {value}"


def layout_flags(step: ClusterStep, given: Set[str] = frozenset()) -> str:
    """The flags that give the step's layout, where they are not the defaults. given: fields that are left out."""
    fields = [field for field in (*ALWAYS, *(field for field in LAYOUT if field not in ALWAYS)) if field not in given]
    defaults = {field: run_options()[field].default for field in fields if field not in ALWAYS}
    return " ".join(
        setting(step.run, field)
        for field in fields
        if field in ALWAYS or run_options()[field].value_in(step.run) not in (None, defaults[field])
    )


def shared_ramp(step: ClusterStep, ramp: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The ramp of the user's global batch with the nearest sizes, upwards, that the layout's replicas share, and whose
    steps meet the whole batch; None for one that starts above it.
    """
    batch, rows = step.run.schedule.global_batch_size, step.run.schedule.micro_batch_size * step.axes.dp
    if ramp is None or ramp[0] > batch:
        return None
    start, increment = (-(-samples // rows) * rows for samples in ramp[:2])
    while start < batch and (batch - start) % increment:
        increment = min(increment + rows, batch - start)
    return start, increment, ramp[2]


def with_ramp(step: ClusterStep, ramp: tuple[int, ...] | None) -> Run:
    """The run of a step with its ramp, which a plan leaves out."""
    return replace(step.run, schedule=replace(step.run.schedule, rampup_batch_size=shared_ramp(step, ramp)))


def ramp_flags(step: ClusterStep, ramp: tuple[int, ...] | None) -> str:
    """The flag of a ramp of the global batch whose sizes the layout's replicas share, or of none in place of one that
    starts above the batch; empty where they share those of the user's ramp, or there is none.
    """
    shared = shared_ramp(step, ramp)
    return "" if shared == ramp else f"--rampup-batch-size {' '.join(map(str, shared or ('none',)))}"


def settings_words(step: ClusterStep) -> str:
    """The flags of a step's layout, and what they take."""
    little = ", which leaves a few per cent of the memory" if is_fragile(step) else ""
    return f"{layout_flags(step)} ({step.seconds:.3g} s a step, {size(step.memory_bytes)} a rank{little})"
