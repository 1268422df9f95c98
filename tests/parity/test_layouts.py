"""Every layout is the same program: loss, gradient norm and final weights of four steps against one
process, in float64.

float64 never runs the compiled kernels, so some layouts run in fp32 beside the same float64. The plain torch bodies say
what fp32 itself costs, and the kernels may cost little more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial

import pytest

from tests.parity.conftest import Reference
from tests.parity.layouts import MODELS, REQUIRED, Case, Model, cases
from tests.parity.training import train, worst

# Keys' biases have no gradient but what is rounded; a larger epsilon keeps Adam from blowing that up to a full step.
STEPS = ["--train-iters", "4", "--adam-eps", "1e-3"]
TOLERANCE = 1e-9
IN_FP32, AT_A_KINK = 1e-5, 1e-3
COUNT = 30
Flags = Callable[[Model, str, list[str]], list[str]]


@pytest.mark.layouts(draw=cases, check=1, test=COUNT, all=150, salt=0)
def test_layout_equals_one_process(case: Case, flags_of: Flags, reference: Reference) -> None:
    flags = [*flags_of(case.model, "fp64", STEPS), *case.layout_flags()]
    differences = worst(train(case.ranks, flags, way=case.way()), reference(case.model, STEPS))
    assert all(value < TOLERANCE for value in differences.values()), differences


def check_in_fp32(case: Case, fused: str, flags_of: Flags, reference: Reference) -> None:
    # Next to ReLU's kink a rounding decides whether a unit learns at all.
    tolerance = AT_A_KINK if case.model.activation == "relu" else IN_FP32
    flags = [*flags_of(case.model, "fp32", STEPS), *case.layout_flags()]
    differences = worst(train(case.ranks, flags, fused, way=case.way()), reference(case.model, STEPS))
    assert all(value < tolerance for value in differences.values()), (fused, differences)


@pytest.mark.slow
@pytest.mark.layouts(draw=partial(cases, required=()), check=0, test=1, all=8, salt=2)
def test_cuda_kernels_equal_one_process_in_float64(case: Case, flags_of: Flags, reference: Reference) -> None:
    """The whole step on the emulated CUDA kernels: what ops ask of a library whose work is only queued, and all that is
    between them.
    """
    check_in_fp32(case, "emulated", flags_of, reference)


@pytest.mark.slow
@pytest.mark.layouts(draw=partial(cases, required=()), check=0, test=4, all=40, salt=1)
def test_kernels_equal_one_process_in_float64(case: Case, flags_of: Flags, reference: Reference) -> None:
    check_in_fp32(case, "auto", flags_of, reference)


@pytest.mark.slow
@pytest.mark.layouts(draw=partial(cases, required=()), check=0, test=1, all=40, salt=1)
def test_plain_bodies_equal_one_process_in_float64(case: Case, flags_of: Flags, reference: Reference) -> None:
    """On the first of the same layouts."""
    check_in_fp32(case, "reference", flags_of, reference)


@pytest.mark.parametrize("seed", [0, 1, 2026])
def test_what_is_drawn(seed: int) -> None:
    """A third of the cases goes without shared memory, a third as with NCCL, and every value that an axis has is tried
    on some layout and some model.
    """
    drawn = list(cases(COUNT, seed))
    for count in (sum(not case.shared_memory for case in drawn), sum(case.as_nccl for case in drawn)):
        assert COUNT // 3 <= count <= COUNT // 3 + 1
    for case, fixed in zip(drawn, REQUIRED, strict=False):
        values = {**vars(case.model), **vars(case)}
        assert {name: values[name] for name in fixed} == fixed
    many = list(cases(100, 7))
    for name in {field.name for field in fields(Case)}:
        assert {getattr(case, name) for case in drawn} == {getattr(case, name) for case in many}, name
    assert {case.model for case in drawn} == {*MODELS}
    for field in fields(Model):
        assert field.name == "name" or len({getattr(model, field.name) for model in MODELS}) > 1
