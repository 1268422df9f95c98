"""The kernel of bias, dropout and residual: the reference's mask bit for bit, values against float64,
on every level.
"""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_ops.dropout import bias_dropout_residual, dropout
from tests.fused_ops.levels import DTYPES, assert_close, drawn, integers, level, same_kind

pytestmark = pytest.mark.sampled

__all__ = ["level"]


def keys_for(*shape: int) -> Tensor:
    return integers(-(2**63), 2**63 - 1, shape, 5)


def run(x: Tensor, bias: Tensor | None, residual: Tensor, keys: Tensor | None, p: float, grad: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, residual, bias) if tensor is not None]
    y = bias_dropout_residual(leaves[0], None if bias is None else leaves[2], leaves[1], keys, p)
    y.backward(grad.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.5, 0.999, 1 - 1e-12])
@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 1003])
def test_the_mask_is_that_of_the_reference_bit_for_bit(level, columns, p):
    x, keys = torch.ones(7, 3, columns), keys_for(7, 3)
    assert torch.equal(dropout(x, keys, p) == 0, dropout(x.double(), keys, p) == 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (5, 2, 17), (3, 16), (100, 2, 250)])
def test_equals_float64(level, shape, biased, p, dtype):
    compare(shape, biased, p, dtype)


def compare(shape: tuple[int, ...], biased: bool, p: float, dtype: torch.dtype, seed: int = 1) -> None:
    x, residual, grad = (drawn(*shape, seed=seed + i, dtype=dtype) for i in range(3))
    bias, keys = drawn(shape[-1], seed=seed + 3, dtype=dtype) if biased else None, keys_for(*shape[:-1]) if p else None
    found = run(x, bias, residual, keys, p, grad)
    exact = run(x.double(), None if bias is None else bias.double(), residual.double(), keys, p, grad)
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == dtype
        assert_close(ours, theirs)


@pytest.mark.slow
def test_bias_gradient_of_more_rows_than_a_thread_reads_at_once(level):
    """On a GPU this many columns leave all rows to one part, of which a thread reads four at once."""
    compare((75, 33001), True, 0.3, torch.bfloat16)


def test_dropped_values_are_zero_whatever_they_were(level, monkeypatch):
    x, keys = torch.full((4, 50), math.nan), keys_for(4)
    x[1], x[2] = math.inf, 1.0
    bias, residual = torch.zeros(50), torch.zeros(4, 50)
    residual[2, 3] = -math.inf
    found = run(x, bias, residual, keys, 0.5, x)
    assert (found[0] == 0).any()
    monkeypatch.setenv("MEGAZERO_FUSED", "reference")
    assert all(same_kind(*pair) for pair in zip(found, run(x, bias, residual, keys, 0.5, x), strict=True))


def test_strided_inputs_and_a_second_derivative(level):
    x, keys = drawn(6, 5, 4, dtype=torch.float32), keys_for(4, 5)
    assert torch.equal(dropout(x.transpose(0, 2), keys, 0.4), dropout(x.transpose(0, 2).contiguous(), keys, 0.4))
    leaf = drawn(4, 5, dtype=torch.float32).requires_grad_()
    (first,) = torch.autograd.grad(dropout(leaf, keys[:, 0], 0.4).square().sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    assert torch.equal(second == 0, first == 0)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(0, 40), min_size=2, max_size=3).map(tuple),
    biased=st.booleans(),
    p=st.sampled_from([0.0, 0.1, 0.9]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
@example(shape=(3, 0), biased=False, p=0.1, dtype=torch.float32, seed=0)
def test_any_shape(shape, biased, p, dtype, seed):
    compare(shape, biased, p, dtype, seed)
