"""The softmax kernels against the float64 body, on every instruction set level."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_ops.softmax import alibi_slopes, scaled_causal_alibi_softmax
from tests.fused_ops.levels import DTYPES, assert_close, drawn, integers, level

pytestmark = pytest.mark.sampled

__all__ = ["level"]
SHAPES = [(1, 1, 1, 1), (2, 3, 7, 7), (1, 5, 16, 16), (2, 3, 5, 21), (1, 2, 70, 70), (1, 1, 1, 9)]
SHAPES += [(1, 2, 2, 8193), (1, 1, 1, 32768)]


def run(scores: Tensor, scale: float, slopes: Tensor | None, documents: Tensor | None, grad: Tensor) -> list[Tensor]:
    """Probabilities, as they were before backward overwrote them, and the scores' gradient."""
    leaf = scores.detach().clone().requires_grad_()
    probs = scaled_causal_alibi_softmax(leaf * 1.0, scale, slopes, documents=documents)
    found = probs.detach().clone()
    probs.backward(grad.to(probs.dtype))
    assert leaf.grad is not None
    return [found, leaf.grad]


def compare(
    shape: tuple[int, ...], dtype: torch.dtype, sloped: bool, documented: bool, seed: int = 1, scale: float = 0.3
) -> None:
    b, n, queries, keys = shape
    scores, grad = drawn(*shape, seed=seed, dtype=dtype) * 4, drawn(*shape, seed=seed + 1, dtype=dtype)
    slopes = torch.tensor(alibi_slopes(n), dtype=torch.float64) if sloped else None
    documents = (torch.arange(keys) * torch.arange(1, b + 1)[:, None] // 4) if documented else None
    found = run(scores, scale, slopes, documents, grad)
    exact = run(scores.double(), scale, slopes, documents, grad)
    beyond = torch.arange(keys) > (keys - queries + torch.arange(queries))[:, None]
    assert not found[0][..., beyond].any() and not found[1][..., beyond].any()
    assert_close(found[0], exact[0], terms=exact[0])
    # The gradient is made of the rounded probabilities.
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
    assert (found[1].double() - exact[1]).abs().max() <= 4 * rounding * grad.abs().max() * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("documented", [False, True])
@pytest.mark.parametrize("sloped", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_float64(level, shape, sloped, documented, dtype):
    compare(shape, dtype, sloped, documented)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_as_in_the_reference(level, monkeypatch, dtype):
    scores, grad = drawn(1, 2, 40, 40, dtype=dtype), drawn(1, 2, 40, 40, seed=2, dtype=dtype)
    for row, value in ((5, math.nan), (6, math.inf), (7, -math.inf)):
        scores[0, 0, row, 3] = value
    scores[0, 0, 8] = -math.inf
    scores[0, 1].masked_fill_(torch.ones(40, 40, dtype=torch.bool).triu(1), math.nan)  # never looked at
    grad[0, 1, 9, 4], grad[0, 1, 10, 4] = math.nan, math.inf
    slopes = torch.tensor(alibi_slopes(2))
    found = run(scores, 0.5, slopes, None, grad)
    monkeypatch.setenv("MEGAZERO_FUSED", "reference")
    for ours, theirs in zip(found, run(scores, 0.5, slopes, None, grad), strict=True):
        # Beyond the diagonal the reference spreads a row's NaN as far as its block of rows sees.
        assert torch.equal(ours.tril().isnan(), theirs.tril().isnan()) and not ours.triu(1).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_contracts_in_place(level, dtype):
    """The result lies over the scores; whoever saved them, and a second backward, is told."""
    held = drawn(1, 2, 9, 9, dtype=dtype)
    assert scaled_causal_alibi_softmax(held, 1.0, None).data_ptr() == held.data_ptr()
    leaf = drawn(1, 2, 9, 9, dtype=dtype).requires_grad_()
    saved = (leaf * 1.0).exp()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scaled_causal_alibi_softmax(saved, 1.0, None).sum().backward()
    loss = scaled_causal_alibi_softmax(leaf * 1.0, 1.0, None).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_documents_in_any_order_and_no_rows(level):
    scores, documents = drawn(2, 2, 30, 30, dtype=torch.float32), integers(0, 3, (2, 30))
    found, _ = run(scores, 1.0, None, documents, scores)
    exact, _ = run(scores.double(), 1.0, None, documents, scores)
    assert_close(found, exact)
    empty = torch.empty(0, 2, 4, 4)
    assert scaled_causal_alibi_softmax(empty, 1.0, None).shape == empty.shape


@settings(max_examples=40)
@given(
    b=st.integers(1, 3),
    n=st.integers(1, 7),
    queries=st.integers(1, 50),
    cached=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    sloped=st.booleans(),
    documented=st.booleans(),
    scale=st.sampled_from([0.01, 0.3, 2.0]),
    seed=st.integers(0, 1000),
)
def test_any_shape(b, n, queries, cached, dtype, sloped, documented, scale, seed):
    compare((b, n, queries, queries + cached), dtype, sloped, documented, seed, scale)
