"""FP8 copies element by element, and their products, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_ops import fp8
from fused_ops.fp8 import E4M3, E5M2, LARGEST, Quantised, add_weight_gradient, empty, fill, measure, product, scale_of
from fused_ops.native.compile import CompileError, compiler

ROLE = {E4M3: "input", E5M2: "gradient"}
# Half a unit in the last place of normal numbers, relative; half of the smallest number, absolute.
HALF = {E4M3: 2.0**-4, E5M2: 2.0**-3}
LEAST = {E4M3: 2.0**-10, E5M2: 2.0**-17}


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, spread: float = 3.0) -> Tensor:
    """Of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x * torch.exp(spread * torch.randn(shape, generator=generator, dtype=torch.float64) - spread)).to(dtype)


def quantised(
    x: Tensor, dtype: torch.dtype, scale: float | None = None, compiled: bool = False
) -> tuple[Quantised, Tensor]:
    made = empty(x, dtype, True)
    amax = fill(ROLE[dtype], x, made, scale=None if scale is None else torch.tensor(scale), compiled=compiled)
    return made, amax


def held(copy: Quantised) -> Tensor:
    """What a copy stands for, float64."""
    return copy.values.double() * copy.inverse.double()


def bound(x: Tensor, copy: Quantised) -> Tensor:
    """Largest error of each element."""
    dtype = copy.values.dtype
    return torch.maximum(HALF[dtype] * x.double().abs(), LEAST[dtype] * copy.inverse.double())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_scale_is_the_largest_power_of_two_that_fits(dtype: torch.dtype) -> None:
    largest = 1.75 * 2.0 ** LARGEST[dtype]
    assert largest == torch.finfo(dtype).max
    edges = [
        m * 2.0**e for m in (1.0, 1.75 - 2**-23, 1.75, 1.75 + 2**-23, 2.0 - 2**-23) for e in (-100, -31, -1, 0, 1, 60)
    ]
    values = torch.cat(
        [torch.tensor(edges), torch.exp(12 * torch.randn(2000, generator=torch.Generator().manual_seed(1)))]
    )
    for amax, scale in zip(values.tolist(), scale_of(values, LARGEST[dtype]).tolist(), strict=True):
        assert math.frexp(scale)[0] == 0.5 and amax * scale <= largest < 2 * amax * scale
    ends = scale_of(torch.tensor([0.0, 1e-45, 3.4e38]), LARGEST[dtype])
    assert ends[:2].tolist() == [2.0**126] * 2 and ends[2] > 0
    assert (1 / ends == fp8.inverse_of(ends, torch.zeros(3))).all()


def test_scales_of_several_formats_at_once() -> None:
    largest = torch.tensor([LARGEST[E4M3], LARGEST[E5M2]], dtype=torch.int32)
    assert scale_of(torch.tensor([[1.0, 1.0], [448.0, 57344.0]]), largest).tolist() == [[256.0, 32768.0], [1.0, 1.0]]


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_each_element_is_rounded_once(dtype: torch.dtype, source: torch.dtype) -> None:
    x = drawn(70, 2 * 33, dtype=source)[:, ::2]
    copy, amax = quantised(x, dtype)
    assert amax == x.double().abs().max() and copy.inverse == 1 / scale_of(amax, LARGEST[dtype])
    assert (held(copy) - x.double()).abs().le(bound(x, copy)).all()
    assert copy.transposed is not None and torch.equal(copy.transposed.float(), copy.values.t().float())
    # To the nearest: no other number of the format is nearer than the one taken.
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    every = every[every.isfinite()] * copy.inverse.double()
    best = (x.double().reshape(-1, 1) - every).abs().min(1).values.view(x.shape)
    assert torch.equal((held(copy) - x.double()).abs(), best)


def test_what_a_given_scale_does_not_reach_saturates() -> None:
    x = torch.tensor([[1.0, -3.0, 900.0, -1e30]], dtype=torch.bfloat16)
    copy, amax = quantised(x, E4M3, scale=1.0)
    assert held(copy).tolist() == [[1.0, -3.0, 448.0, -448.0]] and amax == x[0, 3].float().abs()


@pytest.mark.parametrize("scale", [None, 4.0])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_is_in_every_element_of_a_product(bad: float, scale: float | None) -> None:
    x = drawn(32, 16)
    x[3, 5] = bad
    copy, amax = quantised(x, E5M2, scale)
    assert not amax.isfinite() and copy.inverse.isnan()
    other, _ = quantised(drawn(48, 16, seed=1), E4M3)
    assert product(copy.values, other.values, copy.inverse, other.inverse, torch.bfloat16).isnan().all()


def test_zeros_stay_zeros() -> None:
    zero, _ = quantised(torch.zeros(16, 32, dtype=torch.bfloat16), E5M2)
    other, _ = quantised(drawn(48, 32), E4M3)
    assert (product(zero.values, other.values, zero.inverse, other.inverse, torch.float32) == 0).all()


@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 16), (48, 32, 64), (128, 80, 240), (33, 16, 1024)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_output_and_the_input_gradient(m: int, n: int, k: int, bias: bool) -> None:
    x, weight, grad = drawn(m, k), drawn(n, k, seed=1), drawn(m, n, seed=2)
    added = drawn(n + 1, seed=3)[1:] if bias else None  # at an odd address
    narrow_x, narrow_weight, narrow_grad = (
        quantised(t, dtype)[0] for t, dtype in ((x, E4M3), (weight, E4M3), (grad, E5M2))
    )
    y = product(
        narrow_x.values, narrow_weight.values, narrow_x.inverse, narrow_weight.inverse, torch.bfloat16, added, fast=True
    )
    exact = held(narrow_x) @ held(narrow_weight).t() + (0 if added is None else added.double())
    # Of the operands as they are: one rounding to bf16 (2^-9), and fp32 sums, of few bits where they are fast.
    size = held(narrow_x).abs() @ held(narrow_weight).abs().t()
    assert (y.double() - exact).abs().le(2.0**-8 * exact.abs() + 1e-6 * size).all()
    ours, theirs = bound(x, narrow_x), bound(weight, narrow_weight)
    error = x.double().abs() @ theirs.t() + ours @ weight.double().abs().t() + ours @ theirs.t()
    wanted = x.double() @ weight.double().t() + (0 if added is None else added.double())
    assert (y.double() - wanted).abs().le(error + 2.0**-8 * exact.abs() + 1e-6 * size).all()
    assert narrow_weight.transposed is not None
    back = product(
        narrow_grad.values, narrow_weight.transposed, narrow_grad.inverse, narrow_weight.inverse, torch.bfloat16
    )
    exact, size = held(narrow_grad) @ held(narrow_weight), held(narrow_grad).abs() @ held(narrow_weight).abs()
    assert (back.double() - exact).abs().le(2.0**-8 * exact.abs() + 1e-6 * size).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 1])
def test_the_weight_gradient_is_written_and_added(shift: int, dtype: torch.dtype) -> None:
    """Into memory that is aligned, and into memory that is not."""
    grad, x = quantised(drawn(64, 48), E5M2)[0], quantised(drawn(64, 32, seed=1), E4M3)[0]
    assert grad.transposed is not None and x.transposed is not None
    into = torch.full((48 * 32 + shift,), torch.nan, dtype=dtype)[shift:].view(48, 32)
    exact, size = held(grad).t() @ held(x), held(grad).abs().t() @ held(x).abs()
    for times in (1, 2, 3):
        add_weight_gradient(grad.transposed, x.transposed, grad.inverse, x.inverse, into, times > 1)
        room = 1e-6 if dtype == torch.float32 else 2.0**-7
        assert (into.double() - times * exact).abs().le(times * room * size).all(), times


def test_a_product_gets_scales_at_addresses_that_cublaslt_takes(monkeypatch) -> None:
    """It refuses a scale whose address is no multiple of 16, as that of an entry of a vector may be."""
    plain, seen = torch._scaled_mm, []

    def watched(a: Tensor, b: Tensor, **given: Any) -> Tensor:
        seen.append([given[name].data_ptr() % 16 for name in ("scale_a", "scale_b")])
        return plain(a, b, **given)

    monkeypatch.setattr(torch, "_scaled_mm", watched)
    grad, x = quantised(drawn(64, 48), E5M2)[0], quantised(drawn(64, 32, seed=1), E4M3)[0]
    assert grad.transposed is not None and x.transposed is not None
    scales, added = torch.tensor([1.0, 0.5, 0.25, 4.0, 2.0]), drawn(33, seed=3)[1:]
    for a, b in ((0, 1), (1, 4), (3, 2)):
        y = product(grad.transposed, x.transposed, scales[a], scales[b], torch.bfloat16, added)
        exact = scales[a] * scales[b] * (grad.transposed.double() @ x.transposed.double().t()) + added.double()
        assert (y.double() - exact).norm() <= 2.0**-8 * exact.norm()
        into = torch.full((48, 32), torch.nan)
        add_weight_gradient(grad.transposed, x.transposed, scales[a], scales[b], into, False)
        assert (into.double() - (exact - added.double())).norm() <= 1e-5 * exact.norm()
    assert len(seen) == 6 and not any(map(any, seen)), seen


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("scale", [None, 64.0])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("role", fp8.ROLES)
def test_compiled_copies_are_the_plain_ones(role: str, source: torch.dtype, scale: float | None) -> None:
    try:
        compiler()
    except CompileError:
        pytest.skip("no compiler, nothing is compiled")
    dtype, x = E5M2 if role == "gradient" else E4M3, drawn(48, 80, dtype=source)
    given = None if scale is None else torch.tensor(scale)
    for spoil in (False, True):
        if spoil:
            x[1, 2] = float("inf")
        plain, compiled = empty(x, dtype, True), empty(x, dtype, True)
        found = fill(role, x, plain, scale=given), fill(role, x, compiled, scale=given, compiled=True)
        assert torch.equal(*found) and torch.equal(plain.inverse.nan_to_num(7), compiled.inverse.nan_to_num(7))
        for ours, theirs in zip(compiled[:2], plain[:2], strict=True):
            assert ours is not None and theirs is not None
            same = ours.float() == theirs.float()
            assert same.all() or (spoil and scale is None)  # a scale of nothing finite


def test_measure_sees_nan_and_infinity() -> None:
    for bad in (float("inf"), float("nan")):
        x = drawn(300, 300)
        x[7, 11] = bad
        assert repr(measure(x).item()) == repr(bad)


def test_an_old_card_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fp8.unavailable_reason("cpu") is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A100-SXM4-80GB")
    assert "A100-SXM4-80GB (compute capability 8.0)" in str(fp8.unavailable_reason("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    assert fp8.unavailable_reason("cuda") is None


def test_a_torch_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> Tensor:
        raise NotImplementedError("no kernel for aten::_scaled_mm")

    monkeypatch.setattr(torch, "_scaled_mm", missing)
    assert "no FP8 products on cpu: no kernel" in str(fp8.unavailable_reason("cpu"))


@pytest.mark.parametrize("fault", ["zeros", "no scale", "no bias", "another row"])
def test_products_that_run_and_are_wrong_are_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is right where all that is multiplied are ones, or where nobody looks."""
    right = torch._scaled_mm

    def wrong(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None, **given: Any
    ) -> Tensor:
        if fault == "no scale":
            scale_a = torch.ones_like(scale_a)
        made = right(a, b, scale_a=scale_a, scale_b=scale_b, bias=None if fault == "no bias" else bias, **given)
        return made.zero_() if fault == "zeros" else made.roll(1, 0) if fault == "another row" else made

    assert fp8.refusal("cpu") is None
    monkeypatch.setattr(torch, "_scaled_mm", wrong)
    assert "has wrong FP8 products on cpu: its numbers are off by" in str(fp8.refusal("cpu"))


def test_a_cpu_multiplies_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a plain loop for e4m3 on processors with AMX. Afterwards it is as it was, after an error too."""
    plain, seen = torch._scaled_mm, []

    def watched(*given: Any, **named: Any) -> Tensor:
        seen.append(torch.backends.mkldnn.enabled)
        return plain(*given, **named)

    monkeypatch.setattr(torch, "_scaled_mm", watched)
    a, b, scale = (drawn(16, 32).to(E4M3), drawn(48, 32, seed=1).to(E4M3), torch.tensor(0.5))
    found = product(a, b, scale, scale, torch.float32)
    assert (found.double() - a.double() @ b.double().t() / 4).abs().max() <= 1e-5 * found.abs().max()
    with pytest.raises(RuntimeError):
        product(a, b[:, :16].contiguous(), scale, scale, torch.float32)
    assert seen == [False, False] and torch.backends.mkldnn.enabled
