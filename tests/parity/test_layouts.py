"""Every layout is the same program: loss, gradient norm and final weights of 10 steps against one process, in float64."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.parity.layouts import Case, cases
from tests.parity.training import Outcome, data_flags, train, worst

COUNT = int(os.environ.get("MEGAZERO_PARITY_LAYOUTS", "40"))
SEED = int(os.environ.get("MEGAZERO_PARITY_SEED", "2026"))
STEPS = 10
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, ...], Outcome]:
    """One-process runs by their flags."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("case", list(cases(COUNT, SEED)), ids=lambda case: case.name)
def test_layout_equals_one_process(
    case: Case, corpus: Path, tmp_path_factory: pytest.TempPathFactory, references: dict[tuple[str, ...], Outcome]
) -> None:
    cache = tmp_path_factory.getbasetemp() / "cache"
    flags = [*case.model_flags(), *data_flags(corpus, cache), "--train-iters", str(STEPS)]
    key = tuple(flags)
    if key not in references:
        references[key] = train(1, [*flags, "--micro-batch-size", "1"])
    differences = worst(train(case.ranks, [*flags, *case.layout_flags()]), references[key])
    assert all(value < TOLERANCE for value in differences.values()), differences
