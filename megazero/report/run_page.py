"""The page of one run, or of several beside each other: what `megazero report` writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from math import isfinite
from statistics import fmean, median
from typing import Any

from megazero import __version__
from megazero.config.dump import run_dict
from megazero.config.schema import Run
from megazero.report.metrics_lines import MetricsLines
from megazero.report.page.charts import charts_section
from megazero.report.page.document import PageSection, document, note_html
from megazero.report.page.parts import Cell, Chart, Fact, Table, TableColumn
from megazero.report.page.tables import WRITTEN, table_html
from megazero.report.run_events import Event, EventKind, attempts, events, superseded
from megazero.report.run_folder import RunOnDisk, Settings
from megazero.report.run_series import AXES, series_of
from megazero.system.words import counted, value_words

MOST_STEPS = 300_000
"""Of all runs of a page together; longer ones are thinned (`run_series.kept_rows`)."""
MOST_EVENTS = 2_000
"""Rows of the table of events; of more the last ones are shown."""
LAST = 20
"""Steps over which a last loss and rate are taken."""


@dataclass(frozen=True)
class Told:
    """A run with what follows from its lines."""

    run: RunOnDisk
    processes: Sequence[range]
    events: Sequence[Event]

    @classmethod
    def of(cls, run: RunOnDisk) -> Told:
        processes = attempts(run.metrics)
        return cls(run, processes, events(run, processes))

    @property
    def metrics(self) -> MetricsLines:
        return self.run.metrics

    def number(self, kind: EventKind) -> int:
        return sum(event.kind is kind for event in self.events)

    def not_finite(self) -> int:
        """Steps that changed the weights although a number was not finite."""
        wrong = (event.rows for event in self.events if event.kind is EventKind.NOT_FINITE)
        return len({row for rows in wrong for row in rows})

    def last(self, key: str) -> list[float]:
        """The finite numbers of the last steps."""
        return [value for value in self.metrics.columns.get(key, [])[-LAST:] if isfinite(value)]


@dataclass(frozen=True)
class RunNumber:
    """A number of a run at the head of a page. rare: left out where all have 0, as is one that is bad."""

    name: str
    shows: str
    of: Callable[[Told], Cell]
    note: str = ""
    rare: bool = False
    bad: bool = False


def _best(told: Told) -> Cell:
    losses = [each.losses["valid_loss"] for each in told.metrics.evaluations if "valid_loss" in each.losses]
    return min((loss for loss in losses if isfinite(loss)), default=None)


def _mean(told: Told, key: str) -> Cell:
    values = told.last(key)
    return fmean(values) if values else None


def _median(told: Told, key: str) -> Cell:
    values = told.last(key)
    return median(values) if values else None


def _greatest(told: Told, key: str) -> Cell:
    return max((value for value in told.metrics.columns.get(key, []) if isfinite(value)), default=None)


MEASURES = (
    RunNumber(
        "iteration", "whole", lambda told: (told.metrics.columns["iteration"] or [0])[-1], "the last that has a line"
    ),
    RunNumber("loss", "number", lambda told: _mean(told, "loss"), f"mean of the last {LAST} steps"),
    RunNumber("best valid loss", "number", _best, "the least valid_loss of all evaluations"),
    RunNumber("tokens/s", "count", lambda told: _median(told, "tokens_per_second"), f"median of the last {LAST} steps"),
    RunNumber("TFLOP/s per rank", "number", lambda told: _median(told, "model_tflops_per_rank"), "of the model"),
    RunNumber("MFU", "share", lambda told: _median(told, "mfu"), "median"),
    RunNumber(
        "time of steps",
        "duration",
        lambda told: sum(filter(isfinite, told.metrics.columns.get("step_seconds", []))),
        "without evaluations, saves and pauses",
    ),
    RunNumber("tokens", "count", lambda told: _greatest(told, "consumed_tokens"), "consumed"),
    RunNumber("peak memory", "bytes", lambda told: _greatest(told, "peak_memory_bytes"), "of the fullest rank"),
    RunNumber("resumes", "whole", lambda told: told.number(EventKind.RESUME), "that show in the lines", rare=True),
    RunNumber(
        "steps run again",
        "whole",
        lambda told: len(superseded(told.metrics, told.processes)),
        "after resumes",
        rare=True,
    ),
    RunNumber("skipped steps", "whole", lambda told: len(told.metrics.skipped), "", bad=True),
    RunNumber("not finite", "whole", Told.not_finite, "steps that changed the weights", bad=True),
    RunNumber(
        "checkpoints",
        "whole",
        lambda told: len(told.run.saved) if told.run.folder is not None else None,
        "in the folder now",
    ),
)
"""In the order in which they are shown. One that no run has is left out."""

CHARTS = (
    Chart("Loss", {"loss": "training"}),
    Chart("Learning rate", {"lr": "learning rate"}, zero=True, smooth=False),
    Chart("Gradient norm", {"grad_norm": "norm"}, log=True),
    Chart("Throughput", {"tokens_per_second": "rate"}, "tokens/s", "count", zero=True),
    Chart("Time of a step", {"step_seconds": "time"}, shows="seconds", zero=True),
    Chart("MFU", {"mfu": "model FLOPs"}, shows="share", zero=True),
    Chart("Peak memory", {"peak_memory_bytes": "largest over ranks"}, shows="bytes", zero=True, smooth=False),
    Chart("Global batch size", {"global_batch_size": "batch"}, "samples", "count", zero=True, smooth=False),
    Chart("Loss scale", {"loss_scale": "scale"}, log=True, smooth=False),
)
_ONLY_IF_IT_CHANGES = {"global_batch_size", "loss_scale"}


def run_page(runs: Sequence[RunOnDisk], now: datetime) -> str:
    """The page as HTML. now: the time that it gives for its making, with a time zone."""
    told = [Told.of(run) for run in runs]
    names = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    made = now.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    about = f"Made on {made} by megazero {__version__} from {', '.join(str(run.metrics.path) for run in runs)}"
    sections = [_charts(told), *_evaluations(told), *_events(told), *_settings(told)]
    facts = _facts(told[0]) if len(told) == 1 else []
    if len(told) > 1:
        sections.insert(0, PageSection("Runs", table_html(_beside(told))))
    return document(names, about, facts, sections)


def _facts(told: Told) -> list[Fact]:
    """The measures of one run that has them, and when its file was written last."""
    facts = []
    for measure in MEASURES:
        value = measure.of(told) if told.metrics.steps else None
        if value is None or ((measure.rare or measure.bad) and not value):
            continue
        words = WRITTEN[measure.shows](float(value))
        facts.append(Fact(measure.name, words, measure.note, "bad" if measure.bad else ""))
    length = (told.run.settings or {}).get("schedule", {}).get("train_length")
    if facts and length is not None:
        facts[0] = replace(facts[0], note=f"of {length}")
    written = datetime.fromtimestamp(told.run.written, timezone.utc).strftime("%H:%M UTC")
    day = datetime.fromtimestamp(told.run.written, timezone.utc).strftime("%Y-%m-%d")
    torn = "; the last line is not whole, so it was being written" if told.metrics.torn else ""
    return [*facts, Fact("last line", written, day + torn)]


def _beside(told: Sequence[Told]) -> Table:
    """The measures of several runs, a row each."""
    values = [[measure.of(each) for each in told] for measure in MEASURES]
    shown = [
        (measure, of_runs)
        for measure, of_runs in zip(MEASURES, values, strict=True)
        if any(value if measure.rare or measure.bad else value is not None for value in of_runs)
    ]
    columns = [TableColumn("run"), *(TableColumn(measure.name, measure.shows, measure.note) for measure, _ in shown)]
    rows = [[each.run.name, *(of_runs[at] for _, of_runs in shown)] for at, each in enumerate(told)]
    return Table("", columns, rows)


def _charts(told: Sequence[Told]) -> PageSection:
    most = MOST_STEPS // len(told)
    thinned = [series_of(each.run, each.processes, each.events, most) for each in told]
    series = [one for one, _ in thinned]
    evaluated = dict.fromkeys(key for each in series for key in each.points)
    charts = [chart for chart in CHARTS if any(_is_drawn(chart, each.metrics) for each in told)]
    if evaluated:
        charts.insert(1, Chart("Evaluations", {}, points={key: key.replace("valid_loss/", "") for key in evaluated}))
    notes = [
        f"{one.name} has {each.metrics.steps:,} steps: of each {together:,} the page holds those with the least and "
        "the greatest loss and norm"
        for each, (one, together) in zip(told, thinned, strict=True)
        if together > 1
    ]
    if not any(each.metrics.steps for each in told):
        notes.append(
            "No step has a line yet: the file is there and empty, as it is until the first log interval is over"
        )
    return charts_section("curves", "Curves", series, charts, AXES, ". ".join(notes))


def _is_drawn(chart: Chart, metrics: MetricsLines) -> bool:
    for key in chart.lines:
        column = metrics.columns.get(key)
        if column and not (key in _ONLY_IF_IT_CHANGES and min(column) == max(column)):
            return True
    return False


def _run_column(told: Sequence[Told]) -> list[TableColumn]:
    return [TableColumn("run")] if len(told) > 1 else []


def _evaluations(told: Sequence[Told]) -> list[PageSection]:
    keys = list(dict.fromkeys(key for each in told for line in each.metrics.evaluations for key in line.losses))
    if not keys:
        return []
    columns = [*_run_column(told), TableColumn("iteration", "whole"), *(TableColumn(key, "number") for key in keys)]
    rows: list[list[Cell]] = [
        [*([each.run.name] if len(told) > 1 else []), line.iteration, *(_finite(line.losses.get(key)) for key in keys)]
        for each in told
        for line in each.metrics.evaluations
    ]
    return [PageSection("Evaluations", table_html(Table("", columns, rows)))]


def _finite(value: float | None) -> Cell:
    return "not finite" if value is not None and not isfinite(value) else value


def _events(told: Sequence[Told]) -> list[PageSection]:
    """What happened, and from what that follows."""
    note = (
        "A metrics file has steps and evaluations alone, so these follow from it and from the folder of checkpoints. A "
        "resume shows where an iteration stands again, or where the peak of memory falls, which only grows while a "
        "process lives; one that does neither leaves no trace. Saves are the checkpoints that are still in the folder."
    )
    rows: list[list[Cell]] = [
        [*([each.run.name] if len(told) > 1 else []), event.kind.value, event.first, event.last, event.words]
        for each in told
        for event in each.events
    ]
    if len(rows) > MOST_EVENTS:
        note += f" The last {MOST_EVENTS:,} of {len(rows):,} are shown."
    columns = [
        *_run_column(told),
        TableColumn("event"),
        TableColumn("from iteration", "whole"),
        TableColumn("to", "whole"),
        TableColumn("what"),
    ]
    unknown = [each.run.name for each in told if each.run.folder is None]
    note += f" Of {', '.join(unknown)} no folder of checkpoints is known." if unknown else ""
    if not rows:
        return [PageSection("Events", note_html(f"{note} Nothing of this happened."))]
    return [PageSection("Events", table_html(Table("", columns, rows[-MOST_EVENTS:], note)))]


def _settings(told: Sequence[Told]) -> list[PageSection]:
    """The settings of the runs that have a run.yaml: of one beside the defaults, of several beside each other."""
    known = [(each.run.name, each.run.settings) for each in told if each.run.settings is not None]
    if not known:
        return []
    beside = [("default", run_dict(Run())), *known] if len(known) == 1 else known
    names = dict.fromkeys((section, field) for _, of in known for section, fields in of.items() for field in fields)
    rows, quiet = list[list[Cell]](), set[int]()
    for section, field in names:
        values = [_value(of, section, field) for _, of in beside]
        if len(set(values)) == 1:
            quiet.add(len(rows))
        rows.append([section, field, *values])
    same = "the defaults" if len(known) == 1 else "the same in all runs"
    columns = [TableColumn("section"), TableColumn("setting"), *(TableColumn(name) for name, _ in beside)]
    note = f"{counted(len(rows) - len(quiet), 'setting')} of {len(rows)} differ" + (
        " from the defaults" if len(known) == 1 else ""
    )
    table = Table("", columns, rows, note, quiet=frozenset(quiet), more=f"show the {len(quiet)} that are {same} too")
    return [PageSection("Configuration" if len(known) == 1 else "Differences of configuration", table_html(table))]


def _value(settings: Settings | Mapping[str, Any], section: str, field: str) -> Cell:
    fields = settings.get(section, {})
    return value_words(fields[field]) if field in fields else None
