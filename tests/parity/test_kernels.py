"""The compiled kernels on every kind of layout: float64 never runs them, so these runs are in fp32, beside one process
in float64.

The plain torch bodies on the same layout say what fp32 itself costs, and the kernels may cost little more.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parity.conftest import Reference
from tests.parity.layouts import Case, Model
from tests.parity.training import train, worst
from tests.parity.ways import Way

# Keys' biases have no gradient but what is rounded; a larger epsilon keeps Adam from blowing that up to a full step.
NUMBERS = ["--adam-eps", "1e-3", "--train-iters"]
TOLERANCE, AT_A_KINK = 1e-5, 1e-3
Flags = Callable[[Model, str, list[str]], list[str]]


def check(case: Case, steps: str, fused: str, flags_of: Flags, reference: Reference) -> None:
    more = [*NUMBERS, steps]
    # Next to ReLU's kink a rounding decides whether a unit learns at all.
    tolerance = AT_A_KINK if case.model.activation == "relu" else TOLERANCE
    flags = [*flags_of(case.model, "fp32", more), *case.layout_flags()]
    found = train(case.ranks, flags, fused, way=Way(as_nccl=case.as_nccl))
    differences = worst(found, reference(case.model, more))
    assert all(value < tolerance for value in differences.values()), (fused, differences)


@pytest.mark.slow
@pytest.mark.layouts(check=0, test=2, all=8, salt=2)
def test_cuda_kernels_equal_one_process_in_float64(case: Case, flags_of: Flags, reference: Reference) -> None:
    """The whole step on the emulated CUDA kernels: what ops ask of a library whose work is only queued, and all that is
    between them.
    """
    check(case, "2", "emulated", flags_of, reference)


@pytest.mark.slow
@pytest.mark.layouts(check=0, test=5, all=40, salt=1)
def test_kernels_equal_one_process_in_float64(case: Case, flags_of: Flags, reference: Reference) -> None:
    check(case, "3", "auto", flags_of, reference)


@pytest.mark.slow
@pytest.mark.layouts(check=0, test=2, all=40, salt=1)
def test_plain_bodies_equal_one_process_in_float64(case: Case, flags_of: Flags, reference: Reference) -> None:
    """On the first of the same layouts."""
    check(case, "3", "reference", flags_of, reference)
