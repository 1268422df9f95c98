"""What --validate-only prints of a run with which nothing is wrong: one of the printers of a `RunReport`, beside the
banner and JSON.
"""

from __future__ import annotations

from megazero.report import text_blocks as blocks
from megazero.report.banner import ranks_words, schedule_lines, stage_table, zero_words
from megazero.report.run_report import RunReport
from megazero.telemetry.units import count


def verdict(report: RunReport) -> str:
    """The answer of --validate-only to a run with which nothing is wrong."""
    zero, precision = zero_words(report.run.parallel.zero_stage, report.axes), report.run.optimizer.precision
    head = f"OK: {ranks_words(report.axes)}; {precision}, {zero}, {count(report.parameters)} parameters"
    state = "Bytes of the model state on a rank of each stage (activations come on top)"
    return blocks.sections(
        (head, blocks.pairs(schedule_lines(report))),
        (state, stage_table(report.memory.stages)),
        ("Memory of a step", report.trace),
        ("Peaks of a step on a rank of each stage", peaks_table(report)),
        ("Worth knowing", blocks.bullets(report.notes)),
        ("Not checked", blocks.bullets(report.unchecked)),
    )


def peaks_table(report: RunReport) -> str:
    """The peaks of every stage in each tier beside the budgets. On a CPU, where device and host are one memory, a
    column has their sum.
    """
    budgets, peaks = report.memory.budgets, report.memory.peaks
    if budgets is None:
        return ""
    both = [budget for budget in (budgets.device, budgets.host) if budget is not None]
    together = sum(both) if len(both) == 2 else budgets.together
    columns = {
        "device": [*(peak.device_bytes for peak in peaks), budgets.device],
        "host memory": [*(peak.host_bytes for peak in peaks), budgets.host],
        "together": [*(peak.total_bytes for peak in peaks), together],
        "disks": [*(peak.disk for peak in peaks), None],
    }
    if report.device_kind != "cpu":
        del columns["together"]
    cells = [["-" if amount is None else f"{amount:,}" for amount in column] for column in columns.values()]
    names = [*(str(peak.stage) for peak in peaks), "budget"]
    return blocks.table(["stage", *columns], [*zip(names, *cells, strict=True)])
