"""Bytes of units beside known numbers: those of a second forward by hand, of tensors with sizes only, which plans once
had. `tape_numbers.txt` has a run in four lines: body of attention, kind of device, what is recomputed, flags; then for
each unit the six numbers of `UnitBytes`, and where that forward was wrong by how much.

It was wrong in these. Real allocations on a CPU (`test_activations`) show those of fp64 and of FP8 with ZeRO-3. All
others were read from the code:
embedding backward  a card's kernel sorts ids, which takes their order and their places; with a document mask on a card
                    no sums of the table are made
block, fp8          a second micro-batch's gradient of a weight is a product beside the sum; with ZeRO-3 each product
                    keeps the inverse scale of its own copy of the weight
block, lora         scales of adapters are numbers in host memory, and a low-rank product lives to the end of its line
block, efficient    the context is a view, also of several samples, and is not copied
block, softmax      the product has an empty summand of one element
head, fp64          the plain bodies take blocks of rows
head, one sample    labels in the order of the hidden states are a view
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from fused_ops.attention.selection import Body
from megazero.model.stage import StageSpec
from megazero.pipeline.measured import UnitBytes
from megazero.plan.activations import ActivationPlan
from tests.plan.test_activations import parsed

LINES = Path(__file__).with_name("tape_numbers.txt").read_text().splitlines()
RUNS = [LINES[start : start + 4] for start in range(0, len(LINES), 4)]
NAMES = [field.name for field in fields(UnitBytes)]


def known(line: str) -> tuple[str, UnitBytes]:
    """(the unit, its bytes) of a line."""
    unit, *words = line.split()
    numbers = dict(zip(NAMES, map(int, words[: len(NAMES)]), strict=True))
    for word in words[len(NAMES) :]:
        name, apart = re.fullmatch(r"([a-z]+)([+-]\d+)", word).groups()  # type: ignore[union-attr]
        numbers[name] += int(apart)
    return unit, UnitBytes(**numbers)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Blocks of the plain bodies are larger with more threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("number", range(len(RUNS)))
def test_units_take_the_known_bytes(number: int) -> None:
    title, *lines = RUNS[number]
    body, kind, recompute, words = title.split(maxsplit=3)
    ranks = int(match[1]) if (match := re.search(r"--tp (\d)", words)) else 1
    run = parsed(words, ranks)
    count = run.model.num_layers
    plan, spec = ActivationPlan(run, (Body[body],) * count, kind), StageSpec(range(1), True, True)
    units = plan.units(spec, (recompute,) * count)
    assert dict(zip(("embedding", "block", "head"), units, strict=True)) == dict(map(known, lines))


def test_known_numbers_are_of_many_kinds() -> None:
    titles = [run[0] for run in RUNS]
    assert len(titles) == 43
    for word in (*Body.__members__, "cpu", "cuda", "none", "selective", "full", "--tp 4", "--sequence-parallel"):
        assert any(word in title.split() or word in title for title in titles), word
