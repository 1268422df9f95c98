"""Every layout is the same program: loss, gradient norm and final weights of four steps against one
process, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest

from tests.parity.conftest import Reference
from tests.parity.layouts import MODELS, REQUIRED, Case, Model, cases
from tests.parity.training import train, worst
from tests.parity.ways import Way

STEPS = ["--train-iters", "4"]
TOLERANCE = 1e-9
COUNT = 24


@pytest.mark.layouts(check=1, test=COUNT, all=150, salt=0)
def test_layout_equals_one_process(
    case: Case, flags_of: Callable[[Model, str, list[str]], list[str]], reference: Reference
) -> None:
    flags = [*flags_of(case.model, "fp64", STEPS), *case.layout_flags()]
    found = train(case.ranks, flags, way=Way(as_nccl=case.as_nccl))
    differences = worst(found, reference(case.model, STEPS))
    assert all(value < TOLERANCE for value in differences.values()), differences


@pytest.mark.parametrize("seed", [0, 1, 2026])
def test_what_is_drawn(seed: int) -> None:
    """A third of the cases goes without shared memory, a third as with NCCL, and every value that an axis has is tried
    on some layout and some model.
    """
    drawn = list(cases(COUNT, seed))
    assert sum(not case.shared_memory for case in drawn) == sum(case.as_nccl for case in drawn) == COUNT // 3
    for number, fixed in enumerate(REQUIRED):
        case = drawn[number]
        assert all(
            getattr(case.model if hasattr(case.model, name) else case, name) == value for name, value in fixed.items()
        )
    for name in (
        "tp",
        "pp",
        "dp",
        "zero",
        "shard",
        "schedule",
        "recompute",
        "sequence_parallel",
        "overlap",
        "late_update",
        "group",
        "offload",
        "bucket",
        "virtual",
        "accumulation",
    ):
        assert {getattr(case, name) for case in drawn} == {getattr(case, name) for case in cases(400, 7)}, name
    assert {case.model.name for case in drawn} == {model.name for model in MODELS}
    for field in fields(Model):
        assert field.name == "name" or len({getattr(model, field.name) for model in MODELS}) > 1
