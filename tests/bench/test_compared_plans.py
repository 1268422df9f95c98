"""The scripts that compare predicted with measured steps: which runs they make, and what counts of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import calibrated_plan
from bench.calibrated_plan import LAYOUTS, Layout, in_turns


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
