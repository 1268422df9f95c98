"""The glossary is short, and what it names is there; no two classes of the program share a name."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| **")]


def classes() -> list[str]:
    """Public classes of the program, protocols included, once per definition."""
    files = [path for folder in ("megazero", "fused_ops") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [name for path in files for name in re.findall(r"^class ([A-Z]\w*)\b", path.read_text(), re.M)]


def test_two_dozen_words_or_so_each_with_a_sentence_and_the_fields_term() -> None:
    words = [word for row in ROWS for word in re.findall(r"\*\*(.*?)\*\*", row)]
    assert 0 < len(words) == len(ROWS) <= 28 and len(set(words)) == len(words)
    for row in ROWS:
        _, _, meaning, elsewhere, _ = re.split(r"(?<!\\)\|", row)
        assert meaning.strip().endswith(".") and elsewhere.strip(), row


def test_what_the_glossary_names_is_there() -> None:
    named = re.findall(r"`((?:config|mpu|plan|program|train|zero)\.[\w.]+)`", "\n".join(ROWS))
    assert len(named) >= 15
    for name in named:
        room, module, *rest = name.split(".")
        path = ROOT / "megazero" / room / module
        path = (
            path / f"{rest.pop(0)}.py" if path.is_dir() and rest else path if path.is_dir() else path.with_suffix(".py")
        )
        assert path.exists(), name
        assert not rest or re.search(rf"^(class )?{rest[0]}\b", path.read_text(), re.M), name


def test_one_name_for_one_class() -> None:
    assert {name for name, count in Counter(classes()).items() if count > 1} == set()
