"""The compiled kernels on every kind of layout: float64 never runs them, so these runs are in fp32, beside one process in float64.

The plain torch bodies on the same layout say what fp32 itself costs, and the kernels may cost little more.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.parity.layouts import Case, cases
from tests.parity.training import data_flags, train, worst

COUNT = int(os.environ.get("MEGAZERO_PARITY_KERNELS", "16"))
SEED = int(os.environ.get("MEGAZERO_PARITY_SEED", "2026"))
EMULATED = 4
"""Layouts on the emulated CUDA kernels, which are slow: two steps each."""
STEPS = 5
# Keys' biases have no gradient but what is rounded; a larger epsilon keeps Adam from blowing that up to a full step.
NUMBERS = ["--train-iters", str(STEPS), "--adam-eps", "1e-3"]
TOLERANCE, AT_A_KINK = 1e-5, 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("case", list(cases(EMULATED, SEED + 2)), ids=lambda case: case.name)
def test_cuda_kernels_equal_one_process_in_float64(case: Case, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The whole step on the emulated CUDA kernels: what ops ask of a library whose work is only queued, and all that is between them."""
    more = [*data_flags(corpus, tmp_path_factory.getbasetemp() / "cache"), *NUMBERS, "--train-iters", "2"]
    exact = train(1, [*case.model_flags(), *more, "--micro-batch-size", "1"])
    tolerance = AT_A_KINK if case.activation == "relu" else TOLERANCE
    differences = worst(train(case.ranks, [*case.model_flags("fp32"), *more, *case.layout_flags()], "emulated"), exact)
    assert all(value < tolerance for value in differences.values()), differences


@pytest.mark.slow
@pytest.mark.parametrize("case", list(cases(COUNT, SEED + 1)), ids=lambda case: case.name)
def test_kernels_equal_one_process_in_float64(case: Case, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    more = [*data_flags(corpus, tmp_path_factory.getbasetemp() / "cache"), *NUMBERS]
    exact = train(1, [*case.model_flags(), *more, "--micro-batch-size", "1"])
    # Next to ReLU's kink a rounding decides whether a unit learns at all.
    tolerance = AT_A_KINK if case.activation == "relu" else TOLERANCE
    for fused in ("auto", "reference"):
        differences = worst(train(case.ranks, [*case.model_flags("fp32"), *more, *case.layout_flags()], fused), exact)
        assert all(value < tolerance for value in differences.values()), (fused, differences)
