"""Words for people."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megazero
from megazero.cli.main import main
from megazero.system.words import counted

ROOT = Path(megazero.__file__).parent


def test_one_is_no_plural() -> None:
    assert [counted(number, "document") for number in (0, 1, 2, 2000)] == [
        "0 documents",
        "1 document",
        "2 documents",
        "2,000 documents",
    ]
    assert [counted(number, "batch", "batches") for number in (1, 2)] == ["1 batch", "2 batches"]


def test_no_text_has_an_s_in_brackets() -> None:
    """A number stands before it, so `counted` can write the noun."""
    found = [
        f"{path}:{number}"
        for path in ROOT.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r'"[^"]*[a-z]\(s\)[^"]*"', line) and "str(" not in line
    ]
    assert not found


def test_a_pair_of_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.txt").write_text("a")
    words = ["--input", str(tmp_path), "--output-prefix", str(tmp_path / "one"), "--tokenizer", "byte", "--workers"]
    assert main(["prepare-data", *words, "1"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("1 document, 1 token (uint16)") and "1 file is read" in told.err
    assert main(["inspect-data", "--data-path", str(tmp_path / "one")]) == 0
    assert "one: 1 document in 1 sequence, 1 token (uint16, 2 bytes)" in capsys.readouterr().out
