"""The kernels of LayerNorm and RMSNorm, alone and of a sum, against float64, on every instruction set level."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_ops.layernorm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fused_ops.native import library
from tests.fused_ops.levels import DTYPES, assert_close, drawn, level, same_kind, the_same_for_any_threads

pytestmark = pytest.mark.sampled

__all__ = ["level"]
EPS = 1e-5
SHAPES = [(1, 1), (3, 16), (5, 17), (2, 3, 33), (70, 2), (300, 250), (2, 9001)]


def run(
    centred: bool, added: bool, x: Tensor, residual: Tensor, parameters: list[Tensor], weights: list[Tensor]
) -> list[Tensor]:
    """Outputs and gradients of every input."""
    inputs = [x, *([residual] if added else []), *parameters[: 2 if centred else 1]]
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    norms: dict[tuple[bool, bool], Callable[..., Any]] = {
        (False, False): rms_norm,
        (False, True): add_rms_norm,
        (True, False): layer_norm,
        (True, True): add_layer_norm,
    }
    norm = norms[centred, added]
    found = norm(*leaves, EPS)
    outputs = list(found) if added else [found]
    torch.autograd.backward(outputs, [weight.to(outputs[0].dtype) for weight in weights[-len(outputs) :]])
    return [*(y.detach() for y in outputs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def inputs_of(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1, scale: float = 1.0
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    h = shape[-1]
    x, residual = ((drawn(*shape, seed=seed + i) * scale).to(dtype) for i in (0, 1))
    parameters = [drawn(h, seed=seed + 2 + i, dtype=dtype) for i in (0, 1)]
    return x, residual, parameters, [drawn(*shape, seed=seed + 4 + i, dtype=dtype) for i in (0, 1)]


def compare(centred: bool, added: bool, shape: tuple[int, ...], dtype: torch.dtype, **rest) -> None:
    x, residual, parameters, weights = inputs_of(shape, dtype, **rest)
    if added:
        # What is normalised is the rounded sum: the exact one is made of values whose sum needs no rounding.
        x, residual = (
            x.to(torch.bfloat16).mul(8).round().div(8).to(dtype),
            residual.to(torch.bfloat16).mul(8).round().div(8).to(dtype),
        )
        x, residual = x.clamp(-8, 8), residual.clamp(-8, 8)
    found = run(centred, added, x, residual, parameters, weights)
    wide = [[tensor.double() for tensor in group] for group in ([x, residual], parameters, weights)]
    exact = run(centred, added, wide[0][0], wide[0][1], wide[1], wide[2])
    # A row of little spread magnifies what its values are rounded by; the terms of a gradient of x may cancel.
    values = wide[0][0] + wide[0][1] if added else wide[0][0]
    if values.numel():
        spread = values.var(-1, correction=0) if centred else values.square().mean(-1)
        steepest = (spread.min() + EPS).rsqrt().item()
        slack, terms = (
            1 + values.abs().max().item() * steepest,
            (exact[0].abs().max() + weights[0].abs().max() * 5).item() * (1 + steepest),
        )
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == dtype
        if ours.numel() and values.numel():
            assert_close(ours, theirs, slack=slack, size=terms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_norms_equal_float64(level, centred, added, shape, dtype):
    compare(centred, added, shape, dtype)


def test_a_large_mean_costs_no_digits(level):
    x = (drawn(4, 200) + 1000).float()
    ones, zeros = torch.ones(200), torch.zeros(200)
    exact = layer_norm(x.double(), ones.double(), zeros.double(), EPS)
    assert (layer_norm(x, ones, zeros, EPS).double() - exact).abs().max() < 2e-4


def test_only_one_of_the_two_outputs_is_used(level):
    x, residual, (weight, bias), (grad, _) = inputs_of((6, 40), torch.float32)
    for which in (0, 1):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, residual)]
        add_layer_norm(leaves[0], leaves[1], weight, bias, EPS)[which].backward(grad)
        again = [tensor.clone().requires_grad_() for tensor in (x, residual)]
        total = again[0] + again[1]
        (total if which == 0 else torch.nn.functional.layer_norm(total, (40,), weight, bias, EPS)).backward(grad)
        for ours, theirs in zip(leaves, again, strict=True):
            assert ours.grad is not None and theirs.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [False, True])
def test_nan_and_inf_as_in_the_reference(level, monkeypatch, centred, dtype):
    x, residual, parameters, weights = inputs_of((6, 37), dtype)
    x[0, 3], x[1, 36], x[2, 0], weights[0][3, 4], weights[1][4, 5] = math.inf, -math.inf, math.nan, math.inf, math.nan
    for added in (False, True):
        found = run(centred, added, x, residual, parameters, weights)
        with monkeypatch.context() as patch:
            patch.setenv("MEGAZERO_FUSED", "reference")
            expected = run(centred, added, x, residual, parameters, weights)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.isfinite(), theirs.isfinite())
            assert torch.equal(ours.isnan(), theirs.isnan()) or not same_kind(ours, theirs)


def test_gradients_do_not_depend_on_the_threads(level):
    x, residual, parameters, weights = inputs_of((1000, 70), torch.float32)
    the_same_for_any_threads(lambda: run(True, True, x, residual, parameters, weights))


def test_output_buffers_are_fully_written(level):
    kernels = library.kernels(drawn(1, dtype=torch.bfloat16))
    assert kernels is not None
    for rows, h in ((1, 1), (3, 15), (65, 33)):
        x = drawn(rows, h, dtype=torch.bfloat16)
        y, total, dx = (torch.full_like(x, math.nan) for _ in range(3))
        mean, scale, sums = (torch.full(size, math.nan) for size in ((rows,), (rows,), (2, h)))
        kernels.call("layer_norm_bf16", rows, h, y, total, x, x, x[0], x[0], mean, scale, EPS, 0.0)
        kernels.call("layer_norm_backward_bf16", rows, h, dx, sums, x, x, total, x[0], mean, scale, 0.0)
        assert not any(tensor.isnan().any() for tensor in (y, total, dx, mean, scale, sums))


@settings(max_examples=40)
@given(
    centred=st.booleans(),
    added=st.booleans(),
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.1, 1.0, 100.0]),
    seed=st.integers(0, 1000),
)
def test_any_shape(centred, added, shape, dtype, scale, seed):
    partial(compare, seed=seed, scale=scale)(centred, added, shape, dtype)
