"""Pages in a browser: what they draw, what they do when a pointer or a key moves, and that they ask for nothing.

.ci/run installs Chromium. Elsewhere these tests skip where no browser is installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from math import exp, log, nan
from pathlib import Path

import numpy as np
import pytest

from megazero.report.page.parts import Cell, Fact, Gantt, GanttLane, GanttSpan, MemoryBar, Table, TableColumn
from megazero.report.page.plan_page import plan_page
from megazero.report.page.tables import NOTHING
from megazero.report.run_folder import read_runs
from megazero.report.run_page import run_page
from tests.report.browser import Browser, browser_path
from tests.report.runs_on_disk import loss_of, skipped, step, write_metrics, write_run

pytestmark = pytest.mark.slow
NOW = datetime(2026, 1, 2, tzinfo=timezone.utc)
HOSTILE = "</script><img src=x onerror=alert(1)>&amp;"
LOSS = '.frame[aria-label="Loss"]'
NORM = '.frame[aria-label="Gradient norm"]'
GIB = 2**30


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = browser_path()
    if path is None:
        pytest.skip("no browser is installed: chromium or google-chrome")
    with Browser(path, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages by name: one run that resumed and has bad steps, three runs, one without a step, a plan."""
    folder = tmp_path_factory.mktemp("pages")
    records = [step(i) for i in [*range(1, 61), *range(51, 101)]]
    for row in (4, 5, 30):
        records[row] = skipped(records[row])
    records[80] = replace(records[80], loss=nan)
    one = write_metrics(folder / "one" / "metrics.jsonl", records, evaluate_every=20)
    flags = "", "--lr 1e-4 --micro-batch-size 1", ""
    three = [
        write_run(folder / name, 80, words, seed, (40, 80))
        for seed, (name, words) in enumerate(zip("abc", flags, strict=True))
    ]
    (folder / "empty.jsonl").touch()
    hostile = write_metrics(folder / HOSTILE.replace("/", "") / "m.jsonl", [step(1), step(2)])
    texts = {
        name: run_page(read_runs(paths), NOW)
        for name, paths in {
            "one": [one],
            "three": three,
            "empty": [folder / "empty.jsonl"],
            "hostile": [hostile],
        }.items()
    }
    for name, text in {**texts, "plan": plan()}.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in (*texts, "plan")}


def plan() -> str:
    columns = [
        TableColumn("layout"),
        TableColumn("ranks", "whole"),
        TableColumn("step", "seconds"),
        TableColumn("why it loses"),
    ]
    rows: list[list[Cell]] = [
        ["tp 4", 100, 1.5, None],
        ["tp 16", 9, 12.0, "messages"],
        ["tp 2", 20, None, "bubble"],
        [HOSTILE, 3, 0.25, "bubble"],
    ]
    rows += [[f"further {number}", 1000 + number, 100.0, "memory"] for number in range(10)]
    table = Table("Layouts", columns, rows, marked=frozenset({0}), quiet=frozenset(range(8, 14)))
    memories = [
        MemoryBar(f"stage {n}", {"parameters": (3 + n) * GIB, "activations": 4 * GIB}, 8 * GIB) for n in range(2)
    ]
    busy = [GanttSpan(n, n + 0.75, f"forward {n}", "forward") for n in range(8)]
    many = [GanttSpan(n / 4000, (n + 0.5) / 4000, f"gather {n}", "parameters") for n in range(32_000)]
    lanes = [
        GanttLane("compute", busy, "stage 0"),
        GanttLane("shards", many, "stage 0"),
        GanttLane("compute", busy[4:], "stage 1"),
    ]
    gantt = Gantt("The step", lanes, {"forward": "#4477aa", "backward": "#ee6677", "parameters": "#66ccee"})
    return plan_page(f"A plan {HOSTILE}", [Fact("step", "1.5 s", tone="bad")], [table], memories, gantt)


def corners(browser: Browser, frame: str, which: str = "main") -> list[list[tuple[float, float]]]:
    """The lines of a chart, one for each stretch without a gap, as pixels."""
    paths = browser.run(
        f"[...document.querySelectorAll({json.dumps(f'{frame} path.{which}')})].map((p) => p.getAttribute('d'))"
    )
    stretches = [part for path in paths for part in path.split("M") if part]
    return [[(float(x), float(y)) for x, y in re.findall(r"([\d.-]+) ([\d.-]+)", part)] for part in stretches]


def straightness(values: Sequence[float], pixels: Sequence[float]) -> float:
    """Pixels for each unit of the values, of which they are a linear function but for the rounding to tenths."""
    slope, base = np.polyfit(np.array(values, dtype=float), np.array(pixels), 1)
    assert np.abs(slope * np.array(values) + base - np.array(pixels)).max() < 0.12
    return float(slope)


def text(browser: Browser, selector: str) -> str:
    return str(browser.run(f"document.querySelector({json.dumps(selector)}).textContent"))


def focus(browser: Browser, selector: str) -> None:
    browser.run(f"document.querySelector({json.dumps(selector)}).focus()")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["one", "three", "empty", "plan", "hostile"])
def test_a_page_opens_by_itself(name: str, dark: bool, width: int, browser: Browser, pages: dict[str, Path]) -> None:
    """No error, no request, nothing beyond the edge of the window, and every word can be told from its ground."""
    browser.open(pages[name], width, 800, dark)
    assert browser.run("document.title") != ""
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(FAINT) == []
    assert browser.complaints() == [] and browser.requests() == []


FAINT = (Path(__file__).parent / "faint_words.js").read_text()
"""An expression: the words of a page whose contrast is below 4.5, which WCAG 2 (1.4.3) asks for."""


def test_the_browser_tells_what_a_page_does_wrong(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(
        "<!doctype html><html data-ready=yes><body style='background: #fff'><p style='color: #999'>pale</p>"
        "<img src=http://127.0.0.1:9/x.png>"
        "<script>console.error('told'); setTimeout(() => { throw Error('thrown') })</script>"
    )
    browser.open(tmp_path / "bad.html")
    browser.wait("document.images[0].complete")
    assert browser.requests() == ["http://127.0.0.1:9/x.png"]
    told = "\n".join(browser.complaints())
    assert "told" in told and "thrown" in told
    assert browser.run(FAINT) == ["P pale: 2.85"]


def test_a_name_is_text_whatever_it_is(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["plan"])
    assert text(browser, "h1") == f"A plan {HOSTILE}" and HOSTILE in text(browser, "tbody")
    assert browser.run("document.images.length") == 0


def test_the_points_of_a_chart_are_the_steps_of_the_run(browser: Browser, pages: dict[str, Path]) -> None:
    """Of a step that was run again once, in stretches between steps without a loss; straight in both directions."""
    browser.open(pages["one"])
    found = corners(browser, LOSS)
    assert [len(stretch) for stretch in found] == [4, 24, 39, 29], "gaps at 5, 6, 31 and 71"
    steps = [i for i in range(1, 101) if i not in (5, 6, 31, 71)]
    places = [point for stretch in found for point in stretch]
    assert straightness(steps, [x for x, _ in places]) > 0
    assert straightness([loss_of(i) for i in steps], [y for _, y in places]) < 0, "a greater loss is higher"
    (pale,) = corners(browser, LOSS, "pale")
    assert len(pale) == 11, "51 to 60 as they were made first, from 50 on"
    dots = browser.run("document.querySelectorAll('.frame[aria-label=Evaluations] circle').length")
    assert dots == 2 * 5, "five evaluations of two sets"


def test_hours_go_on_through_what_is_made_again(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    browser.run(
        "(s => { s.value = 'hours'; s.dispatchEvent(new Event('change')) })(document.querySelector('select.axis'))"
    )
    browser.frames()
    assert sum(map(len, corners(browser, NORM))) == 110 - 3 and corners(browser, NORM, "pale") == []


def test_a_drag_zooms_all_charts_and_a_double_click_shows_everything(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    first, last = corners(browser, NORM)[0][0][0], corners(browser, NORM)[-1][-1][0]
    left, top, *_ = browser.box(LOSS)
    places = [left + first + (last - first) * (i - 1) / 99 for i in (80, 90)]
    browser.drag(places[0], top + 40, places[1], top + 44)
    for frame in (LOSS, NORM):
        (shown,) = corners(browser, frame)
        assert 11 <= len(shown) <= 13, "80 to 90, and what leads to the edges"
        assert shown[-2][0] - shown[1][0] > 0.7 * (last - first)
    lowest, highest = min(y for _, y in shown[1:-1]), max(y for _, y in shown[1:-1])
    browser.drag(left + 200, top + 100, left + 202, top + 160)
    assert len(corners(browser, NORM)[0]) == len(shown), "a drag downwards zooms the values of its own chart"
    assert corners(browser, NORM)[0][1][1] == pytest.approx(shown[1][1]) and lowest < highest
    browser.click(LOSS, clicks=2)
    assert [len(stretch) for stretch in corners(browser, LOSS)] == [4, 24, 39, 29]


def test_the_value_under_the_pointer_is_told(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    x, _ = corners(browser, LOSS)[2][10]
    left, top, *_ = browser.box(LOSS)
    browser.mouse("mouseMoved", left + x, top + 60)
    browser.frames()
    chart = f"figure:has({LOSS})"
    assert float(text(browser, f"{chart} .key output")) == pytest.approx(loss_of(42), abs=1e-4)
    assert text(browser, f"{chart} .over text") == "42"
    assert float(text(browser, f"figure:has({NORM}) .key output")) == pytest.approx(0.4 + 3 / 42, abs=1e-4)


def test_charts_obey_keys(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    focus(browser, LOSS)
    value = f"figure:has({LOSS}) .key output"
    browser.press("Home", "ArrowRight", "ArrowRight")
    assert float(text(browser, value)) == pytest.approx(loss_of(3), abs=1e-4)
    browser.press("End", "ArrowLeft")
    assert float(text(browser, value)) == pytest.approx(loss_of(99), abs=1e-4)
    browser.wait("document.querySelector('.charts .unseen').textContent.startsWith('iteration 99: ')")
    browser.press("+", "+")
    (shown,) = corners(browser, NORM)
    assert 25 <= len(shown) <= 28, "a quarter"
    browser.press("ArrowLeft", shift=True)
    assert corners(browser, NORM) != [shown]
    browser.press("0")
    assert sum(map(len, corners(browser, NORM))) == 97
    places = corners(browser, LOSS)
    browser.press("l")
    assert browser.run(f"document.querySelector({json.dumps(f'figure:has({LOSS}) .log')}).ariaPressed") == "true"
    assert corners(browser, LOSS) != places
    assert straightness([log(loss_of(i)) for i in range(7, 31)], [y for _, y in corners(browser, LOSS)[1]]) < 0


def test_smoothing_is_a_mean_over_steps(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["three"])
    focus(browser, ".smoothing")
    browser.press("ArrowRight", "ArrowRight", "ArrowRight")
    assert text(browser, ".controls output") == "8 steps"
    keep, total, weight = exp(-1 / 8), 0.0, 0.0
    for i in range(1, 81):
        total, weight = keep * total + (1 - keep) * loss_of(i), keep * weight + (1 - keep)
    assert text(browser, f"figure:has({LOSS}) .key output") == f"last {total / weight:.4f}"
    assert len(corners(browser, LOSS, "pale")) == 3, "each run as it is, behind its mean"
    assert corners(browser, '.frame[aria-label="Learning rate"]', "pale") == [], "what is set has no noise"


def test_runs_can_be_left_out(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["three"])
    assert len(corners(browser, LOSS)) == 3
    browser.click(".runs label:nth-child(2) input")
    assert len(corners(browser, LOSS)) == 2
    assert browser.run("document.querySelectorAll('.mark.save').length") == 2


def test_a_long_run_is_drawn_with_few_corners_and_every_spike(browser: Browser, tmp_path: Path) -> None:
    records = [step(i) for i in range(1, 20_001)]
    records[15_000] = replace(records[15_000], grad_norm=1e4)
    path = write_metrics(tmp_path / "long.jsonl", records)
    (tmp_path / "long.html").write_text(run_page(read_runs([path]), NOW))
    browser.open(tmp_path / "long.html")
    (line,) = corners(browser, NORM)
    assert 1000 < len(line) < 4 * 700
    x, _ = min(line, key=lambda corner: corner[1])
    assert (x - line[0][0]) / (line[-1][0] - line[0][0]) == pytest.approx(0.75, abs=0.002)
    assert browser.complaints() == []


def rows(browser: Browser, column: int, table: str = "#part-1") -> list[str]:
    cells = f"{table} tbody tr:not([hidden]) td:nth-child({column + 1})"
    return list(browser.run(f"[...document.querySelectorAll({json.dumps(cells)})].map((cell) => cell.textContent)"))


def heading(column: int) -> str:
    return f"th:nth-child({column + 1}) button"


def test_a_table_sorts_by_click_and_by_key(browser: Browser, pages: dict[str, Path]) -> None:
    """By the number, not by its words; what has no value stays at the end."""
    browser.open(pages["plan"])
    assert rows(browser, 1)[:4] == ["100", "9", "20", "3"]
    browser.click(heading(1))
    assert rows(browser, 1)[:4] == ["3", "9", "20", "100"]
    assert browser.run("[...document.querySelectorAll('.table th')].map((th) => th.ariaSort)")[:2] == [
        None,
        "ascending",
    ]
    browser.click(heading(1))
    assert rows(browser, 1)[-5:] == ["1,000", "100", "20", "9", "3"]
    focus(browser, heading(2))
    browser.press("Enter")
    assert rows(browser, 2)[:3] == ["250 ms", "1.5 s", "12 s"] and rows(browser, 2)[-1] == NOTHING
    browser.press(" ")
    assert rows(browser, 2)[-4:] == ["12 s", "1.5 s", "250 ms", NOTHING]
    focus(browser, heading(0))
    browser.press("Enter")
    assert rows(browser, 0)[-3:] == ["tp 2", "tp 4", "tp 16"], "numbers within words count as such"


def test_a_table_is_searched_and_shows_quiet_rows_when_asked(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["plan"])
    assert len(rows(browser, 0)) == 8 and text(browser, ".table .shown") == "8 of 14 rows"
    browser.click(".table .all")
    assert len(rows(browser, 0)) == 14 and text(browser, ".table .shown") == ""
    focus(browser, ".table .search")
    browser.press(*"BUB")
    assert rows(browser, 0) == ["tp 2", HOSTILE]


def test_what_has_the_focus_can_be_seen(browser: Browser, pages: dict[str, Path]) -> None:
    """Tab reaches every control, and each has an outline of three pixels then."""
    browser.open(pages["plan"])
    reached = []
    for _ in range(40):
        browser.press("Tab")
        of, outline = browser.run(
            "(({tagName, className}, {outlineStyle, outlineWidth}) => "
            "[`${tagName}.${className}`, `${outlineStyle} ${outlineWidth}`])"
            "(document.activeElement, getComputedStyle(document.activeElement))"
        )
        if of == "BODY.":
            break
        reached.append(of)
        assert outline == "solid 3px", of
    assert {"A.skip", "BUTTON.", "INPUT.search", "INPUT.all", "DIV.scroll", "DIV.frame"} <= set(reached)


def pixel(browser: Browser, x: float, y: float) -> list[int]:
    """The colour of the canvas at a place in it."""
    data = f"document.querySelector('canvas').getContext('2d').getImageData({x}, {y}, 1, 1).data"
    return list(browser.run(f"[...{data}]"))


LEFT, ROW = 116, 20
"""Of gantt.js: where lanes begin, and how high they are."""


def test_lanes_are_drawn_where_their_times_are(browser: Browser, pages: dict[str, Path]) -> None:
    """Rows: heading, compute, shards, heading, compute. Of blocks that no pixel can show alone, it has the share."""
    browser.open(pages["plan"])
    width = browser.run("document.querySelector('canvas').clientWidth") - LEFT - 12
    at = lambda time: LEFT + width * time / 8  # noqa: E731 - of the whole step, which ends at 8
    assert pixel(browser, at(2.1), ROW + 4) == [0x44, 0x77, 0xAA, 255]
    assert pixel(browser, at(2.9), 1.5 * ROW)[3] == 0, "idle"
    assert pixel(browser, at(2.1), 4.5 * ROW)[3] == 0 and pixel(browser, at(4.1), 4.5 * ROW)[3] == 255
    red, green, blue, strength = pixel(browser, at(3), 2.5 * ROW)
    assert 110 < strength < 145 and red < green < blue


def test_a_block_is_told_by_pointer_and_by_key_and_zoomed(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["plan"])
    left, top, width, _ = browser.box(".gantt .frame > div")
    width -= LEFT + 12
    browser.mouse("mouseMoved", left + LEFT + width * 2.1 / 8, top + 1.5 * ROW)
    browser.frames()
    said = ".gantt output"
    assert text(browser, said) == "forward 2 (forward; stage 0, compute): 750 ms, from 2 s to 2.75 s"
    browser.drag(left + LEFT + width * 0.5, top + 10, left + LEFT + width * 0.5 + width / 4000, top + 10)
    focus(browser, ".gantt .frame")
    browser.press("ArrowRight")
    assert "forward" in text(browser, said)
    browser.press("ArrowDown", "ArrowDown", "ArrowDown")
    assert "stage 1, compute" in text(browser, said)
    browser.press("Home")
    assert text(browser, said).startswith("forward 4 ")
    browser.press("ArrowRight", "+", "+", "+")
    ticks = browser.run("[...document.querySelectorAll('.gantt .axis text')].map((each) => each.textContent)")
    assert "5 s" in ticks and "5.5 s" in ticks and "1 s" not in ticks
    browser.press("0")
    assert "1 s" in browser.run("[...document.querySelectorAll('.gantt .axis text')].map((each) => each.textContent)")


def test_bars_of_memory_have_one_scale(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["plan"])
    widths = browser.run(
        "[...document.querySelectorAll('.bar span')].map((part) => part.getBoundingClientRect().width)"
    )
    assert [width / widths[0] for width in widths] == pytest.approx([1, 4 / 3, 4 / 3, 4 / 3], rel=0.01)
    limit = browser.run("document.querySelector('.limit').offsetLeft")
    assert limit / widths[0] == pytest.approx(8 / 3, rel=0.01), "of 8 GiB"
    assert browser.run("[...document.querySelectorAll('.total.over')].length") == 0


def test_the_switch_and_print_choose_the_colours(browser: Browser, pages: dict[str, Path]) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    browser.open(pages["one"], dark=True)
    assert browser.run(ground) == "rgb(20, 23, 28)"
    browser.click("#theme")
    assert browser.run(ground) == "rgb(255, 255, 255)" and text(browser, "#theme") == "Dark"
    browser.click("#theme")
    browser.order(
        "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    assert browser.run(ground) == "rgb(255, 255, 255)", "paper is white"
    assert browser.run("document.querySelector('.controls').checkVisibility()") is False
    assert browser.run("document.querySelector('.printed').checkVisibility()") is True
    browser.order("Emulation.setEmulatedMedia", media="")
