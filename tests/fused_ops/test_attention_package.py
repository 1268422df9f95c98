"""Attention by the package flash_attn, with a stand-in of its signature that computes in float64."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fused_ops.attention import causal_attention, package, trial
from fused_ops.attention.package import package_attention
from fused_ops.attention.reach import EVERYTHING, Reach
from fused_ops.attention.reference import reference_attention
from fused_ops.attention.selection import AttentionCase, AttentionSupport, Body, choose
from fused_ops.attention.trial import AttentionWorkload, failure, find_support, static_support
from fused_ops.softmax import alibi_slopes

BF16, FP64, CARD, CPU = torch.bfloat16, torch.float64, torch.device("cuda", 0), torch.device("cpu")


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """What the package documents: q [b, s, n, d], k and v [b, s, g, d], bias -slope |i - j|, alibi_slopes fp32 [n].

    window_size: query i sees keys i - window_size[0] to i + window_size[1]; -1 for no bound.
    """
    assert causal and not dropout_p and softmax_scale is not None
    repeats, length = q.shape[2] // k.shape[2], q.shape[1]
    keys, values = (x.double().repeat_interleave(repeats, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), keys) * softmax_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    if alibi_slopes is not None:
        assert alibi_slopes.dtype == torch.float32 and alibi_slopes.shape == (q.shape[2],)
        scores = scores - alibi_slopes.double()[:, None, None] * distance.abs()
    hidden = distance < 0
    if window_size[0] >= 0:
        assert window_size[1] == 0
        hidden = hidden | (distance > window_size[0])
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, values).to(q.dtype)


def steeper(*arguments: Tensor, **named: object) -> Tensor:
    slopes = named.pop("alibi_slopes")
    assert isinstance(slopes, Tensor)
    return flash_attn_func(*arguments, alibi_slopes=1.2 * slopes, **named)  # type: ignore


def install(patch: pytest.MonkeyPatch, function: object = flash_attn_func) -> None:
    module = ModuleType(package.NAME)
    module.flash_attn_func = function  # type: ignore[attr-defined]
    patch.setitem(sys.modules, package.NAME, module)
    patch.setattr(trial, "is_installed", lambda: True)


@pytest.mark.parametrize(("reach", "cap"), [(EVERYTHING, None), (Reach(1), None), (Reach(7), 1.5), (EVERYTHING, 3.0)])
@pytest.mark.parametrize("sloped", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 8), (50, 2, 3, 2, 20), (33, 3, 1, 4, 16), (40, 2, 6, 1, 8)])
def test_context_and_gradient_equal_the_scored_path(
    shape: tuple[int, ...], sloped: bool, reach: Reach, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    s, b, groups, repeats, d = shape
    draw = torch.Generator().manual_seed(s)
    mixed = torch.randn(s, b, groups * (repeats + 2) * d, generator=draw, dtype=FP64).requires_grad_()
    weight = torch.randn(s, b, groups * repeats * d, generator=draw, dtype=FP64)
    slopes = torch.tensor(alibi_slopes(groups * repeats), dtype=torch.float32) if sloped else None
    heads, scale = (groups, repeats, d), 1 / math.sqrt(d)
    ours = package_attention(mixed, *heads, scale=scale, slopes=slopes, reach=reach, cap=cap)
    exact = None if slopes is None else slopes.double()
    bounds = {"documents": None, "reach": reach, "cap": cap}
    theirs = reference_attention(mixed, *heads, scale=scale, slopes=exact, **bounds)  # type: ignore[arg-type]
    for one, other in zip(*([x, *torch.autograd.grad(x, mixed, weight)] for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


READY = AttentionSupport(length=512, package="", flex="")
SLOPED = AttentionCase("cuda", BF16, 64, 512, alibi=True, capability=(9, 0))


@pytest.mark.parametrize(
    ("change", "support", "body", "reason"),
    [
        ({}, READY, Body.PACKAGE, "no place for ALiBi"),
        ({"alibi": False}, READY, Body.FLASH, "no C"),
        ({"recorded": False, "length": 100}, READY, Body.PACKAGE, "no place for ALiBi"),
        ({"documents": True}, READY, Body.FLEX, "the package flash_attn: it knows no documents"),
        ({"dtype": torch.float32}, READY, Body.SOFTMAX, "bf16 and fp16 only"),
        ({"head_dim": 264}, READY, Body.SOFTMAX, "up to 256"),
        ({"capability": (7, 5)}, READY, Body.FLEX, "capability 8.0"),
        ({"dropout": True}, READY, Body.SOFTMAX, "same on every layout"),
        ({"kind": "cpu", "capability": None}, READY, Body.SOFTMAX, "the package flash_attn: it is made for CUDA"),
        ({}, replace(READY, package=package.MISSING), Body.FLEX, "the package flash_attn is not installed"),
        ({"alibi": False}, replace(READY, asked="flash-attn"), Body.PACKAGE, "as --attention flash-attn asks"),
    ],
)
def test_the_rule(change: dict[str, object], support: AttentionSupport, body: Body, reason: str) -> None:
    found = choose(replace(SLOPED, **change), support)  # type: ignore[arg-type]
    assert found.body is body and reason in found.reason, found.reason


def test_a_body_that_is_asked_for_and_not_installed_is_an_error() -> None:
    assert not package.is_installed(), "this test needs a Python without it"
    support = static_support("flash-attn", 512)
    with pytest.raises(ValueError, match="--attention flash-attn cannot run: the package flash_attn is not installed"):
        choose(SLOPED, support)


def test_the_trial_finds_other_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = AttentionWorkload(FP64, 40, 2, 2, 2, 8, alibi=True)

    def tried(function: object) -> str:
        install(monkeypatch, function)
        return failure(lambda mixed: trial._trial(Body.PACKAGE, workload, CPU, (), mixed), workload, CPU)

    assert tried(flash_attn_func) == ""
    assert "on this machine" in tried(steeper)


@pytest.mark.parametrize(("words", "body"), [("", Body.PACKAGE), ("an undefined symbol", Body.FLEX)])
def test_it_is_tried_before_it_is_used(words: str, body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card that this machine need not have. Without ALiBi nobody tries it, and it never runs."""
    install(monkeypatch)
    monkeypatch.setattr(trial, "capability", lambda device: (8, 0))
    monkeypatch.setattr(trial, "flash_backends", lambda *_, **__: ())
    monkeypatch.setattr(trial, "find_spec", lambda name: object())
    asked: list[Body] = []

    def tries(function: object, *_: object) -> str:
        asked.append(function.args[0])  # type: ignore[attr-defined]
        return words if asked[-1] is Body.PACKAGE else ""

    monkeypatch.setattr(trial, "failure", tries)
    find_support.cache_clear()
    workload = AttentionWorkload(BF16, 512, 1, 2, 1, 64, alibi=True)
    support = find_support("auto", workload, CARD)
    assert choose(workload.case(CARD), support).body is body
    assert asked == [Body.PACKAGE, Body.FLEX][: 1 + bool(words)] and support.package == words
    plain = find_support("auto", replace(workload, alibi=False), CARD)
    assert plain.package == AttentionSupport.package
    find_support.cache_clear()


def test_it_runs_where_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr("fused_ops.attention.choose", lambda case, support: choose(SLOPED, READY))
    mixed, slopes = torch.randn(12, 2, 2 * 3 * 8, dtype=FP64), torch.tensor(alibi_slopes(2))
    ours = causal_attention(mixed, 2, 1, 8, scale=0.3, slopes=slopes, documents=None)
    theirs = reference_attention(mixed, 2, 1, 8, scale=0.3, slopes=slopes, documents=None, dropout=None)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
