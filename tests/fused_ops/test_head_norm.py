"""RMSNorm with an offset or without a weight, and of every query head and key head: every body against formulas in
float64 that share no code, and against transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_ops.head_norm import norm_heads
from fused_ops.layernorm import add_rms_norm, rms_norm
from fused_ops.native import library
from tests.fused_ops.levels import DTYPES, assert_close, drawn, level, same_kind, the_same_for_any_threads

__all__ = ["level"]
EPS = 1e-5


def plain(x: Tensor, weight: Tensor | None, offset: float = 0.0) -> Tensor:
    """The formula, for autograd."""
    unit = x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + EPS) ** 0.5
    return unit if weight is None else unit * (weight + offset)


def plain_heads(
    mixed: Tensor, groups: int, repeats: int, query: Tensor | None, key: Tensor | None, offset: float = 0.0
) -> Tensor:
    heads = mixed.unflatten(-1, (groups, repeats + 2, -1))
    queries, keys, values = heads.split([repeats, 1, 1], dim=-2)
    return torch.cat([plain(queries, query, offset), plain(keys, key, offset), values], dim=-2).flatten(-3)


def run(function: Callable[..., Any], inputs: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Outputs and gradients of all inputs. dtype: to which the outputs' gradients are rounded; the inputs' without."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    result = function(*leaves)
    outputs = list(result) if isinstance(result, tuple) else [result]
    weights = [drawn(*y.shape, seed=9 + i).to(dtype or y.dtype).to(y.dtype) for i, y in enumerate(outputs)]
    torch.autograd.backward(outputs, weights)
    return [*(y.detach() for y in outputs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def agree(ours: Callable[..., Any], theirs: Callable[..., Any], inputs: list[Tensor], slack: float = 8.0) -> None:
    """In the inputs' dtype within a rounding; in float64 to its last digits, with gradcheck."""
    wide, dtype = [x.double() for x in inputs], inputs[0].dtype
    exact = run(theirs, wide, dtype)
    for mine, other in zip(run(ours, wide, dtype), exact, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)
    for mine, other in zip(run(ours, inputs), exact, strict=True):
        assert mine.dtype == dtype
        assert_close(mine, other, slack=slack, size=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 17), (2, 3, 33), (70, 64), (9, 2056)])
@pytest.mark.parametrize("offset", [0.0, 1.0, -0.75, None])
def test_offset_and_no_weight(level, offset, shape, dtype) -> None:
    x, weight = drawn(*shape, dtype=dtype), drawn(shape[-1], seed=2, dtype=dtype)
    if offset is None:
        agree(lambda x: rms_norm(x, None, EPS), lambda x: plain(x, None), [x])
        return
    agree(lambda x, w: rms_norm(x, w, EPS, offset), lambda x, w: plain(x, w, offset), [x, weight])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1.0, None])
def test_offset_of_a_sum(level, offset, dtype) -> None:
    """Values whose sum needs no rounding: what is normalised is the rounded sum."""
    x, residual = (drawn(6, 40, seed=seed).mul(8).round().div(8).clamp(-8, 8).to(dtype) for seed in (1, 2))
    weights = [] if offset is None else [drawn(40, seed=3, dtype=dtype)]

    def ours(x: Tensor, residual: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, EPS, offset or 0.0)

    def theirs(x: Tensor, residual: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x + residual, plain(x + residual, weight, offset or 0.0)

    agree(ours, theirs, [x, residual, *weights])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_offset_is_added_before_the_rounding(level, dtype) -> None:
    """1 + w in 16 bits would be 1. With this eps the square root is 1 too, and 1.5 (1 + w) rounds up."""
    unit = torch.finfo(dtype).eps
    x, weight = torch.tensor([1.5, 0.5, 0.5, 0.5], dtype=dtype), torch.full((4,), 7 / 16 * unit, dtype=dtype)
    assert (weight > 0).all() and (weight + 1 == 1).all()
    x.requires_grad_()
    y = rms_norm(x, weight, 0.25, 1.0)
    y.backward(torch.tensor([1.5, 0, 0, 0], dtype=dtype))
    assert x.grad is not None
    assert y[0].item() == 1.5 + unit
    assert x.grad[0].item() == 1.5 * 0.4375 + unit / 2  # the exact one: this times 1 + w
    mixed = x.detach().repeat(3).view(1, 1, 12)
    heads = norm_heads(mixed, 1, 1, weight, weight, 0.25, 1.0).view(3, 4)
    assert heads[:, 0].tolist() == [1.5 + unit, 1.5 + unit, 1.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_so_does_the_reference(dtype, monkeypatch) -> None:
    monkeypatch.setenv("MEGAZERO_FUSED", "reference")
    test_the_offset_is_added_before_the_rounding("reference", dtype)


def test_no_offset_changes_no_bit(level) -> None:
    """A weight of -0.0 too, which + 0.0 would change."""
    x = drawn(5, 32, dtype=torch.float32).abs()
    weight = torch.full((32,), -0.0)
    assert torch.signbit(rms_norm(x, weight, EPS)).all()


def test_norms_are_those_of_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    x, weight = drawn(3, 5, 24), drawn(24, seed=2)
    for module, offset in ((llama.LlamaRMSNorm(24, eps=EPS), 0.0), (gemma.Gemma3RMSNorm(24, eps=EPS), 1.0)):
        module.weight.data = weight.clone()
        expected = module.to(torch.float64)(x)
        # Both compute in float32, whatever they are chosen.
        torch.testing.assert_close(rms_norm(x, weight, EPS, offset), expected.double(), rtol=2e-6, atol=2e-6)


SIZES = [(1, 1, 1, 1, 1), (5, 2, 3, 1, 6), (4, 3, 2, 4, 34), (3, 2, 1, 2, 128), (2, 1, 2, 3, 256), (40, 2, 1, 1, 64)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("which", ["both", "query", "key", "none"])
@pytest.mark.parametrize(("s", "b", "groups", "repeats", "d"), SIZES)
def test_heads_are_normalised_one_by_one(level, s, b, groups, repeats, d, which, offset, dtype) -> None:
    mixed, weights = (
        drawn(s, b, groups * (repeats + 2) * d, dtype=dtype),
        [drawn(d, seed=i, dtype=dtype) for i in (2, 3)],
    )
    chosen = {"both": weights, "query": weights[:1], "key": weights[1:], "none": []}[which]

    def pair(rest: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
        query = rest[0] if which in ("both", "query") else None
        return query, rest[-1] if which in ("both", "key") else None

    agree(
        lambda mixed, *rest: norm_heads(mixed, groups, repeats, *pair(rest), EPS, offset),
        lambda mixed, *rest: plain_heads(mixed, groups, repeats, *pair(rest), offset),
        [mixed, *chosen],
        slack=20.0,
    )
    values = norm_heads(mixed, groups, repeats, *pair(tuple(chosen)), EPS, offset)
    values_of_both = (x.view(s, b, groups, repeats + 2, d)[..., -1, :] for x in (values, mixed))
    assert torch.equal(*values_of_both) and values.data_ptr() != mixed.data_ptr()


def test_known_heads() -> None:
    """A query of (3, 4) has the mean square 12.5; the key is (6, 8), the value stays."""
    mixed = torch.tensor([3.0, 4, 6, 8, 5, 7], dtype=torch.float64).view(1, 1, 6)
    query, key = torch.tensor([10.0, 1], dtype=torch.float64), torch.tensor([-1.0, 0], dtype=torch.float64)
    root = math.sqrt(12.5)
    expected = torch.tensor([30 / root, 4 / root, -3 / root, 0, 5, 7], dtype=torch.float64)
    torch.testing.assert_close(norm_heads(mixed, 1, 1, query, key, 0.0)[0, 0], expected, rtol=1e-15, atol=0)


def test_gradcheck() -> None:
    inputs = [drawn(3, 2, 2 * 5 * 4), drawn(4, seed=2), drawn(4, seed=3)]
    inputs = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda x, q, k: norm_heads(x, 2, 3, q, k, EPS, 1.0), inputs)
    assert torch.autograd.gradcheck(lambda x: norm_heads(x, 2, 3, None, None, EPS), inputs[:1])
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, EPS, -0.5), [drawn(3, 4).requires_grad_(), inputs[1]])
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, None, EPS), [drawn(3, 4).requires_grad_()])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_stay_in_their_heads(level, dtype, monkeypatch) -> None:
    mixed, weights = drawn(4, 2, 2 * 3 * 40, dtype=dtype), [drawn(40, seed=i, dtype=dtype) for i in (2, 3)]
    mixed[0, 0, 3], mixed[1, 1, 50], mixed[2, 0, 100], mixed[3, 1, 200] = math.nan, math.inf, math.nan, -math.inf

    def results() -> list[Tensor]:
        return run(lambda mixed, query, key: norm_heads(mixed, 2, 1, query, key, EPS), [mixed, *weights])

    ours = results()
    with monkeypatch.context() as patch:
        patch.setenv("MEGAZERO_FUSED", "reference")
        theirs = results()
    assert all(same_kind(*pair) for pair in zip(ours, theirs, strict=True))
    assert ours[0].isnan().sum() == 40 + 1 + 1


def test_weight_gradients_do_not_depend_on_the_threads(level) -> None:
    inputs = [drawn(500, 2, 2 * 4 * 20, dtype=torch.float32), *(drawn(20, seed=i, dtype=torch.float32) for i in (2, 3))]
    the_same_for_any_threads(lambda: run(lambda x, q, k: norm_heads(x, 2, 2, q, k, EPS, 1.0), inputs))


def test_sixteen_bit_weight_gradients_add_up_in_fp32(level) -> None:
    mixed, weights = drawn(1500, 2, 3 * 16, dtype=torch.bfloat16), [torch.ones(16, dtype=torch.bfloat16) for _ in "qk"]
    incoming = drawn(1500, 2, 3 * 16, seed=5, dtype=torch.bfloat16) + 0.5
    sums = []
    for inputs, function in (
        ([mixed, *weights], lambda x, q, k: norm_heads(x, 1, 1, q, k, EPS)),
        ([x.double() for x in (mixed, *weights)], lambda x, q, k: plain_heads(x, 1, 1, q, k)),
    ):
        leaves = [x.clone().requires_grad_() for x in inputs]
        function(*leaves).backward(incoming.to(inputs[0].dtype))
        sums.append([leaf.grad for leaf in leaves[1:]])
    for ours, theirs in zip(*sums, strict=True):
        assert ours is not None and theirs is not None
        assert ((ours.double() - theirs).abs() <= 2**-8 * theirs.abs().clamp(min=theirs.abs().max() / 100)).all()


def test_output_buffers_are_fully_written(level) -> None:
    kernels = library.kernels(drawn(1, dtype=torch.bfloat16))
    assert kernels is not None
    for bundles, repeats, d in ((1, 1, 1), (3, 2, 15), (65, 4, 33)):
        x, weight = drawn(bundles, repeats + 2, d, dtype=torch.bfloat16), drawn(d, dtype=torch.bfloat16)
        y, dx = (torch.full_like(x, math.nan) for _ in range(2))
        scale, sums = torch.full((bundles, repeats + 1), math.nan), torch.full((2, d), math.nan)
        kernels.call("norm_heads_bf16", bundles, repeats, d, y, x, weight, weight, scale, EPS, 0.0, 0.0)
        kernels.call("norm_heads_backward_bf16", bundles, repeats, d, dx, sums, x, x, weight, weight, scale, 0.0, 0.0)
        assert not any(tensor.isnan().any() for tensor in (y, dx, scale, sums))
