"""Where the seconds of a step go, and why one layout loses to another."""

from __future__ import annotations

from collections.abc import Mapping

from megazero.config.derive import pipeline_schedule
from megazero.config.schema import Run
from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.telemetry.units import size

COMPUTING, UPDATING, WAITING = "computation", "updates", "waiting"
FRAGILE = 0.04
"""Of a device's memory: a layout that leaves less may not fit after all."""


def parts(step: ClusterStep) -> dict[str, float]:
    """The seconds of the stage that computes longest: its computations with their tensor-parallel messages, its
    updates, and its waiting for other stages and for messages on the model state.
    """
    work = step.work
    busiest = work.index(max(work))
    updates = step.update_seconds(busiest)
    computing = step.micro_batches * work[busiest]
    return {COMPUTING: computing, UPDATING: updates, WAITING: max(0.0, step.seconds - computing - updates)}


def schedule_words(run: Run) -> str | None:
    """The schedule of a run with its virtual stages; None for a run without a pipeline."""
    p = run.parallel
    return pipeline_schedule(p) + f" x{p.virtual_stages}" * (p.virtual_stages > 1) if p.pp > 1 else None


def is_fragile(step: ClusterStep) -> bool:
    """Whether little memory is left."""
    return step.memory_bytes > (1 - FRAGILE) * step.cluster.device.memory


def why_slower(step: ClusterStep, best: ClusterStep) -> str:
    """Why a step takes longer than the best: what grew most, with what its layout has to do with it."""
    own, of_best = parts(step), parts(best)
    more = {part: own[part] - of_best[part] for part in own}
    most = max(more, key=lambda part: more[part])
    return f"{more[most]:.3g} s more of {most}{_because(most, step.run, best.run, step, best)}"


def _because(part: str, run: Run, of_best: Run, step: ClusterStep, best: ClusterStep) -> str:
    p, other = run.parallel, of_best.parallel
    if part == WAITING:
        stages = f"over {p.pp} stages ({schedule_words(run)})" if p.pp > 1 else "on one stage"
        return f": {step.micro_batches} micro-batches {stages}, {step.axes.dp} replicas"
    reasons = []
    if p.recompute_granularity != other.recompute_granularity and step.hardware_flops > best.hardware_flops:
        reasons.append(f"{p.recompute_granularity} recompute")
    if p.tp > other.tp:
        reasons.append(f"tp {p.tp} has smaller products and more messages than tp {other.tp}")
    if run.schedule.micro_batch_size < of_best.schedule.micro_batch_size:
        reasons.append("smaller micro-batches")
    if p.pp > other.pp:
        reasons.append("less even stages")
    return f": {', '.join(reasons)}" if reasons else ""


def memory_words(step: ClusterStep) -> str:
    """What is alive on the fullest rank, and when."""
    fullest = max(step.peaks, key=lambda peak: peak.device_bytes)
    what = ", ".join(f"{size(nbytes)} {name}" for name, nbytes in _largest_first(fullest.device))
    return f"fullest on stage {fullest.stage} at {fullest.moment}: {what}"


def _largest_first(amounts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(((name, nbytes) for name, nbytes in amounts.items() if nbytes), key=lambda pair: -pair[1])
