"""What a run writes down of a step, and in which order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megazero.config.parse import parse_run
from megazero.mpu.grid import single_process_grid
from megazero.telemetry.logline import LogLines
from megazero.telemetry.record import StepRecord
from megazero.train.logs import run_rates, sinks_of, step_log
from megazero.train.state import TrainingPosition
from tests.telemetry.test_steplog import step


def test_a_step_is_in_the_metrics_before_its_line_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is shown a step, or ends the run over its line (a terminal that is lost), finds its
    numbers in the file.
    """
    metrics, shown = tmp_path / "metrics.jsonl", []

    def line(self: LogLines, record: StepRecord) -> None:
        shown.append(
            (record.iteration, [json.loads(written)["iteration"] for written in metrics.read_text().splitlines()])
        )

    monkeypatch.setattr(LogLines, "step", line)
    run, grid = (
        parse_run(["--metrics-file", str(metrics), "--vocab-size", "99", "--train-iters", "3"], 1),
        single_process_grid(),
    )
    log = step_log(run, grid, sinks_of(run, grid, TrainingPosition(), None), run_rates(run, grid))
    for iteration in (1, 2):
        log.step(step(iteration))
    log.close()
    assert shown == [(1, [1]), (2, [1, 2])]
