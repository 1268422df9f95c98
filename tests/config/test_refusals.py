"""The page of what is refused: every row is refused for the flags that it names, and for nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megazero.config.parse import ConfigError, parse_run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "refused.md"


def rows() -> list[str]:
    """The command lines of the first column; before "with" stands what each of the others is added to."""
    _, _, after = PAGE.read_text().partition("| refused | because |\n|---|---|\n")
    assert after
    lines = []
    for row in after.split("\n\n")[0].splitlines():
        cell = row.split("|")[1]
        base, separator, others = cell.partition(" with ")
        named = re.findall(r"`([^`]+)`", others if separator else cell)
        lines += [f"{base.strip(' `')} {flags}" if separator else flags for flags in named]
    return lines


@pytest.mark.parametrize("line", rows())
def test_is_refused(line: str) -> None:
    flags = re.findall(r"--[a-z0-9-]+", line)
    with pytest.raises(ConfigError) as refused:
        parse_run(line.split(), None)
    (problem,) = refused.value.problems
    assert any(flag in problem for flag in flags)


def test_there_are_many() -> None:
    assert len(rows()) >= 15
