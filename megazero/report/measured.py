"""What was predicted of a run beside what its metrics file says: a section of a plan's page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from types import MappingProxyType

from megazero.report.page.parts import Cell, Chart, Table, TableColumn
from megazero.report.page.plan_page import Measured
from megazero.report.page.tables import WRITTEN
from megazero.report.run_events import attempts, events
from megazero.report.run_folder import read_runs
from megazero.report.run_series import AXES, series_of

MOST_STEPS = 100_000
"""Of the run that is drawn; a longer one is thinned (`run_series.kept_rows`)."""


@dataclass(frozen=True)
class ComparedNumber:
    """How a predicted number is compared. name: in the table; shows: as of `Chart`; of: the measured numbers as one."""

    name: str
    how: str
    shows: str
    of: Callable[[Sequence[float]], float]
    unit: str = ""


COMPARED: Mapping[str, ComparedNumber] = MappingProxyType(
    {
        "step_seconds": ComparedNumber("Time of a step", "median", "seconds", median),
        "tokens_per_second": ComparedNumber("Throughput", "median", "count", median, "tokens/s"),
        "peak_memory_bytes": ComparedNumber("Peak memory", "greatest", "bytes", max),
        "model_tflops_per_rank": ComparedNumber("TFLOP/s per rank", "median", "number", median),
        "mfu": ComparedNumber("MFU", "median", "share", median),
    }
)
"""Keys of the metrics file that can be predicted."""


def measured_beside(metrics: Path, predicted: Mapping[str, float]) -> Measured:
    """The metrics of a run with what was predicted of it.

    metrics    a metrics file, or a folder as `megazero report` takes it
    predicted  key of `COMPARED` -> number, in the unit of the metrics file. Keys that the run lacks are left out

    Raises UnreadableRun.
    """
    (run,) = read_runs([metrics])
    processes = attempts(run.metrics)
    series, _ = series_of(run, processes, events(run, processes), MOST_STEPS)
    charts, rows = list[Chart](), list[list[Cell]]()
    for key, comparison in COMPARED.items():
        numbers = [value for value in run.metrics.columns.get(key, []) if isfinite(value)]
        if key not in predicted or not numbers:
            continue
        level = [("predicted", float(predicted[key]))]
        look = Chart(comparison.name, {key: comparison.how}, comparison.unit, comparison.shows, zero=True, levels=level)
        charts.append(look)
        number = comparison.of(numbers)
        words = [WRITTEN[comparison.shows](value) for value in (predicted[key], number)]
        error = predicted[key] / number - 1 if number else None
        rows.append([comparison.name, *words, comparison.how, error])
    columns = [TableColumn(name) for name in ("of a step", "predicted", "measured", "of the steps")]
    beside = Table("", [*columns, TableColumn("error", "share", "predicted / measured - 1")], rows)
    note = f"Measured: {run.metrics.path}, {run.metrics.steps:,} steps. Dashed: what was predicted."
    return Measured([series], charts, AXES, beside, note)
