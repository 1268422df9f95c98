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


def test_a_dozen_words_at_most_each_with_a_sentence_and_the_fields_term() -> None:
    words = [word for row in ROWS for word in re.findall(r"\*\*(.*?)\*\*", row)]
    assert 0 < len(words) == len(ROWS) <= 12 and len(set(words)) == len(words)
    for row in ROWS:
        _, _, meaning, elsewhere, _ = re.split(r"(?<!\\)\|", row)
        assert meaning.strip().endswith(".") and elsewhere.strip(), row


def test_what_the_glossary_names_is_there() -> None:
    named = re.findall(r"`((?:mpu|zero)\.[\w.]+)`", "\n".join(ROWS))
    assert len(named) >= 3
    for name in named:
        room, module, *rest = name.split(".")
        text = (ROOT / "megazero" / room / f"{module}.py").read_text()
        assert not rest or f"class {rest[0]}" in text, name


def test_one_name_for_one_class() -> None:
    assert {name for name, count in Counter(classes()).items() if count > 1} == set()
