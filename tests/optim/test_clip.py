"""NUMERICAL_FAULTS 14 (DS#5150, #3790, #7171): the coefficient for every norm there is."""

import math

import pytest
import torch

from megazero.optim.clip import clip_coefficient


def coefficient(norm: float, max_norm: float) -> float:
    return clip_coefficient(torch.tensor(norm, dtype=torch.float64), max_norm).item()


@pytest.mark.parametrize("norm", [0.0, 1e-30, 0.5, 0.999, 1.0, 1.001, 7.0, 1e6, 1e30])
@pytest.mark.parametrize("max_norm", [1e-8, 0.3, 1.0, 100.0])
def test_fault_14_norm_after_clipping_is_at_most_the_maximum(norm: float, max_norm: float) -> None:
    c = coefficient(norm, max_norm)
    assert 0.0 < c <= 1.0
    assert c * norm <= max_norm
    if norm + 1e-6 <= max_norm:
        assert c == 1.0
    else:
        assert c == pytest.approx(max_norm / (norm + 1e-6), rel=1e-15)


def test_fault_14_zero_turns_clipping_off() -> None:
    assert coefficient(1e9, 0.0) == 1.0
    assert coefficient(math.inf, 0.0) == 1.0


def test_fault_14_infinite_and_undefined_norms() -> None:
    assert coefficient(math.inf, 1.0) == 0.0
    assert math.isnan(coefficient(math.nan, 1.0))


def test_it_is_float64_whatever_the_norm_is() -> None:
    assert clip_coefficient(torch.tensor(3.0, dtype=torch.float32), 1.0).dtype == torch.float64


def test_it_is_that_of_torch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    parameter.grad = torch.arange(5, dtype=torch.float64)
    before = parameter.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], 0.7)
    torch.testing.assert_close(before * clip_coefficient(norm, 0.7), parameter.grad, rtol=1e-15, atol=0.0)
