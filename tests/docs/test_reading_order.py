"""The page with the reading order names files that are there, names that stand in them, and about their lengths."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT, text_of

PAGE = "docs/how-it-works/reading-order.md"
ROW = re.compile(r"^\| (\d+) \| `([^`]+)` \| ([\d,]+) \| (.+?) \| (.+) \|$", re.M)
ROWS = ROW.findall(text_of(PAGE))
NEARLY = 1.5
"""How many times as long or as short a file may be as the page says. Beyond that a reader would be misled."""


def length(path: str) -> int:
    return len((ROOT / path).read_text().splitlines())


def test_there_are_twelve_files_in_order() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, 13))
    assert len({path for _, path, *_ in ROWS}) == 12


@pytest.mark.parametrize("row", ROWS, ids=[row[1] for row in ROWS])
def test_a_file_is_there_and_about_as_long_as_the_page_says(row: tuple[str, ...]) -> None:
    _, path, lines, *_ = row
    assert int(lines) / NEARLY <= length(path) <= int(lines) * NEARLY, f"{path} has {length(path)} lines"


@pytest.mark.parametrize("row", ROWS, ids=[row[1] for row in ROWS])
def test_names_of_a_row_stand_in_its_file(row: tuple[str, ...]) -> None:
    _, path, _, look, ask = row
    names = [name for name in re.findall(r"`([^`]+)`", f"{look} {ask}") if "/" not in name]
    words = set(re.findall(r"\w+", (ROOT / path).read_text()))
    assert names and not [name for name in names if name not in words], path


def test_the_page_says_how_long_all_of_them_are() -> None:
    told = re.search(r"about ([\d,]+) lines", text_of(PAGE))
    assert told is not None
    total = sum(int(lines) for _, _, lines, *_ in ROWS)
    assert abs(int(told[1].replace(",", "")) - total) <= 250, total
