"""What a run tells at its end."""

from __future__ import annotations

import sys

import pytest

from megazero.config.schema import CheckpointConfig, Run, TrainerConfig
from megazero.train.report import report

SAID = "def \x1b]0;owned\x07\x9b31m(a):\n\treturn\x08 a"


@pytest.mark.parametrize(
    ("terminal", "shown"), [(True, "def \\x1b]0;owned\\x07\\x9b31m(a):\n\treturn\\x08 a"), (False, SAID)]
)
def test_a_sample_moves_nothing_at_a_terminal(
    terminal: bool, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a model says of control characters would be obeyed there; a file gets it as it is."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    report(Run(trainer=TrainerConfig(sample_prompt="def \x1b")), SAID)
    assert capsys.readouterr().out.startswith(f"\nThe model continues 'def \\x1b':\n\n{shown}\n")


def test_the_places_are_all_that_a_run_writes(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = TrainerConfig(metrics_file="m.jsonl", tensorboard_dir="curves", sinks=("board", "wall"))
    report(Run(trainer=trainer, checkpoint=CheckpointConfig(save="runs/a")), None)
    told = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert told == {"checkpoints": "runs/a", "metrics": "m.jsonl", "tensorboard": "curves", "sinks": "board wall"}
