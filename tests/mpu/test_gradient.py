"""Gradient targets: what a layer hands over is the gradient that autograd would have got, once, and wider."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_ops import linear
from megazero.mpu.gradient import Write
from megazero.mpu.grid import single_rank_group
from megazero.mpu.linear import column_parallel_linear, column_parallel_linear_pair, plain_linear, with_bias
from megazero.mpu.parameter import Parameter, ParameterKind, shard


class Kept:
    """A target that sums in a tensor of its own dtype, at once or when asked."""

    def __init__(self, parameter: Parameter, dtype: torch.dtype, *, later: bool = False) -> None:
        self.sum = torch.full(parameter.shape, torch.nan, dtype=dtype)
        self.later, self.waiting, self.count = later, list[Write](), 0
        parameter.gradient_target = self

    def add(self, write: Write) -> None:
        self.waiting.append(write)
        if not self.later:
            self.run()

    def run(self) -> None:
        for write in self.waiting:
            write(self.sum, self.count > 0)
            self.count += 1
        self.waiting.clear()


def parameter(name: str, *shape: int, dtype: torch.dtype) -> Parameter:
    made = Parameter(shard(name, shape, ParameterKind.MATRIX if len(shape) == 2 else ParameterKind.BIAS), dtype, "cpu")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
    with torch.no_grad():
        made.copy_(values)
    return made


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_two_backwards_add_up_to_what_autograd_gets(bias: bool, later: bool) -> None:
    weight = parameter("weight", 5, 7, dtype=torch.float64)
    offset = parameter("bias", 5, dtype=torch.float64) if bias else None
    inputs = [drawn(3, 2, 7, dtype=torch.float64, seed=seed).requires_grad_() for seed in (1, 2)]

    def run() -> list[Tensor | None]:
        for x in inputs:
            plain_linear(x, weight, offset).square().sum().backward()
        return [x.grad for x in inputs]

    expected_inputs = [None if g is None else g.clone() for g in run()]
    expected = weight.grad, None if offset is None else offset.grad
    weight.grad = None
    targets = [Kept(weight, torch.float64, later=later)]
    if offset is not None:
        offset.grad = None
        targets.append(Kept(offset, torch.float64, later=later))
    for x in inputs:
        x.grad = None
    found_inputs = run()
    for target in targets:
        target.run()
    assert weight.grad is None and (offset is None or offset.grad is None)
    for target, gradient in zip(targets, expected, strict=False):
        assert target.count == 2
        torch.testing.assert_close(target.sum, gradient, rtol=1e-14, atol=1e-14)
    for one, other in zip(found_inputs, expected_inputs, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_wider_target_gets_a_gradient_that_was_not_rounded(dtype: torch.dtype) -> None:
    """With a kernel the only roundings are those of the fp32 sum; without one the product is rounded to 16 bit once."""
    weight = parameter("weight", 33, 65, dtype=dtype)
    x, grad = drawn(200, 65, dtype=dtype, seed=3), drawn(200, 33, dtype=dtype, seed=4)
    target = Kept(weight, torch.float32)
    for _ in range(2):
        plain_linear(x, weight, None).backward(grad)
    exact = 2 * grad.double().t() @ x.double()
    error = (target.sum.double() - exact).abs().max() / exact.abs().max()
    has_kernel = dtype == torch.float32 or linear._library(grad, x, target.sum) is not None
    assert error < (1e-6 if has_kernel else 4e-3), error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_behind_a_sum_hands_over_a_gradient_that_was_not_rounded(dtype: torch.dtype) -> None:
    """That of a row-parallel layer, which is added after the reduction over tp."""
    bias = parameter("bias", 33, dtype=dtype)
    kept, grad = Kept(bias, torch.float32), drawn(70, 3, 33, dtype=dtype, seed=2)
    y = drawn(70, 3, 33, dtype=dtype).requires_grad_()
    result = with_bias(y, bias)
    assert torch.equal(result, y + bias)
    for _ in range(2):
        result.backward(grad, retain_graph=True)
    exact = 2 * grad.double().sum((0, 1))
    torch.testing.assert_close(kept.sum.double(), exact, rtol=1e-6, atol=1e-5)
    assert bias.grad is None and y.grad is not None and torch.equal(y.grad, 2 * grad)


def test_a_pair_hands_over_each_weight_and_bias() -> None:
    gate, up = parameter("gate", 6, 4, dtype=torch.float64), parameter("up_", 6, 4, dtype=torch.float64)
    biases = parameter("bias", 6, dtype=torch.float64), parameter("bias_", 6, dtype=torch.float64)
    targets = [Kept(p, torch.float64) for p in (gate, up, *biases)]
    x = drawn(3, 2, 4, dtype=torch.float64)
    first, second = column_parallel_linear_pair(x, (gate, up), biases, single_rank_group(), False)
    (first.sum() + 2 * second.sum()).backward()
    ones = x.flatten(0, 1).sum(0).expand(6, 4)
    for target, expected in zip(targets, (ones, 2 * ones, torch.full((6,), 6.0), torch.full((6,), 12.0)), strict=True):
        torch.testing.assert_close(target.sum, expected.double(), rtol=1e-14, atol=1e-14)


def test_a_frozen_weight_hands_over_nothing() -> None:
    weight = parameter("weight", 5, 7, dtype=torch.float64).requires_grad_(False)
    target = Kept(weight, torch.float64)  # type: ignore[arg-type]
    x = drawn(3, 7, dtype=torch.float64).requires_grad_()
    column_parallel_linear(x, weight, None, single_rank_group(), False).sum().backward()
    assert target.count == 0 and x.grad is not None
