"""A multiplier and a soft cap of logits before the loss, against dense formulas in fp64 that autograd follows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_ops import blocks
from fused_ops.soft_cap import SoftCap, soft_capped
from megazero.mpu import head_loss as module
from megazero.mpu.axes import Axes
from megazero.mpu.cross_entropy import VocabularyLoss, vocab_parallel_cross_entropy
from megazero.mpu.grid import build_grid, single_rank_group
from megazero.mpu.head_loss import head_loss
from tests.fused_ops.levels import DTYPES, level
from tests.ranks import run_ranks

__all__ = ["level"]
ROWS, VOCAB = 9, 29
CHANGES: list[dict[str, Any]] = [{"cap": 2.5}, {"multiplier": 0.25}, {"multiplier": 3.0, "cap": 1.5}]


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels() -> Tensor:
    return torch.randint(0, VOCAB, (ROWS,), generator=torch.Generator().manual_seed(9))


def dense(logits: Tensor, e: float, z: float, multiplier: float = 1.0, cap: float | None = None) -> Tensor:
    """The tanh by exponentials, and the loss by torch."""
    values = logits * multiplier
    if cap is not None:
        twice = torch.exp(2 * values / cap)
        values = cap * (twice - 1) / (twice + 1)
    losses = torch.nn.functional.cross_entropy(values, labels(), label_smoothing=e, reduction="none")
    return losses + z * values.logsumexp(1).square()


def expected(logits: Tensor, *rest: float, **changes: Any) -> tuple[Tensor, Tensor]:
    leaf = logits.double().requires_grad_()
    losses = dense(leaf, *rest, **changes)
    (gradient,) = torch.autograd.grad(losses, leaf, drawn(ROWS, seed=4))
    return losses.detach(), gradient


def of_a_rank(rank: int, tp: int, width: int, e: float, z: float, changes: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Padding columns hold the worst values."""
    group = build_grid(Axes(tp=tp)).tp if tp > 1 else single_rank_group()
    padded = torch.full((ROWS, width * tp), math.nan, dtype=torch.float64)
    padded[:, :VOCAB] = drawn(ROWS, VOCAB) * 3
    leaf = padded[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    rest = {"label_smoothing": e, "z_loss": z, **changes}
    losses = vocab_parallel_cross_entropy(leaf * 1.0, labels(), group, vocab=VOCAB, **rest)
    losses.backward(drawn(ROWS, seed=4))
    assert leaf.grad is not None
    return losses.detach(), leaf.grad


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize(("e", "z"), [(0.0, 0.0), (0.1, 0.01)])
@pytest.mark.parametrize(("tp", "width"), [(1, 29), (1, 32), (2, 16), (3, 15)])
def test_losses_and_gradients(tp: int, width: int, e: float, z: float, changes: dict[str, Any]) -> None:
    """(3, 15): a last rank of padding alone."""
    losses, gradient = expected(drawn(ROWS, VOCAB) * 3, e, z, **changes)
    results = run_ranks(tp, of_a_rank, tp, width, e, z, changes) if tp > 1 else [of_a_rank(0, 1, width, e, z, changes)]
    for of_rank, _ in results:
        torch.testing.assert_close(of_rank, losses, rtol=1e-12, atol=1e-13)
    whole = torch.cat([result[1] for result in results], 1)
    torch.testing.assert_close(whole[:, :VOCAB], gradient, rtol=1e-11, atol=1e-13)
    assert not whole[:, VOCAB:].any()


@pytest.mark.parametrize("changes", CHANGES)
def test_blocks_of_rows(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "HOST_ELEMENTS", 4 * VOCAB)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    losses, gradient = expected(drawn(ROWS, VOCAB) * 3, 0.1, 0.01, **changes)
    ours, of_logits = of_a_rank(0, 1, VOCAB, 0.1, 0.01, changes)
    torch.testing.assert_close(ours, losses, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(of_logits, gradient, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", CHANGES)
def test_gradients_of_16_bits_are_rounded_once(level, changes: dict[str, Any], dtype: torch.dtype) -> None:
    """Also where the cap is flat: its slope is not that of a rounded value."""
    logits = (drawn(ROWS, VOCAB) * 6).to(dtype).to(torch.get_default_device())
    losses, gradient = expected(logits.cpu(), 0.1, 0.01, **changes)
    loss = VocabularyLoss(single_rank_group(), VOCAB, 0.1, 0.01, **changes)
    rows = loss.of(logits, labels().to(logits.device))
    loss.write_gradient(logits, rows, drawn(ROWS, seed=4).float().to(logits.device))
    torch.testing.assert_close(rows.losses.cpu().double(), losses, rtol=2e-6, atol=2e-6)
    error = (logits.cpu().double() - gradient).abs()
    half = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
    assert (error <= 1.01 * half * gradient.abs() + 4e-6 * gradient.abs().max()).all()


@pytest.mark.parametrize("changes", CHANGES)
def test_head_loss_in_blocks(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.BLOCK_BYTES, "cpu", 4 * VOCAB * 8)
    x, weight = drawn(ROWS, 6, seed=2).requires_grad_(), torch.nn.Parameter(drawn(VOCAB, 6, seed=3))
    exact = dense(x @ weight.t(), 0.1, 0.01, **changes).sum()
    gradients = torch.autograd.grad(exact, (x, weight))
    loss = VocabularyLoss(single_rank_group(), VOCAB, 0.1, 0.01, **changes)
    total = head_loss(x, weight, labels(), None, loss, None)
    total.backward()
    torch.testing.assert_close(total, exact, rtol=1e-12, atol=1e-13)
    for ours, theirs in zip((x.grad, weight.grad), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_known_values() -> None:
    x = torch.tensor([-1e9, -2.0, 0.0, 2.0, math.inf], dtype=torch.float64)
    capped = soft_capped(x, cap=4.0)
    known = [-4.0, 4 * math.tanh(-0.5), 0.0, 4 * math.tanh(0.5), 4.0]
    assert capped.tolist() == pytest.approx(known, rel=1e-15)  # torch's tanh and libm's differ in the last bit
    assert soft_capped(x[1:4], 0.125).tolist() == [-0.25, 0.0, 0.25]
    scaled = [2 * math.tanh(-0.5), 0.0, 2 * math.tanh(0.5)]
    assert soft_capped(x[1:4], 0.5, 2.0).tolist() == pytest.approx(scaled, rel=1e-15)
    assert soft_capped(x) is x and soft_capped(x.bfloat16(), cap=4.0).dtype == torch.bfloat16
    assert torch.autograd.gradcheck(lambda x: soft_capped(x, 0.5, 2.0), drawn(7).requires_grad_())
    with pytest.raises(ValueError, match="above 0, not 0"):
        SoftCap(cap=0.0)


def test_logits_are_those_of_gemma_and_granite() -> None:
    """transformers: tanh(logits / cap) * cap, and logits / logits_scaling."""
    x = drawn(5, 7) * 20
    torch.testing.assert_close(soft_capped(x, cap=30.0), torch.tanh(x / 30.0) * 30.0, rtol=1e-14, atol=0)
    torch.testing.assert_close(soft_capped(x, 1 / 8.0), x / 8.0, rtol=0, atol=0)
