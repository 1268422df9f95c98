"""The answer of --validate-only: a run's report as text, where nothing is wrong."""

from __future__ import annotations

from megazero.telemetry.units import count
from megazero.train import text_blocks as blocks
from megazero.train.banner import placement_lines, ranks_words, schedule_lines, stage_table, zero_words
from megazero.train.run_report import RunReport


def verdict(report: RunReport) -> str:
    """The answer of --validate-only to a run with which nothing is wrong."""
    zero = zero_words(report.run.parallel.zero_stage, report.axes)
    ranks, precision = ranks_words(report.axes), report.run.optimizer.precision
    head = f"OK: {ranks}; {precision}, {zero}, {count(report.parameters)} parameters"
    state = "Bytes of the model state on a rank of each stage (activations come on top)"
    parts = [
        (head, blocks.pairs([*placement_lines(report), *schedule_lines(report)])),
        (state, stage_table(report.memory.stages)),
        ("Memory of a step", report.trace),
        ("Peaks of a step on a rank of each stage", peaks_table(report)),
        ("Worth knowing", blocks.bullets(report.notes)),
        ("Not checked", blocks.bullets(report.unchecked)),
    ]
    return blocks.sections(parts)


def peaks_table(report: RunReport) -> str:
    """The peaks of every stage in each tier beside the budgets. On a CPU a column has the sum of both memories."""
    budgets, is_one = report.memory.budgets, report.device_kind == "cpu"
    if budgets is None:
        return ""
    together = budgets.together
    if budgets.device is not None and budgets.host is not None:
        together = budgets.device + budgets.host
    rows = [
        [str(stage.stage), f"{stage.device_bytes:,}", f"{stage.host_bytes:,}"]
        + [f"{stage.total_bytes:,}"] * is_one
        + [f"{stage.disk:,}"]
        for stage in report.memory.peaks
    ]
    limits = budgets.device, budgets.host, *[together] * is_one, None
    rows.append(["budget", *("-" if limit is None else f"{limit:,}" for limit in limits)])
    return blocks.table(["stage", "device", "host memory", *["together"] * is_one, "disks"], rows)
