"""apex's Adam in place of ours, with a module that stands for its CUDA extension: its interface, in
torch's operations.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fused_ops import apex
from fused_ops.adam import adam_step
from tests.fused_ops.levels import adam_settings, drawn, scalar

N = 5_003


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """What apex's kernel computes, the multiplied gradient left in its place included.

    It takes these dtypes and no others.
    """
    assert noop_flag.dtype == step.dtype == torch.int32 and lr.dtype == inv_scale.dtype == torch.float32
    assert {tensor.numel() for tensor in (noop_flag, step, lr, inv_scale)} == {1} and chunk_size > 0
    if int(noop_flag) == 1:
        return
    for g, p, m, v in zip(*tensor_lists, strict=True):
        assert g.dtype == p.dtype == m.dtype == v.dtype and all(tensor.is_contiguous() for tensor in (g, p, m, v))
        g.mul_(inv_scale)
        r = g + weight_decay * p if mode == 0 else g
        m.mul_(beta1).add_(r, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(r, r, value=1 - beta2)
        first, second = (1 - beta1 ** int(step), 1 - beta2 ** int(step)) if bias_correction else (1.0, 1.0)
        update = m / first / ((v / second).sqrt() + eps)
        p.sub_(lr * (update + weight_decay * p if mode == 1 else update))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "amp_C", SimpleNamespace(multi_tensor_adam_capturable=multi_tensor_adam_capturable)
    )


def normal(seed: int) -> Tensor:
    return drawn(N, seed=seed, dtype=torch.float32)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_it_is_our_step(installed: None, decoupled: bool, decay: float) -> None:
    ours, theirs = ([normal(1), torch.zeros(N), torch.zeros(N), normal(1).bfloat16()] for _ in range(2))
    for number in range(1, 30):
        for state, step in ((ours, adam_step), (theirs, apex.adam_step)):
            master, first, second, out = state
            how = {"weight_decay": decay, "decoupled": decoupled, "multiplier": scalar(1 / (1 + number % 3))}
            step(out, master, normal(100 + number), first, second, **adam_settings(number, **how))
    assert not torch.equal(ours[0], normal(1))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-2 if a.dtype == torch.bfloat16 else 2e-5, atol=2e-6)
    assert torch.equal(theirs[3], theirs[0].bfloat16())


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_skipped_step_leaves_every_bit(installed: None, bad: float) -> None:
    # The output is not the rounded weight: it may not be written.
    state = [normal(2), normal(3), normal(4).abs(), normal(5).bfloat16()]
    before = [tensor.clone() for tensor in state]
    master, first, second, out = state
    skipped = adam_settings(skip=torch.tensor(True), multiplier=scalar(bad))
    apex.adam_step(out, master, normal(6).fill_(bad), first, second, **skipped)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))


@pytest.mark.parametrize("module", [None, SimpleNamespace(multi_tensor_adam=None)])
def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    """Not installed, or one without what is needed."""
    monkeypatch.setitem(sys.modules, "amp_C", module)
    assert apex.extension() is None
    said = apex.unavailable_reason()
    assert said is not None and "not on PyPI" in said and "github.com/NVIDIA/apex" in said


def test_nothing_is_missing(installed: None) -> None:
    assert apex.unavailable_reason() is None
