"""The row kernels of the cross-entropy against float64, on every instruction set level."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_ops.cross_entropy import row_statistics, write_gradient
from tests.fused_ops.levels import DTYPES, assert_close, drawn, integers, level, same_kind

pytestmark = pytest.mark.sampled

__all__ = ["level"]


def targets(rows: int, real: int, seed: int = 1) -> Tensor:
    """Columns of the labels; about a third lies on other ranks."""
    found = integers(0, max(real, 1), (rows,), seed)
    return torch.where(torch.arange(rows) % 3 == 2, -1, found) if real else torch.full((rows,), -1)


def both_passes(logits: Tensor, target: Tensor, real: int, smooth: bool, weight: Tensor) -> list[Tensor]:
    """[log of the normaliser, sums behind the first, gradient]; the gradient lies where the logits lay."""
    logits = logits.clone()
    logits[:, real:] = math.nan
    largest, sums = row_statistics(logits, target, real, summed=smooth)
    log_normaliser = sums[0].log() + largest
    weight = weight.to(sums.dtype)
    write_gradient(logits, target, real, log_normaliser, weight, weight * -0.9, weight * 0.01 if smooth else None)
    return [log_normaliser, *sums[1:], logits]


def compare(
    rows: int, columns: int, real: int, dtype: torch.dtype, smooth: bool, scale: float = 3.0, seed: int = 1
) -> None:
    logits, target, weight = (
        (drawn(rows, columns, seed=seed) * scale).to(dtype),
        targets(rows, real, seed),
        drawn(rows, seed=seed + 1),
    )
    found = both_passes(logits, target, real, smooth, weight)
    exact = both_passes(logits.double(), target, real, smooth, weight)
    assert not found[-1][:, real:].any()
    probability = torch.zeros_like(exact[-1])
    probability[:, :real] = (logits[:, :real].double() - exact[0][:, None]).exp() * weight[:, None]
    for ours, theirs in zip(found, exact, strict=True):
        if theirs.isfinite().all():
            assert_close(ours, theirs, slack=max(1.0, scale / 3), terms=probability if theirs.dim() == 2 else None)
        else:
            assert real == 0 and torch.equal(ours.double(), theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "real"),
    [(1, 1, 1), (5, 17, 16), (4, 33, 33), (7, 64, 1), (3, 20, 0), (3, 5001, 4999), (2, 50304, 50257)],
)
def test_equal_float64(level, rows, columns, real, smooth, dtype):
    compare(rows, columns, real, dtype, smooth)


def test_rows_may_be_slices(level):
    wide = drawn(6, 90, dtype=torch.bfloat16)
    target, weight = targets(6, 40), torch.ones(6)
    expected = both_passes(wide[:, :40].contiguous(), target, 38, True, weight)
    untouched = wide[:, 40:].clone()
    part = wide[:, :40]
    largest, sums = row_statistics(part, target, 38, summed=True)
    write_gradient(part, target, 38, sums[0].log() + largest, weight, weight * -0.9, weight * 0.01)
    assert torch.equal(part, expected[-1]) and torch.equal(wide[:, 40:], untouched)


def test_the_loss_of_a_large_vocabulary(level):
    """Many small terms, whose errors must not add up to one side; and a model that is sure of its answer."""
    logits, target = drawn(4, 50304, dtype=torch.bfloat16), targets(4, 50304)
    logits[1, target[1]] = 22.0
    largest, sums = row_statistics(logits, target, 50304, summed=False)
    exact = torch.logsumexp(logits.double(), 1)
    assert ((sums[0].double().log() + largest - exact) / exact).abs().max() < 1e-6
    weight = torch.ones(4)
    write_gradient(logits, target, 50304, exact.float(), weight, -weight)
    sure = (22.0 - exact[1]).expm1().item()
    assert -5e-5 < sure < 0 and logits[1, target[1]].item() == pytest.approx(sure, rel=0.03)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_as_in_the_reference(level, monkeypatch, dtype):
    logits, target = drawn(9, 4500, dtype=dtype), torch.tensor([0, 5, -1, 4000, 0, 1, 2, 3, 4])
    logits[0, 7], logits[6, 0] = math.nan, math.nan
    for row, column in ((4, 4400), (5, 0), (6, 4000), (7, 10), (7, 4000)):
        logits[row, column] = math.inf
    logits[1, :2500], logits[2], logits[3, 4000] = -math.inf, -math.inf, -math.inf
    found = both_passes(logits, target, 4490, True, torch.ones(9))
    monkeypatch.setenv("MEGAZERO_FUSED", "reference")
    expected = both_passes(logits, target, 4490, True, torch.ones(9))
    assert all(same_kind(*pair) for pair in zip(found, expected, strict=True))


@settings(max_examples=40)
@given(
    rows=st.integers(0, 20),
    columns=st.integers(0, 5000),
    padding=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    smooth=st.booleans(),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_any_shape(rows, columns, padding, dtype, smooth, scale, seed):
    compare(rows, columns, max(0, columns - padding), dtype, smooth, scale, seed)
