"""What makes parts of the pages: plain docstrings, options, drawings."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from docs.extension.api import described
from docs.extension.docstrings import markdown
from docs.extension.drawings import DRAWINGS, argument
from docs.extension.drawings.batch import batch
from docs.extension.drawings.curves import learning_rates, loss
from docs.extension.drawings.grid import grid
from docs.extension.drawings.house import house, rooms
from docs.extension.drawings.samples import packing, windows
from docs.extension.drawings.schedule import schedule
from docs.extension.drawings.shards import boxes, parts_by_rank
from docs.extension.drawings.step import step
from docs.extension.options import all_options, options_in, takes
from docs.extension.svg import COLOURS
from megazero.optim.lr_schedule import STYLES
from tests.docs.pages import ROOT


def test_code_and_marks_of_its_own_in_a_docstring() -> None:
    assert markdown(["Reads `a_b`, *args and dp_ of x|y."]) == ["Reads `a_b`, \\*args and dp\\_ of x\\|y.", ""]


def test_lists_of_names_in_a_docstring() -> None:
    lines = [
        "Two of them:",
        "path       a folder",
        "           of any format",
        "device, at  where",
        "first, second",
        "           both",
    ]
    assert markdown(lines) == [
        "Two of them:",
        "",
        "- `path`: a folder of any format",
        "- `device, at`: where",
        "- `first, second`: both",
        "",
    ]


def test_indented_lines_stand_as_they_are() -> None:
    assert markdown(["As in", "", "    a  *b*", ""]) == ["As in", "", "```text", "a  *b*", "```", ""]


def test_a_function_a_class_and_a_module_as_markdown() -> None:
    resolved = described("megazero.config.parse.parse_run")
    assert resolved.startswith("### `parse_run`\n\n```python\nparse_run(") and ") -> Run\n```" in resolved
    training = described("megazero.train.api.Training", "all")
    assert "#### `Training.stop`\n\n```python\nTraining.stop(why: str = 'its program asked for it') -> None" in training
    assert "Training(" not in training, "users do not make one"
    assert described("megazero.inference.sampling.Sampling", "call").startswith(
        "### `Sampling`\n\n```python\nSampling("
    )
    assert described("megazero.checkpoint").startswith("megazero's checkpoints: ")
    with pytest.raises(AttributeError, match="parse_rum"):
        described("megazero.config.parse.parse_rum")


def test_what_an_entry_says() -> None:
    by_name = {option.name: option for option in all_options()}
    assert takes(by_name["tp"]) == "whole number" and takes(by_name["overlap"]) == "switch"
    assert takes(by_name["precision"]) == "fp64 | fp32 | bf16 | fp16"
    assert not [option for option in options_in("parallel") if option.name == "overlap"]
    assert takes(by_name["partition"]) == "whole number, one or more"


def test_a_section_that_is_none() -> None:
    with pytest.raises(ValueError, match="'layout' is not one of command, model"):
        options_in("layout")


@pytest.mark.few(cases=4)
@pytest.mark.parametrize("name", DRAWINGS)
def test_drawings_are_pictures(name: str) -> None:
    picture = ElementTree.fromstring(DRAWINGS[name]())
    _, _, width, height = (float(number) for number in picture.attrib["viewBox"].split())
    for box in picture.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, w, h = (float(box.attrib[key]) for key in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width + 1 and y + h <= height, "a shape is outside"


def shapes(picture: str, kind: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}" + kind))


def test_the_shortest_copies_of_a_step_can_be_seen() -> None:
    picture = step(zero=2, pp=1, micro_batches=2, blocks=3, offload="cpu", gradients="cpu")
    assert min(float(box.attrib["width"]) for box in shapes(picture, "rect")) == 1.6


def words_in(picture: str) -> list[str]:
    """The words of a drawing, in order."""
    return [text.text or "" for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_the_grid_has_every_rank_once_and_tensor_parallel_ones_side_by_side() -> None:
    ranks = [int(word) for word in words_in(grid(tp=2, pp=2, dp=3)) if word.isdigit()]
    assert ranks == list(range(12))


def test_the_house_has_every_room_on_its_floor() -> None:
    """The table of the page is also what the test of imports reads."""
    drawn = words_in(house())
    packages = {path.parent.name for path in (ROOT / "megazero").glob("*/__init__.py")}
    assert packages <= set(drawn) and {"fused_ops", "launch.py", "bench"} <= set(drawn)
    assert drawn.index("train") < drawn.index("zero") < drawn.index("model") < drawn.index("config")
    assert rooms("## Floors\n| 2 | `a/` | x |\n|   | `megazero/b/`, `c.py` | y |\n| 1 | `d/` | z |\n## More") == {
        2: ["a", "b", "c.py"],
        1: ["d"],
    }


def test_the_batch_has_every_sample_twice() -> None:
    samples = [int(word) for word in words_in(batch(global_batch=8, consumed=40)) if word.isdigit()]
    assert sorted(samples) == sorted([*range(40, 48)] * 2)
    assert samples[:8] == [40, 41, 44, 45, 42, 43, 46, 47], "rank 0 of two has the first micro-batch of each pair"


def test_a_schedule_has_each_micro_batch_forwards_and_backwards_on_every_stage() -> None:
    words = words_in(schedule("zb-h1", pp=3, micro_batches=5))
    assert [words.count(str(number)) for number in range(5)] == [9] * 5


def test_the_curve_is_that_of_the_recorded_run() -> None:
    """240 losses as two curves, and the loss on held-out text; the curve ends lower than it begins."""
    curves = [line.attrib["points"].split() for line in shapes(loss(), "polyline")]
    heights = [float(point.split(",")[1]) for point in curves[0]]
    assert [len(points) for points in curves] == [240, 240] and heights[-1] - heights[0] > 100
    assert any("held-out" in word for word in words_in(loss()))


def test_every_style_of_learning_rate_has_a_curve() -> None:
    assert len(shapes(learning_rates(), "polyline")) == 1 + len(STYLES)
    assert {"constant", *STYLES} <= set(words_in(learning_rates()))


def test_a_block_has_its_matrices_cut_by_rows_and_by_columns() -> None:
    """Of twelve parameters six are cut; the two parts of qkv lie below each other, those of output side by side."""
    drawn = [[float(box.attrib[key]) for key in ("x", "y")] for box in shapes(boxes(tp=2), "rect")]
    assert len(drawn) == 12 + 6 + 3
    (qkv, qkv_below), (output, output_beside) = drawn[2:4], drawn[6:8]
    assert qkv[0] == qkv_below[0] and qkv[1] < qkv_below[1]
    assert output[1] == output_beside[1] and output[0] < output_beside[0]


def test_the_files_of_all_ranks_have_every_element_once() -> None:
    written = parts_by_rank(tp=2, dp=2)
    assert len(written) == 4
    whole = {part.spec.name: math.prod(part.spec.shape) for parts in written.values() for part in parts}
    assert sum(part.numel for parts in written.values() for part in parts) == sum(whole.values())


def test_every_conversation_is_in_one_sample() -> None:
    packed = words_in(packing(conversations=9, length=64))
    assert sorted(int(word) for word in packed if word.isdigit()) == list(range(9))


def test_every_token_but_the_first_counts_in_one_window() -> None:
    """A box that counts is darker than one that is only read."""
    picture = windows(tokens=17, context=6, stride=4)
    *counted, _legend = [box.attrib["x"] for box in shapes(picture, "rect") if box.attrib["fill"] == COLOURS[0]]
    assert len(counted) == len(set(counted)) == 16


def test_what_a_page_writes_behind_a_drawing() -> None:
    assert argument("tp=2") == ("tp", 2) and argument("name=zb-v") == ("name", "zb-v")
    with pytest.raises(ValueError, match="'tp' is not name=value"):
        argument("tp")
