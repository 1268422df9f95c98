"""The page of `megazero plan --report`: the search as a table, the memory and the step of the first layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megazero.plan.cluster.cluster_step import ClusterStep
from megazero.plan.cluster.explained import is_fragile, parts, schedule_words, why_slower
from megazero.plan.cluster.layout_flags import layout_flags
from megazero.plan.cluster.layout_search import BestLayouts
from megazero.report import text_blocks as blocks
from megazero.report.measured import measured_beside
from megazero.report.page.gantt import gantt_of
from megazero.report.page.parts import Cell, Fact, MemoryBar, Table, TableColumn
from megazero.report.page.plan_page import plan_page
from megazero.report.plan_text import DAY, Costs, of_cluster
from megazero.telemetry.units import count, size

COLUMNS = (
    TableColumn("tp", "whole", "tensor-parallel ranks"),
    TableColumn("pp", "whole", "pipeline stages"),
    TableColumn("dp", "whole", "replicas"),
    TableColumn("schedule"),
    TableColumn("micro-batch", "whole", "samples of one forward pass"),
    TableColumn("recompute"),
    TableColumn("sequence parallel"),
    TableColumn("ZeRO", "whole"),
    TableColumn("a step", "seconds", "seconds of a step that follows another"),
    TableColumn("MFU", "share", "of what the devices could compute, the share that the model needs"),
    TableColumn("memory", "bytes", "of the fullest rank, with what the driver and the allocator take"),
    TableColumn("why slower"),
)


def plan_html(layouts: BestLayouts, costs: Costs, metrics: Path | None) -> str:
    """The page as HTML. layouts: with some. metrics: of a run of the first layout, to be shown beside its prediction.
    Raises UnreadableRun for a file that holds no metrics.
    """
    best = layouts.steps[0]
    predicted = {
        "step_seconds": best.seconds,
        "tokens_per_second": best.tokens_per_second,
        "peak_memory_bytes": float(best.memory_bytes),
        "model_tflops_per_rank": best.model_flops / (best.seconds * best.cluster.gpus) / 1e12,
        "mfu": best.mfu,
    }
    stages = [f"stage {stage}" for stage in range(best.axes.pp)]
    note = "The whole step of the first layout, on a rank of each stage. All replicas do the same."
    return plan_page(
        f"Plan for {of_cluster(best)}",
        [*_facts(best, costs)],
        [_search(layouts.steps)],
        [*_memories(best)],
        gantt_of("The step", best.simulated, stages, note=note),
        None if metrics is None else measured_beside(metrics, predicted),
        f"The first layout: {layout_flags(best)}",
    )


def _facts(step: ClusterStep, costs: Costs) -> Iterator[Fact]:
    of_step = ", ".join(f"{seconds:.3g} s {part}" for part, seconds in parts(step).items())
    yield Fact("a step", f"{step.seconds:.4g} s", of_step)
    if step.cluster.device.borrowed:
        yield Fact(
            "constants", step.cluster.device.borrowed, f"no measured step of {step.cluster.device.name} is known"
        )
    yield Fact("MFU", f"{step.mfu:.1%}")
    yield Fact("tokens a day", count(step.tokens_per_second * DAY))
    tone = "bad" if is_fragile(step) else ""
    yield Fact("memory of a rank", size(step.memory_bytes), f"of {size(step.cluster.device.memory)}", tone)
    known = costs.of(step)
    if known:
        yield Fact("days", f"{known['days']:.3g}", f"for {count(costs.tokens or 0)} tokens")
        yield Fact("energy", f"{count(known['kwh'])} kWh")


def _search(steps: Sequence[ClusterStep]) -> Table:
    rows = [_row(step, steps[0]) for step in steps]
    fragile = frozenset(number for number, step in enumerate(steps) if is_fragile(step))
    note = "The fastest layout of each split of the ranks. A marked row leaves a few per cent of a device's memory."
    return Table("Layouts", COLUMNS, rows, note, fragile)


def _row(step: ClusterStep, best: ClusterStep) -> list[Cell]:
    p = step.run.parallel
    return [
        p.tp,
        p.pp,
        step.axes.dp,
        schedule_words(step.run),
        step.run.schedule.micro_batch_size,
        p.recompute_granularity,
        "yes" if p.sequence_parallel else "no",
        p.zero_stage,
        step.seconds,
        step.mfu,
        step.memory_bytes,
        None if step is best else why_slower(step, best),
    ]


def _memories(step: ClusterStep) -> Iterator[MemoryBar]:
    limit = int(step.cluster.device.memory)
    for stages, peak in zip(step.alike.values(), step.peaks, strict=True):
        word = "stage" if len(stages) == 1 else "stages"
        yield MemoryBar(f"{word} {blocks.span(stages)}", peak.device, limit, f"at {peak.moment}")
