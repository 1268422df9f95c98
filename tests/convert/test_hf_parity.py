"""A folder of `transformers` on any layout: logits in float64 and greedy text are those of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megazero.mpu.grid import single_process_grid
from tests.convert.hf_models import CASES, prompts, saved, their_answers
from tests.convert.hf_ranks import Answer, answer, answers
from tests.ranks import run_ranks

NEW = 10
MegatronTensor = Mapping[str, tuple[Path, Tensor, list[list[int]]]]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> MegatronTensor:
    """Case -> its folder and what transformers answers."""
    folder = tmp_path_factory.mktemp("hf")
    return {
        name: (saved(case, folder / str(i)), *their_answers(case, NEW)) for i, (name, case) in enumerate(CASES.items())
    }


def check(name: str, found: Answer, theirs: MegatronTensor) -> None:
    logits, text = found
    _, expected, generated = theirs[name]
    if logits is not None:
        assert logits.dtype == torch.float64
        assert ((logits - expected).abs().max() / expected.abs().max()).item() < CASES[name].tolerance, name
    assert text == generated, name


@pytest.mark.few(cases=3)
@pytest.mark.parametrize("name", CASES)
def test_one_process(name: str, theirs: MegatronTensor) -> None:
    found = answer(str(theirs[name][0]), single_process_grid("cpu"), prompts(), NEW)
    assert found[0] is not None
    check(name, found, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [(2, [(2, 1), (1, 2)]), (3, [(1, 3), (3, 1)]), (4, [(4, 1), (2, 2)]), (6, [(2, 3)]), (8, [(4, 2)])],
)
def test_layouts(ranks: int, layouts: list[tuple[int, int]], theirs: MegatronTensor) -> None:
    names = {tp: [name for name, case in CASES.items() if tp in case.tps] for tp, _ in layouts}
    jobs = [(tp, pp, [str(theirs[name][0]) for name in names[tp]]) for tp, pp in layouts]
    by_rank = run_ranks(ranks, answers, jobs, prompts(), NEW)
    for index, (tp, _) in enumerate(layouts):
        for number, name in enumerate(names[tp]):
            found = [rank[index][number] for rank in by_rank]
            assert sum(logits is not None for logits, _ in found) == tp
            for each in found:
                check(name, each, theirs)
