"""The scripts that compare predicted with measured steps: which runs they make, and what counts of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import calibrated_plan, card_plan, results
from bench.calibrated_plan import LAYOUTS, Layout, in_turns
from bench.compared_steps import ComparedStep, StepTable


def test_layouts_run_in_turns_and_their_medians_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is slow for a round does not change the figure of any layout, and the table shows the round."""
    ran = list[Layout]()

    def run(layout: Layout, folder: Path) -> tuple[float, int, float]:
        number = len(ran) // 2
        ran.append(layout)
        return (0.1 * layout.ranks * (2 if number == 1 else 1 + number / 100), 100 + number, 0.5)

    monkeypatch.setattr(calibrated_plan, "run", run)
    one, two = LAYOUTS[0], LAYOUTS[6]
    seen = in_turns([one, two], 3, tmp_path)
    assert ran == [one, two] * 3 and [each.layout for each in seen] == [one, two]
    assert [each.median for each in seen] == [(pytest.approx(0.102), 101), (pytest.approx(0.204), 101)]
    assert [each.rounds for each in seen] == ["3: 100 to 200", "3: 200 to 400"]


def test_a_table_says_which_steps_are_as_predicted() -> None:
    table = StepTable(("flags",), ("GB", 1e9), (1, 2), (0.1, 0.03))
    near = ComparedStep(("a",), (0.1, 2e9), (0.109, 1.96e9))
    slow, large = ComparedStep(("b",), (0.1, 2e9), (0.085, 2e9)), ComparedStep(("c",), (0.1, 2e9), (0.1, 2.1e9))
    assert [table.is_met(row) for row in (near, slow, large)] == [True, False, False]
    lines = table.text([near, slow, large]).splitlines()
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells == ["a", "100.0", "109.0", "+9.0%", "2.00", "1.96", "-2.0%"]
    assert lines[-1] == (
        "time: 2 of 3 layouts within 10%, 8.0% in the mean, 15.0% at most; "
        "memory: 2 of 3 layouts within 3%, 2.3% in the mean, 5.0% at most"
    )


def test_runs_of_an_earlier_call_are_predicted_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a card, which need not be there: one of the runs of an H200 that are kept, by two entries."""
    (kept,) = results.RESULTS.glob("2026-11-29-*-card-plan.json")
    whole = json.loads(kept.read_text())
    (tmp_path / "one.json").write_text(json.dumps({**whole, "runs": whole["runs"][:1]}))
    words = ["--measured", str(tmp_path / "one.json"), "--results", str(tmp_path / "found")]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the script takes out
    monkeypatch.setattr("sys.argv", ["card_plan", *words])
    card_plan.main()
    told = capsys.readouterr().out
    assert told.startswith("h200\n") and told.count("gpt2-124m --micro-batch-size 8 | 78.7 |") == 2
    (written,) = (tmp_path / "found").glob("*.json")
    assert json.loads(written.read_text())["hardware"] == whole["hardware"]
