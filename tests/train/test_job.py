"""What a job tells at its end."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from megazero.config.schema import Run, TrainerConfig
from megazero.train.job import Job

SAID = "def \x1b]0;owned\x07\x9b31m(a):\n\treturn\x08 a"


@pytest.mark.parametrize(
    ("terminal", "shown"), [(True, "def \\x1b]0;owned\\x07\\x9b31m(a):\n\treturn\\x08 a"), (False, SAID)]
)
def test_a_sample_moves_nothing_at_a_terminal(
    terminal: bool, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a model says of control characters would be obeyed there; a file gets it as it is."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    log, run = SimpleNamespace(close=lambda: None), Run(trainer=TrainerConfig(sample_prompt="def \x1b"))
    ended: Any = SimpleNamespace(
        run=run, grid=SimpleNamespace(rank=0), trainer=SimpleNamespace(log=log), sample=lambda: SAID
    )
    Job.report(ended)
    assert capsys.readouterr().out.startswith(f"\nThe model continues 'def \\x1b':\n\n{shown}\n")
