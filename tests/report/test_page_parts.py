"""The parts of a page as HTML and as numbers for its script; tests/report/test_page_in_browser.py sees them drawn."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.pipeline.schedule import make_schedule
from megazero.program.memory import MemoryColumn
from megazero.program.simulate import simulate
from megazero.program.times import uniform_times
from megazero.report.measured import measured_beside
from megazero.report.memory_picture import COLOURS
from megazero.report.page.charts import DIGITS, charts_section, coded
from megazero.report.page.document import PageSection, document
from megazero.report.page.gantt import gantt_of, gantt_section
from megazero.report.page.memory_bars import colours_of, memory_section
from megazero.report.page.parts import Axis, Chart, Fact, Mark, MemoryBar, Points, Series, Table, TableColumn
from megazero.report.page.plan_page import Measured, plan_page
from megazero.report.page.tables import number, seconds, table_html
from megazero.report.picture_parts import KINDS
from tests.report.runs_on_disk import step, write_metrics

NUMBERS = st.one_of(st.floats(), st.integers(-(10**12), 10**12).map(float), st.sampled_from([1.0, 2.0, 3.0]))


def decoded(column: dict[str, Any]) -> list[float]:
    """As basics.js does it."""
    if "values" in column:
        return [nan if value is None else float(value) for value in column["values"]]
    return [first + step * number for first, step, count in column["pieces"] for number in range(count)]


@given(st.lists(NUMBERS, max_size=40))
def test_a_column_is_written_and_read(values: list[float]) -> None:
    column = json.loads(json.dumps(coded(values), allow_nan=False))
    back = decoded(column)
    assert len(back) == len(values)
    for one, other in zip(values, back, strict=True):
        assert other == pytest.approx(one, rel=0.51 * 10 ** (1 - DIGITS), abs=0) if isfinite(one) else other != other


def test_what_goes_on_evenly_takes_no_room() -> None:
    steps = [float(i) for i in (*range(1, 50_001), *range(40_001, 90_001))]
    assert coded(steps) == {"pieces": [[1, 1, 50_000], [40_001, 1, 50_000]]}
    assert coded([0.1] * 1000) == {"pieces": [[0.1, 0, 1000]]}
    assert coded([0.5, nan, inf]) == {"values": [0.5, None, None]}


def test_charts_have_the_columns_that_they_draw() -> None:
    points = Points({"iteration": [2.0]}, [0.5])
    columns = {"iteration": [1.0, 2.0], "loss": [3.0, nan], "other": [0.0, 0.0]}
    marks = [Mark("save", "iter_2", {"iteration": 2.0}), Mark("skip", "3", {"iteration": 1.0}, {"iteration": 2.0})]
    series = Series("a", columns, (0, 1), {"valid_loss": points, "test_loss": points}, marks)
    chart = Chart("Loss", {"loss": "training"}, points={"valid_loss": "valid"}, levels=[("predicted", 2.5)])
    section = charts_section("curves", "Curves", [series], [chart], [Axis("iteration", "iteration")], "A note & more")
    assert '<p class="note">A note &amp; more</p><div class="charts" data-from="curves">' in section.html
    (run,) = section.data["curves"]["runs"]
    assert set(run["columns"]) == {"iteration", "loss"} and set(run["points"]) == {"valid_loss"}
    assert run["starts"] == [0, 1] and run["columns"]["loss"] == {"values": [3, None]}
    assert run["marks"][0] == {"kind": "save", "words": "iter_2", "at": {"iteration": 2}}
    assert run["marks"][1]["until"] == {"iteration": 2}
    (drawn,) = section.data["curves"]["charts"]
    assert (drawn["lines"], drawn["levels"], drawn["log"]) == ({"loss": "training"}, [("predicted", 2.5)], False)


def test_lanes_of_a_simulated_step_are_its_spans() -> None:
    """Messages to and from two neighbours overlap on the lane of stages, which gets a row for each."""
    schedule = make_schedule("1f1b", 3, 4)
    report = simulate(schedule, uniform_times(3, message=1.5))
    gantt = gantt_of("A step", report, ["first", "second", "third"], "units")
    second = [lane for lane in gantt.lanes if lane.group == "second"]
    assert [lane.name for lane in second] == ["compute", "stages", "stages 2", "stages 3"]
    assert sum(len(lane.spans) for lane in second[1:]) == len(report.messages[1])
    (compute,) = [lane for lane in gantt.lanes if (lane.group, lane.name) == ("third", "compute")]
    assert [(span.start, span.end) for span in compute.spans] == [(s.start, s.end) for s in report.spans[2]]
    assert {span.kind for span in compute.spans} == {"forward", "backward"}
    for lane in gantt.lanes:
        assert all(one.end <= other.start for one, other in zip(lane.spans, lane.spans[1:], strict=False)), lane.name
    data = gantt_section("lanes", gantt).data["lanes"]
    assert data["end"] == max(span.end for lane in gantt.lanes for span in lane.spans)
    assert data["kinds"][:2] == [[kind, KINDS[kind][0]] for kind in ("forward", "backward")]
    assert [kind for kind, _ in data["kinds"][2:]] == ["messages between stages"]
    (first,) = [lane for lane in data["lanes"] if (lane["group"], lane["name"]) == ("third", "compute")]
    assert decoded(first["starts"]) == [span.start for span in compute.spans]
    assert [data["labels"][number] for number in first["labels"]] == [span.label for span in compute.spans]


def test_bars_have_the_colours_of_the_other_pictures_and_the_numbers_as_a_table() -> None:
    names = [MemoryColumn.GRADIENTS.value, "allocator", "context"]
    colours = colours_of(names)
    assert colours["gradients"] == COLOURS[MemoryColumn.GRADIENTS]
    assert len({colours[name] for name in names}) == 3
    bars = [MemoryBar("stage 0", {"gradients": 3 << 30, "allocator": 1 << 30}, 5 << 30, "forward 3")]
    bars.append(MemoryBar("stage 1", {"gradients": 6 << 30, "context": 1 << 29}, 5 << 30))
    html = memory_section("Memory", bars).html
    assert 'aria-label="stage 0: 4.00 GiB of 5.00 GiB"' in html and '<div class="total over">6.50 GiB</div>' in html
    assert 'title="stage 0, allocator: 1.00 GiB, 25.0%"' in html
    rows = re.findall(r"<tr.*?>(.*?)</tr>", html)[1:]
    assert [re.sub("<.*?>", " ", row).split() for row in rows] == [
        "stage 0 4.00 GiB 3.00 GiB 1.00 GiB \N{EN DASH} forward 3".split(),
        "stage 1 6.50 GiB 6.00 GiB \N{EN DASH} 512 MiB".split(),
    ]
    assert '<tr class="marked"><td>stage 1</td>' in html, "the fullest"


def test_a_table_has_the_values_by_which_it_sorts() -> None:
    columns = [TableColumn("layout", note="tp x pp"), TableColumn("memory", "bytes"), TableColumn("share", "share")]
    table = Table("", columns, [["<b>", 3 << 29, 0.125], ["c", None, 1.0]], quiet=frozenset({1}), more="all of them")
    html = table_html(table)
    assert '<td>&lt;b&gt;</td><td class="number" data-value="1610612736">1.50 GiB</td>' in html
    assert '<tr class="quiet"><td>c</td><td class="none">' in html and "all of them" in html
    assert '<button type="button" data-column="0" title="tp x pp">layout</button>' in html
    assert "Search" not in html, "two rows need none"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0 s"),
        (1.5e-6, "1.5 µs"),
        (0.0123456, "12.35 ms"),
        (105.2, "105.2 s"),
        (3723.0, "1:02:03"),
        (-2.0, "-2 s"),
    ],
)
def test_seconds_have_four_digits(value: float, words: str) -> None:
    assert seconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"), [(2.45, "2.450"), (178.0, "178.0"), (1234.4, "1,234"), (98765.4, "98,765"), (0.0, "0")]
)
def test_numbers_of_a_column_have_four_digits(value: float, words: str) -> None:
    assert number(value) == words


def test_data_end_no_element_and_are_finite() -> None:
    page = document("A", "b", [Fact("<", ">", "&")], [PageSection("S", "", {"x": {"name": "</script><!--"}})])
    assert page.count("</script>") == 2 and "<!--" not in page.partition("\n")[2]
    (text,) = re.findall(r'<script type="application/json" id="x">(.*?)</script>', page)
    assert json.loads(text) == {"name": "</script><!--"}
    assert '<li><a href="#part-1">S</a></li>' in page and '<section id="part-1"><h2>S</h2>' in page
    with pytest.raises(ValueError, match="not JSON compliant"):
        document("A", "b", [], [PageSection("S", "", {"x": nan})])


def test_predictions_stand_beside_what_was_measured(tmp_path: Path) -> None:
    records = [step(i) for i in range(1, 12)]
    records[0] = replace(records[0], step_seconds=90.0)  # the first one compiles, and the median does not see it
    path = write_metrics(tmp_path / "m.jsonl", records)
    times = sorted(record.step_seconds for record in records)
    predicted = {"step_seconds": 1.1 * times[5], "peak_memory_bytes": 250_005_500.0, "mfu": 0.5}
    measured = measured_beside(path, predicted)
    assert measured.beside is not None
    assert [row[0] for row in measured.beside.rows] == ["Time of a step", "Peak memory"], "the run has no MFU"
    assert [row[-1] for row in measured.beside.rows] == [pytest.approx(0.1), pytest.approx(-0.5)]
    assert measured.beside.rows[0][2] == seconds(times[5])
    assert [chart.levels for chart in measured.charts] == [
        [("predicted", 1.1 * times[5])],
        [("predicted", 250_005_500.0)],
    ]
    assert "<h2>Predicted and measured</h2>" in plan_page("A plan", [], [], [], None, measured)


def test_a_plan_has_the_sections_of_what_there_is() -> None:
    table = Table("Layouts", [TableColumn("layout")], [["tp 1"]])
    series = Series("run", {"iteration": [1.0, 2.0], "step_seconds": [1.0, 1.1]})
    chart = Chart("Time", {"step_seconds": "time"}, levels=[("predicted", 1.05)])
    measured = Measured([series], [chart], [Axis("iteration", "iteration")], table)
    everything = plan_page("A plan", [], [table], [MemoryBar("stage 0", {"a": 1})], None, measured)
    assert re.findall("<h2>(.*?)</h2>", everything) == ["Layouts", "Memory", "Predicted and measured"]
    assert re.findall("<h2>(.*?)</h2>", plan_page("A plan", [], [], [], None)) == []
