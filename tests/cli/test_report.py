"""`megazero report`: the page that it writes, where, and what it says of what is no run."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

from megazero.cli.main import main
from megazero.report.page.document import KIND
from tests.report.runs_on_disk import skipped, step, write_metrics, write_run


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line of an error, which ends with status 2 and writes nothing to the output."""
    try:
        status: object = main(["report", *map(str, words)])
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    assert status == 2 and said.out == "" and said.err.count("\n") == 1
    return said.err


def page_of(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[Path, str]:
    """(the path that the command prints, the page there)."""
    assert main(["report", *map(str, words)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    path = Path(said.out.removesuffix("\n"))
    return path, path.read_text()


def facts(page: str) -> dict[str, str]:
    """The numbers at the head of a page."""
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))


def cells(page: str, section: str) -> list[list[str]]:
    """The rows of the table in a section."""
    body = page.split(f"<h2>{section}</h2>")[1].split("<tbody>")[1].split("</tbody>")[0]
    return [re.findall(r"<td.*?>(.*?)</td>", row) for row in body.strip().splitlines()]


def test_the_page_of_a_run_lies_beside_its_metrics(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save = write_run(tmp_path / "mine", 80, "--lr 2e-4", saved=(40, 80))
    path, page = page_of(capsys, save)
    assert path == tmp_path / "mine" / "report.html"
    assert page.startswith(f"<!doctype html><!-- {KIND} -->") and "<title>Run mine/saved</title>" in page
    told = facts(page)
    assert (told["iteration"], told["tokens"], told["checkpoints"]) == ("80", "41.0k", "2")
    assert not {"resumes", "skipped steps", "not finite", "MFU"} & set(told), "there are none"
    assert '<dd>80</dd><dd class="note">of 80 iterations</dd>' in page
    assert cells(page, "Events") == [
        ["save", "40", "40", "iter_0000040, 2023-11-14 22:14:00 UTC"],
        ["save", "80", "80", "iter_0000080, 2023-11-14 22:14:40 UTC"],
    ]
    assert [row[0] for row in cells(page, "Evaluations")] == ["20", "40", "60", "80"]
    assert ["schedule", "lr", "0.001", "0.0002"] in cells(page, "Configuration")
    assert not re.search(r'(src|href)="(?!#)', page) and "http://www.w3.org/2000/svg" in page


def test_an_earlier_page_is_replaced_and_no_other_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    metrics = write_metrics(tmp_path / "m.jsonl", [step(1)])
    path, first = page_of(capsys, metrics)
    write_metrics(metrics, [step(2)])
    assert facts(first)["iteration"] == "1" and facts(page_of(capsys, metrics)[1])["iteration"] == "2"
    path.write_text("notes")
    assert refused(capsys, metrics) == (
        f"error: --output {path}: is there already and is no page of megazero; name another file\n"
    )
    assert path.read_text() == "notes"
    other, _ = page_of(capsys, metrics, "--output", tmp_path / "new" / "x.html")
    assert other == tmp_path / "new" / "x.html"
    assert refused(capsys, metrics, "--output", tmp_path) == f"error: --output {tmp_path}: is a folder; name a file\n"


def test_runs_beside_each_other_show_what_differs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", 40), write_run(tmp_path / "b", 20, "--lr 2e-4 --seed 5", seed=1)]
    path, page = page_of(capsys, *runs, "--output", tmp_path / "both.html")
    assert path == tmp_path / "both.html" and "<h1>2 runs: a, b</h1>" in page
    first, second = cells(page, "Runs")
    assert (first[0], first[1], second[0], second[1]) == ("a", "40", "b", "20")
    settings = page.split("<h2>Differences of configuration</h2>")[1]
    assert "show the" in settings and "that are the same in all runs too" in settings
    shown = [re.findall(r"<td.*?>(.*?)</td>", row) for row in settings.splitlines() if row.startswith("<tr><td")]
    different = {row[1]: row[2:] for row in shown}
    assert different["lr"] == ["0.001", "0.0002"] and different["train_length"] == ["40 iterations", "20 iterations"]
    assert set(different) == {"lr", "seed", "train_length", "save", "metrics_file"}


def test_what_went_wrong_is_at_the_head(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two steps without a loss, of which one has no norm either, two that were skipped, and two that were run again."""
    records = [step(i) for i in (1, 2, 3, 4, 5, 6, 5, 6, 7)]
    records[1] = replace(records[1], loss=nan)
    records[2] = replace(records[2], loss=nan, grad_norm=inf)
    records[3], records[8] = skipped(records[3]), skipped(records[8])
    _, page = page_of(capsys, write_metrics(tmp_path / "m.jsonl", records))
    told = facts(page)
    assert [told[name] for name in ("not finite", "skipped steps", "resumes", "steps run again")] == [
        "2",
        "2",
        "1",
        "2",
    ]
    assert page.count('<div class="fact bad">') == 2, "resumes are in order"
    assert [row[:3] for row in cells(page, "Events")] == [
        ["not finite", "2", "3"],
        ["not finite", "3", "3"],
        ["skip", "4", "4"],
        ["resume", "5", "5"],
        ["skip", "7", "7"],
    ]


def test_a_line_that_is_being_written_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    metrics = write_metrics(tmp_path / "m.jsonl", [step(1), step(2)])
    metrics.write_bytes(metrics.read_bytes()[:-30])
    _, page = page_of(capsys, metrics)
    assert facts(page)["iteration"] == "1" and "the last line is not whole, so it was being written" in page


def test_what_is_no_run_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "these are missing: RUN" in refused(capsys)
    assert f"error: {tmp_path} is no folder of a run: give the folder of --save" in refused(capsys, tmp_path)
    assert "is not there" in refused(capsys, tmp_path / "none")
    metrics = write_metrics(tmp_path / "m.jsonl", [step(1)])
    (tmp_path / "corpus.jsonl").write_text('{"text": "a line"}\n')
    for begins in (metrics.read_text()[20:], "\xff" + metrics.read_text()):
        metrics.write_text(begins, "latin-1")
        assert f"error: {metrics}, line 1, is no " in refused(capsys, tmp_path)
    metrics.unlink()
    assert f"error: {tmp_path} is no folder of a run" in refused(capsys, tmp_path)
    write_metrics(metrics, [step(1)])
    with metrics.open("a") as file:
        file.write('{"iteration": 2, "loss": "low", "skipped": false}\n')
    assert "line 2, has a string as `loss`, not a number: 'low'" in refused(capsys, metrics)
    assert not (tmp_path / "report.html").exists()
