"""The kernels of activations, plain and gated, against float64, on every instruction set level."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_ops.activation import ACTIVATIONS
from fused_ops.gated import GATED
from fused_ops.native import library
from tests.fused_ops.levels import DTYPES, SHORT, assert_close, drawn, level, same_kind, the_same_for_any_threads

pytestmark = pytest.mark.sampled

__all__ = ["level"]
SHAPES = [(1, 1), (3, 16), (5, 17), (2, 3, 33), (70, 1), (300, 250), (1, 9001)]


def run(function, inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
    """Output and gradients of all inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    y.backward(weight.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def compare(function, inputs: list[Tensor], weight: Tensor) -> None:
    """The value is a product, the slope a sum, of terms of the size of 1 (of gated ones: of the other input)."""
    exact = run(function, [x.double() for x in inputs], weight.double())
    size = weight.double().abs() * max(1.0, max((x.abs().max().item() for x in inputs if x.numel()), default=1.0))
    for place, (ours, theirs) in enumerate(zip(run(function, inputs, weight), exact, strict=True)):
        assert ours.dtype == inputs[0].dtype
        if place == 0:
            terms = theirs
        elif theirs.shape == size.shape and theirs.numel():
            terms = size if function in ACTIVATIONS.values() else size.max().expand(theirs.shape)
        else:
            terms = (size.sum() if size.numel() else size.new_zeros(())).expand(theirs.shape)
        assert_close(ours, theirs, terms=terms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_float64(level, name, shape, dtype):
    x, weight = drawn(*shape, dtype=dtype) * 3, drawn(*shape, seed=3, dtype=dtype)
    compare(ACTIVATIONS[name], [x], weight)
    compare(ACTIVATIONS[name], [x, drawn(shape[-1], seed=2, dtype=dtype)], weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", GATED)
def test_gated_activations_equal_float64(level, name, shape, dtype):
    gated = GATED[name]
    weight = drawn(*shape, seed=3, dtype=dtype)
    compare(gated, [drawn(*shape, dtype=dtype) * 3, drawn(*shape, seed=2, dtype=dtype)], weight)
    # Halves of one tensor, and a transposed input.
    compare(lambda both: gated(*both.chunk(2, dim=-1)), [drawn(*shape[:-1], 2 * shape[-1], dtype=dtype)], weight)
    compare(lambda x, y: gated(x.transpose(0, -1), y), [drawn(*shape, dtype=dtype).transpose(0, -1), weight], weight)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_value_of_bfloat16(level, name):
    """All 65,536 of them, NaN and inf included, forward and backward, against the reference body."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    found = run(ACTIVATIONS[name], [x], torch.ones_like(x))
    exact = run(ACTIVATIONS[name], [x.double()], torch.ones_like(x))
    single = run(ACTIVATIONS[name], [x.double().float()], torch.ones_like(x).float())
    for ours, theirs in zip(found, exact, strict=True):
        normal = theirs.isfinite() & (theirs.abs() > 1e-30) & (x.abs() < 1e18)
        terms = theirs.abs() + 0.25 * (x.abs() < 2)  # of the slope, which crosses 0
        error = (ours.double() - theirs).abs() - torch.finfo(x.dtype).eps / 2 * (1.01 * theirs.abs() + SHORT * terms)
        assert error[normal].max() < 1e-9
    for ours, theirs in zip(single, run(ACTIVATIONS[name], [x], torch.ones_like(x)), strict=True):
        assert same_kind(ours.bfloat16(), theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_and_inf_as_in_the_reference(level, name, dtype):
    x = drawn(4, 37, dtype=dtype)
    x[0, ::5], x[1, 3], x[2, 36] = math.inf, -math.inf, math.nan
    bias, weight = drawn(37, seed=2, dtype=dtype), drawn(4, 37, seed=3, dtype=dtype)
    weight[3, 0], weight[3, 1] = math.inf, math.nan
    bias[7] = math.nan
    # In fp64: torch's erf of an infinite fp32 is NaN.
    cases = [(ACTIVATIONS[name], [x], weight), (ACTIVATIONS[name], [x, bias], weight)]
    for function, inputs, grad in cases:
        exact = run(function, [value.double() for value in inputs], grad)
        assert all(same_kind(ours, theirs) for ours, theirs in zip(run(function, inputs, grad), exact, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GATED)
def test_nan_and_inf_of_gated_activations_as_in_the_reference(level, name, dtype):
    x, up = (drawn(4, 37, seed=seed, dtype=dtype) for seed in (1, 3))
    x[0, ::5], x[1, 3], x[2, 36], up[3, 0], up[3, 1] = math.inf, -math.inf, math.nan, math.inf, math.nan
    exact = run(GATED[name], [x.double(), up.double()], x)
    for ours, theirs in zip(run(GATED[name], [x, up], x), exact, strict=True):
        assert same_kind(ours, theirs)


def test_bias_gradient_does_not_depend_on_the_threads(level):
    x, weight = (drawn(1000, 70, seed=seed, dtype=torch.float32) for seed in (1, 2))
    bias = drawn(70, dtype=torch.float32)
    the_same_for_any_threads(lambda: run(ACTIVATIONS["gelu"], [x, bias], weight))
    the_same_for_any_threads(lambda: run(ACTIVATIONS["gelu-tanh"], [x.bfloat16(), bias.bfloat16()], weight))


def test_output_buffers_are_fully_written(level):
    kernels = library.kernels(drawn(1, dtype=torch.bfloat16))
    assert kernels is not None
    for rows, columns in ((1, 1), (3, 15), (65, 33)):
        x, bias = drawn(rows, columns, dtype=torch.bfloat16), drawn(columns, dtype=torch.bfloat16)
        out, sums = torch.full_like(x, math.nan), torch.full((columns,), math.nan)
        kernels.call("gelu_tanh_bf16", rows, columns, out, x, bias)
        assert not out.isnan().any()
        out.fill_(math.nan)
        kernels.call("gelu_tanh_backward_bf16", rows, columns, out, sums, x, x, bias)
        assert not out.isnan().any() and not sums.isnan().any()


@settings(max_examples=40)
@given(
    name=st.sampled_from([*ACTIVATIONS, *GATED]),
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    scale=st.sampled_from([1e-3, 1.0, 30.0, 1e4]),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_size(name, shape, scale, dtype, biased, seed):
    x, weight = (drawn(*shape, seed=seed) * scale).to(dtype), drawn(*shape, seed=seed + 1, dtype=dtype)
    if name in GATED:
        compare(GATED[name], [x, weight], weight)
    else:
        compare(ACTIVATIONS[name], [x, drawn(shape[-1], seed=seed + 2, dtype=dtype)] if biased else [x], weight)
