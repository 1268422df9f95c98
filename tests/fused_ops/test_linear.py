"""Products of a linear layer against float64, on every level of instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_ops import linear
from fused_ops.linear import add_bias_gradient, add_weight_gradient
from fused_ops.native.library import CHOICES, kernels
from tests.fused_ops.levels import drawn, the_same_for_any_threads

pytestmark = pytest.mark.sampled

SHAPES = [(1, 1, 1), (2, 3, 5), (7, 129, 33), (513, 40, 257), (2049, 130, 31), (4100, 17, 16)]


@pytest.fixture(params=CHOICES, autouse=True)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each body in turn."""
    monkeypatch.setenv("MEGAZERO_FUSED", request.param)
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_weight_gradient_into_a_wide_sum(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Operands that are columns of wider tensors; what was in the buffer is overwritten, then added to."""
    m, n, k = shape
    grad, x = drawn(m, n + 3, dtype=dtype, seed=1)[:, 2 : n + 2], drawn(m, k + 1, dtype=dtype, seed=2)[:, :k]
    exact = grad.double().t() @ x.double()
    scale = grad.double().abs().t() @ x.double().abs()
    into = torch.full((n, k), torch.nan, dtype=torch.promote_types(dtype, torch.float32))
    for times in (1, 2):
        add_weight_gradient(grad, x, into, times == 2)
        # With or without a kernel: at most one rounding to 16 bit of the product itself.
        bound = 2e-6 * scale + (torch.finfo(dtype).eps if dtype.itemsize == 2 else 0.0) * exact.abs()
        assert ((into.double() - times * exact).abs() <= times * bound + 1e-12).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("into_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bias_gradient(shape: tuple[int, int, int], dtype: torch.dtype, into_dtype: torch.dtype) -> None:
    m, n, _ = shape
    grad = drawn(m, n + 3, dtype=dtype, seed=1)[:, 1 : n + 1]
    exact = grad.double().sum(0)
    into = torch.full((n,), torch.nan, dtype=into_dtype)
    add_bias_gradient(grad, into, False)
    add_bias_gradient(grad, into, True)
    bound = 4e-6 * grad.double().abs().sum(0) + 4 * torch.finfo(into_dtype).eps * exact.abs()
    assert ((into.double() - 2 * exact).abs() <= bound).all()


def test_nan_and_infinity_arrive() -> None:
    grad, x = torch.ones(40, 3, dtype=torch.bfloat16), torch.ones(40, 2, dtype=torch.bfloat16)
    grad[5, 1], grad[6, 2] = torch.nan, torch.inf
    weight, bias = torch.zeros(3, 2), torch.zeros(3)
    add_weight_gradient(grad, x, weight, True)
    add_bias_gradient(grad, bias, True)
    for found in (weight[:, 0], bias):
        assert found[0] == 40 and found[1].isnan() and found[2] == torch.inf


def test_nothing_to_sum() -> None:
    weight, bias = torch.full((3, 2), 7.0), torch.full((3,), 7.0)
    add_weight_gradient(torch.ones(0, 3, dtype=torch.bfloat16), torch.ones(0, 2, dtype=torch.bfloat16), weight, False)
    add_bias_gradient(torch.ones(0, 3, dtype=torch.bfloat16), bias, False)
    assert not weight.any() and not bias.any()


def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    grad, x = drawn(2500, 300, dtype=torch.bfloat16, seed=1), drawn(2500, 290, dtype=torch.bfloat16, seed=2)
    weight, bias = torch.empty(300, 290), torch.empty(300)

    def run() -> list[Tensor]:
        add_weight_gradient(grad, x, weight, False)
        add_bias_gradient(grad, bias, False)
        made_by_kernels = linear._library(grad, x, weight) is not None, kernels(grad) is not None
        return [found.clone() for found, ours in zip((weight, bias), made_by_kernels, strict=True) if ours]

    the_same_for_any_threads(run, (1, 2, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_bias_is_added_before_the_product_is_rounded(dtype: torch.dtype) -> None:
    """A weight and an input that are parts of wider tensors; more rows than the kernel of few rows takes, and fewer."""
    for m, n, k in SHAPES[:4]:
        x, weight = drawn(m, k + 1, dtype=dtype, seed=1)[:, :k], drawn(n + 1, k, dtype=dtype, seed=2)[1:]
        bias = drawn(n, dtype=dtype, seed=3)
        with torch.no_grad():
            found = linear.linear(x, weight, bias)
        exact = x.double() @ weight.double().t() + bias.double()
        scale = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
        assert found.dtype == dtype and found.is_contiguous()
        rounding = torch.finfo(dtype).eps / 2 if dtype.itemsize == 2 else 0.0
        bound = (1e-12 if dtype == torch.float64 else 2e-6) * scale + rounding * exact.abs()
        assert ((found.double() - exact).abs() <= bound).all(), (m, n, k)


@pytest.mark.parametrize("fault", ["none", "rounds", "forgets", "swaps", "raises"])
def test_a_product_with_its_bias_is_tried_with_numbers(fault: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for oneDNN's: right, rounded before the bias is added, without it, with weights in another order, or
    not there.
    """
    calls = []

    def stand_in(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        calls.append(x)
        if fault == "raises":
            raise RuntimeError("could not create a primitive")
        made = x.double() @ (weight.roll(1, 1) if fault == "swaps" else weight).double().t()
        made = made.to(x.dtype).double() if fault == "rounds" else made
        return (made if fault == "forgets" else made + bias.double()).to(x.dtype)

    x, weight, bias = (drawn(*shape, dtype=torch.bfloat16, seed=5) for shape in ((40, 24), (16, 24), (16,)))
    monkeypatch.setattr(linear, "own_products", lambda *of: False)  # which a processor without 16-bit products uses
    monkeypatch.setattr(linear, "_biased", stand_in)
    linear._adds_bias.cache_clear()
    with torch.no_grad():
        linear.linear(x, weight, bias)
    linear._adds_bias.cache_clear()
    compiled = level not in ("reference", "emulated")
    assert len(calls) == (0 if not compiled else 2 if fault == "none" else 1), (
        "the trial, and the product itself where the trial found it right"
    )


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("fault", ["none", "rounds", "forgets", "swaps"])
def test_a_widening_product_is_tried_with_numbers(fault: str, adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has these overloads on CUDA only; here a stand-in that rounds to 16 bits, adds to nothing or reads columns
    in another order.
    """

    def widened(a: Tensor, b: Tensor, before: Tensor | None, out: Tensor) -> None:
        made = a.float() @ (b.roll(1, 1) if fault == "swaps" else b).float()
        made = made.to(a.dtype).float() if fault == "rounds" else made
        out.copy_(made if before is None or fault == "forgets" else before + made)

    monkeypatch.setattr(torch, "mm", lambda a, b, *, out_dtype, out: widened(a, b, None, out))
    monkeypatch.setattr(torch, "addmm", lambda before, a, b, *, out_dtype, out: widened(a, b, before, out))
    linear._widens.cache_clear()
    found = linear._widens("cpu", torch.bfloat16, torch.float32, adds)
    linear._widens.cache_clear()
    assert found == (fault == "none" or (fault == "forgets" and not adds))
