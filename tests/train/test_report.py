"""What a run tells at its end."""

from __future__ import annotations

import sys

import pytest

from megazero.config.schema import Run, TrainerConfig
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
