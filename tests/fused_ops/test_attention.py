"""Attention's kernels, on every instruction set level, against the whole formula in fp64."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_ops.attention import causal_attention
from fused_ops.attention.reference import reference_attention
from fused_ops.native import library
from fused_ops.softmax import alibi_slopes
from tests.fused_ops.levels import DTYPES, cpu_level, drawn, still_surrounded, surrounded, the_same_for_any_threads

__all__ = ["cpu_level"]
BOUNDS = {torch.float32: (2e-6, 6e-6), torch.float16: (4e-4, 1e-3), torch.bfloat16: (3.5e-3, 8e-3)}
"""Of the error: its norm relative to that of `rounded_terms`, and its largest value relative to their largest."""


class Case:
    """Inputs of one call. Documents are runs whose lengths are drawn up to `run`; sample by sample others."""

    def __init__(
        self,
        s: int,
        b: int,
        groups: int,
        repeats: int,
        d: int,
        dtype: torch.dtype,
        sloped: bool = True,
        run: int = 0,
        seed: int = 1,
    ) -> None:
        self.heads, self.dtype = (groups, repeats, d), dtype
        self.mixed = drawn(s, b, groups * (repeats + 2) * d, seed=seed, dtype=dtype)
        self.grad = drawn(s, b, groups * repeats * d, seed=seed + 1, dtype=dtype)
        self.options: dict[str, Any] = {"scale": 1 / math.sqrt(d), "documents": None}
        self.options["slopes"] = torch.tensor(alibi_slopes(groups * repeats)) if sloped else None
        if run:
            starts = torch.rand(b, s, generator=torch.Generator().manual_seed(seed)) < 1 / run
            self.options["documents"] = starts.long().cumsum(1)

    def run(self, function=causal_attention, mixed: Tensor | None = None, **other) -> tuple[Tensor, Tensor]:
        """Context and gradient of the projection."""
        leaf = (self.mixed if mixed is None else mixed).clone().requires_grad_()
        out = function(leaf, *self.heads, **{**self.options, **other})
        out.backward(self.grad.to(out.dtype))
        assert leaf.grad is not None
        return out.detach(), leaf.grad

    def check(self) -> tuple[Tensor, Tensor]:
        found, exact = self.run(), self.run(specification, self.mixed.double())
        terms = rounded_terms(self.mixed.double(), self.grad.double(), *self.heads, **self.options)
        for ours, theirs, squares in zip(found, exact, terms, strict=True):
            assert ours.dtype == self.dtype and ours.shape == theirs.shape
            error, (norm, largest) = ours.double() - theirs, BOUNDS[self.dtype]
            size = (squares + theirs.square()).sqrt()
            assert error.norm() <= norm * size.norm()
            assert error.abs().max() <= largest * size.max()
        return found


def specification(
    mixed: Tensor, groups: int, repeats: int, d: int, *, scale: float, slopes: Tensor | None, documents: Tensor | None
) -> Tensor:
    """Whole tensors, masks and biases; einsum for the products."""
    weights = weights_of(mixed, groups, repeats, d, scale=scale, slopes=slopes, documents=documents)
    value = mixed.view(*mixed.shape[:2], groups, repeats + 2, d)[:, :, :, -1]
    return torch.einsum("bgrst,tbgd->sbgrd", weights, value).reshape(*mixed.shape[:2], -1)


def rounded_terms(
    mixed: Tensor, grad: Tensor, groups: int, repeats: int, d: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """For the context and the gradient of the projection: the sum of the squares of the terms that are rounded.

    A result of 16 bits is a sum of products with rounded factors. Terms that cancel leave their errors behind: with few
    keys and a small head size these can be several times as large as the result's own rounding.
    """
    s, b, _ = mixed.shape
    query, key, value = mixed.view(s, b, groups, repeats + 2, d).split([repeats, 1, 1], dim=3)
    key, value, grad = key.squeeze(3), value.squeeze(3), grad.view(s, b, groups, repeats, d)
    weights, scale = weights_of(mixed, groups, repeats, d, **options), options["scale"]
    context = torch.einsum("bgrst,tbgd->sbgrd", weights, value)
    products = torch.einsum("sbgrd,tbgd->bgrst", grad, value)
    changes = weights * (products - torch.einsum("sbgrd,sbgrd->bgrs", context, grad)[..., None])
    totals = torch.einsum("sbgrd,sbgrd->bgrs", context.square(), grad.square())  # of a rounded context
    shifts = (weights * totals[..., None].sqrt()).square()
    of_query = torch.einsum("bgrst,tbgd->sbgrd", changes.square(), key.square())
    of_query += totals.permute(3, 0, 1, 2)[..., None] * torch.einsum("bgrst,tbgd->sbgrd", weights, key).square()
    of_key = torch.einsum("bgrst,sbgrd->tbgd", changes.square() + shifts, query.square())
    of_value = torch.einsum("bgrst,sbgrd->tbgd", weights.square(), grad.square())
    of_mixed = torch.cat([scale**2 * of_query, scale**2 * of_key[:, :, :, None], of_value[:, :, :, None]], dim=3)
    of_context = torch.einsum("bgrst,tbgd->sbgrd", weights.square(), value.square())
    return of_context.reshape(s, b, -1), of_mixed.reshape(s, b, -1)


def weights_of(
    mixed: Tensor, groups: int, repeats: int, d: int, *, scale: float, slopes: Tensor | None, documents: Tensor | None
) -> Tensor:
    """The weights [b, g, r, query, key] of a projection."""
    s, b, _ = mixed.shape
    query, key, _ = mixed.view(s, b, groups, repeats + 2, d).split([repeats, 1, 1], dim=3)
    scores = torch.einsum("sbgrd,tbgd->bgrst", query, key.squeeze(3)) * scale
    position = torch.arange(s)
    if slopes is not None:
        scores = scores + slopes.to(mixed.dtype).view(1, groups, repeats, 1, 1) * position.to(mixed.dtype)
    hidden = (position > position[:, None])[None]
    if documents is not None:
        hidden = hidden | (documents[:, :, None] != documents[:, None])
    return torch.softmax(scores.masked_fill(hidden[:, None, None], -math.inf), dim=-1)


@pytest.fixture(autouse=True)
def compiled() -> None:
    if library.torch_library("auto") is None:
        pytest.skip("no compiler, no kernels")


@pytest.mark.few(cases=5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("s", "b", "groups", "repeats", "d"),
    [
        (1, 1, 1, 1, 8),
        (7, 2, 1, 2, 20),
        (129, 2, 3, 2, 33),
        (300, 1, 2, 1, 64),
        (520, 1, 1, 3, 128),
        (1000, 1, 1, 1, 64),
    ],
)
def test_equals_the_specification(s, b, groups, repeats, d, dtype):
    for sloped, run in ((False, 0), (True, 0), (True, 100), (False, 3)):
        Case(s, b, groups, repeats, d, dtype, sloped, run).check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_every_level(cpu_level, dtype):
    for s, d, run in ((5, 8, 0), (150, 40, 0), (600, 33, 70)):
        Case(s, 2, 1, 2, d, dtype, run=run).check()


def test_forced_to_the_reference(monkeypatch):
    monkeypatch.setenv("MEGAZERO_FUSED", "reference")
    case = Case(40, 2, 2, 2, 8, torch.bfloat16)
    for ours, theirs in zip(case.run(), case.run(reference_attention), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("run", [0, 5])
@pytest.mark.parametrize("sloped", [False, True])
def test_the_reference_equals_the_specification(sloped, run):
    case = Case(33, 2, 2, 3, 6, torch.float64, sloped, run)
    for ours, theirs in zip(case.run(), case.run(specification), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    s=st.integers(1, 400),
    b=st.integers(1, 3),
    groups=st.integers(1, 3),
    repeats=st.integers(1, 3),
    d=st.integers(1, 130),
    dtype=st.sampled_from(DTYPES),
    sloped=st.booleans(),
    run=st.sampled_from([0, 1, 4, 50, 300]),
)
def test_any_shape(s, b, groups, repeats, d, dtype, sloped, run):
    Case(s, b, groups, repeats, d, dtype, sloped, run, seed=s + d).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("b", "groups", "repeats"), [(1, 1, 1), (1, 1, 3), (3, 3, 1)])
def test_the_same_bits_for_any_number_of_threads(b, groups, repeats, dtype):
    case = Case(700, b, groups, repeats, 16, dtype, run=400)
    the_same_for_any_threads(case.run, (1, 2, 3, 8))


@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_reaches_what_depends_on_it(dtype, slot):
    """slot: query, key or value. What depends on a number is what its change changes; other heads and samples stay
    clean.
    """
    case = Case(200, 2, 2, 1, 8, dtype, run=60)
    at = (150, 1, (3 + slot) * 8 + 5)
    changed, poisoned = case.mixed.double(), case.mixed.clone()
    changed[at] += 3
    poisoned[at] = math.nan
    before, after = case.run(specification, case.mixed.double()), case.run(specification, changed)
    for ours, first, second in zip(case.run(mixed=poisoned), before, after, strict=True):
        depends = (first - second).abs() > 1e-9 * first.abs().max()
        assert depends.any() and ours.isnan()[depends].all()
        mine = ours.view(200, 2, 2, -1)
        assert not mine[:, 0].isnan().any() and not mine[:, 1, 0].isnan().any()


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_keys_act_as_in_the_specification(dtype, value):
    """A score of inf makes its row NaN, one of -inf takes its key out; also where a block's only scores are -inf.

    In float64, and not beside `reference_attention` in 16 bits: that multiplies probabilities by torch's product, which
    on AMX reads beyond a row where the sequence is no multiple of 32, and carries a row's NaN into the one before.
    """
    case = Case(700, 1, 2, 1, 8, dtype)
    case.mixed[130, 0, 8] = value
    case.mixed[:600, 0, 8 * 4 : 8 * 5] = 0
    case.mixed[:600, 0, 8 * 4] = value
    ours = causal_attention(case.mixed, *case.heads, **case.options)
    exact = specification(case.mixed.double(), *case.heads, **case.options)
    assert ours.isnan().any() and not ours.isnan().all()
    assert torch.equal(ours.isnan(), exact.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_is_written(dtype):
    """Results in memory that held NaN, by a direct call of the kernels."""
    s, b, groups, repeats, d = sizes = (70, 2, 2, 2, 20)
    case, kernels, end = Case(*sizes, dtype), library.torch_library("auto"), library.suffix(dtype)
    assert kernels is not None
    out, gradient = torch.full_like(case.grad, math.nan), torch.full_like(case.mixed, math.nan)
    norms = torch.full((b, groups * repeats, s), math.nan)
    slopes, last = case.options["slopes"], (*sizes, 1 / math.sqrt(d), 0, 0, 0.0)
    kernels.call(f"attention_forward_{end}", case.mixed, out, norms, slopes, None, *last)
    kernels.call(f"attention_backward_{end}", case.mixed, out, case.grad, norms, gradient, slopes, None, *last)
    expected = case.run()
    assert torch.equal(out, expected[0]) and torch.equal(gradient, expected[1]) and norms.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [14, 72, 80, 96])
def test_what_fills_up_a_head_reaches_nothing(cpu_level, d, dtype):
    """Heads are filled up with zeros to whole tiles, in memory that a thread keeps: here the call before has left NaN
    in it. Around the tensors is NaN too, which nobody reads or writes.
    """
    larger = Case(140, 1, 1, 2, 128, dtype)
    larger.run(mixed=torch.full_like(larger.mixed, math.nan))
    sizes = s, b, groups, repeats, _ = (70, 2, 2, 2, d)
    case = Case(*sizes, dtype)
    expected = case.check()
    kernels, end = library.torch_library(cpu_level), library.suffix(dtype)
    assert kernels is not None
    mixed, out, grad = surrounded(case.mixed), surrounded(torch.zeros_like(case.grad)), surrounded(case.grad)
    norms = surrounded(torch.zeros(b, groups * repeats, s))
    gradient = surrounded(torch.zeros_like(mixed))
    slopes, last = case.options["slopes"], (*sizes, 1 / math.sqrt(d), 0, 0, 0.0)
    larger.run(mixed=torch.full_like(larger.mixed, math.nan))
    kernels.call(f"attention_forward_{end}", mixed, out, norms, slopes, None, *last)
    kernels.call(f"attention_backward_{end}", mixed, out, grad, norms, gradient, slopes, None, *last)
    assert torch.equal(out, expected[0]) and torch.equal(gradient, expected[1])
    assert all(still_surrounded(tensor) for tensor in (mixed, out, grad, norms, gradient))


def test_tensors_that_are_views():
    case = Case(50, 2, 2, 1, 16, torch.bfloat16)
    expected = case.run()
    spaced = torch.stack([case.mixed, case.mixed], dim=-1)[..., 0].detach().requires_grad_()
    out = causal_attention(spaced, *case.heads, **case.options)
    out.backward(case.grad.transpose(0, 1).contiguous().transpose(0, 1))
    assert spaced.grad is not None
    assert torch.equal(out, expected[0]) and torch.equal(spaced.grad, expected[1])


MEASURE = """
import resource, torch
from fused_ops.attention import causal_attention

def step(s):
    mixed = torch.randn(s, 1, 2 * 3 * 16).bfloat16().requires_grad_()
    causal_attention(mixed, 2, 1, 16, scale=0.25, slopes=torch.tensor([0.5, 0.01]), documents=None).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

print(-step(600) + step(8192))
"""


@pytest.mark.slow
def test_memory_is_linear_in_the_sequence():
    """8192 positions of two heads: 256 MB were one tensor of scores in 16 bits."""
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40_000
