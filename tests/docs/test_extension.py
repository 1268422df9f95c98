"""What makes parts of the pages: plain docstrings, options, drawings."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from docs.extension.docstrings import restructured
from docs.extension.drawings import DRAWINGS, argument
from docs.extension.drawings.batch import batch
from docs.extension.drawings.grid import grid
from docs.extension.drawings.schedule import schedule
from docs.extension.options import about, all_options, anchor, options_in, takes
from tests.docs.pages import ROOT, text_of

PICTURE = ROOT / "docs" / "pictures" / "schedules.svg"


def test_code_and_marks_of_its_own_in_a_docstring() -> None:
    assert restructured(["Reads `a_b`, *args and dp_ of x|y."]) == ["Reads ``a_b``, \\*args and dp\\_ of x\\|y.", ""]


def test_lists_of_names_in_a_docstring() -> None:
    lines = [
        "Two of them:",
        "path       a folder",
        "           of any format",
        "device, at  where",
        "first, second",
        "           both",
    ]
    assert restructured(lines) == [
        "Two of them:",
        "",
        "``path``",
        "    a folder of any format",
        "``device, at``",
        "    where",
        "``first, second``",
        "    both",
        "",
    ]


def test_indented_lines_stand_as_they_are() -> None:
    assert restructured(["As in", "", "    a  *b*", ""]) == ["As in", "", "::", "", "    a  *b*", ""]


def test_every_flag_has_an_entry() -> None:
    """In the sections that the page of flags shows."""
    shown = re.findall(r"```\{flags\} (\w+)", text_of("docs/reference/flags.md"))
    listed = [option for section in shown for option in options_in(section)]
    assert listed == list(all_options()) and all(about(section) for section in shown)
    assert len({anchor(option) for option in listed}) == len(listed)


def test_what_an_entry_says() -> None:
    by_name = {option.name: option for option in all_options()}
    assert takes(by_name["tp"]) == "whole number" and takes(by_name["overlap"]) == "switch"
    assert takes(by_name["precision"]) == "fp64 | fp32 | bf16 | fp16"
    assert takes(by_name["partition"]) == "whole number, one or more"


def test_a_section_that_is_none() -> None:
    with pytest.raises(ValueError, match="'layout' is not one of command, model"):
        options_in("layout")


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawings_are_pictures(name: str) -> None:
    picture = ElementTree.fromstring(DRAWINGS[name]())
    _, _, width, height = (float(number) for number in picture.attrib["viewBox"].split())
    for box in picture.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, w, h = (float(box.attrib[key]) for key in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width + 1 and y + h <= height, "a shape is outside"


def words_in(picture: str) -> list[str]:
    """The words of a drawing, in order."""
    return [text.text or "" for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_the_grid_has_every_rank_once_and_tensor_parallel_ones_side_by_side() -> None:
    ranks = [int(word) for word in words_in(grid(tp=2, pp=2, dp=3)) if word.isdigit()]
    assert ranks == list(range(12))


def test_the_batch_has_every_sample_twice() -> None:
    samples = [int(word) for word in words_in(batch(global_batch=8, consumed=40)) if word.isdigit()]
    assert sorted(samples) == sorted([*range(40, 48)] * 2)
    assert samples[:8] == [40, 41, 44, 45, 42, 43, 46, 47], "rank 0 of two has the first micro-batch of each pair"


def test_a_schedule_has_each_micro_batch_forwards_and_backwards_on_every_stage() -> None:
    words = words_in(schedule("zb-h1", pp=3, micro_batches=5))
    assert [words.count(str(number)) for number in range(5)] == [9] * 5


def test_what_a_page_writes_behind_a_drawing() -> None:
    assert argument("tp=2") == ("tp", 2) and argument("name=zb-v") == ("name", "zb-v")
    with pytest.raises(ValueError, match="'tp' is not name=value"):
        argument("tp")


def test_the_picture_of_the_readme_is_what_the_code_draws() -> None:
    """`python -m docs.extension.drawings schedules` makes it."""
    assert PICTURE.read_text() == DRAWINGS["schedules"](), "make it anew: see above"
