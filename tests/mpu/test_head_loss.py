"""The head's product and loss in blocks against a dense formula in fp64, on one rank and on several."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.mpu import head_loss as module
from megazero.mpu.axes import Axes
from megazero.mpu.cross_entropy import VocabularyLoss
from megazero.mpu.functional import copy_to_tp
from megazero.mpu.grid import build_grid, single_rank_group
from megazero.mpu.head_loss import head_loss
from megazero.mpu.parameter import Parameter, ParameterKind, shard
from tests.mpu.test_gradient import Kept
from tests.ranks import run_ranks

N, H, V = 23, 6, 37


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels() -> Tensor:
    return torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(5))


def counted() -> Tensor:
    return torch.arange(N) % 3 != 1


def dense(x: Tensor, weight: Tensor, mask: Tensor | None, smoothing: float, z_loss: float) -> Tensor:
    logits = x @ weight.t()
    losses = (
        F.cross_entropy(logits, labels(), reduction="none", label_smoothing=smoothing)
        + z_loss * logits.logsumexp(1).square()
    )
    return (losses if mask is None else losses[mask]).sum()


def expected(mask: Tensor | None, smoothing: float, z_loss: float, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = drawn(N, H, seed=1).requires_grad_(), drawn(V, H, seed=2).requires_grad_()
    loss = dense(x, weight, mask, smoothing, z_loss)
    grad_x, grad_weight = torch.autograd.grad(loss * factor, (x, weight))
    return loss.detach(), grad_x, grad_weight


def of_a_rank(rank: int, tp: int, padded: int, block_rows: int, known: bool, masked: bool, kept: bool) -> list[Tensor]:
    """(loss, gradient of x, gradient of this rank's rows of the weight without padding)."""
    group = build_grid(Axes(tp=tp)).tp if tp > 1 else single_rank_group()
    spec = shard("head", (V, H), ParameterKind.EMBEDDING, dim=0, rank=group.index, size=tp, padded=padded)
    weight = Parameter(spec, torch.float64, "cpu")
    (start, stop), _ = spec.box
    with torch.no_grad():
        weight.fill_(9.0)
        weight[: stop - start] = drawn(V, H, seed=2)[start:stop]
    target = Kept(weight, torch.float64) if kept else None
    saved, module.BLOCK_BYTES["cpu"] = module.BLOCK_BYTES["cpu"], block_rows * weight.shape[0] * 8
    x, factor = drawn(N, H, seed=1).requires_grad_(), torch.tensor(0.37, dtype=torch.float64)
    loss_of = VocabularyLoss(group, V, 0.1, 0.01)
    loss = head_loss(
        copy_to_tp(x, group), weight, labels(), counted() if masked else None, loss_of, factor if known else None
    )
    (loss * factor).backward() if not known else loss.backward(factor)
    module.BLOCK_BYTES["cpu"] = saved
    gradient = target.sum if target is not None else weight.grad
    assert x.grad is not None and gradient is not None and (target is None or weight.grad is None)
    assert not gradient[stop - start :].any(), "padding has a gradient"
    return [loss.detach(), x.grad, gradient[: stop - start]]


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("block_rows", [1, 4, 1000])
def test_one_rank_equals_the_dense_formula(block_rows: int, known: bool, masked: bool, kept: bool) -> None:
    found = of_a_rank(0, 1, 40, block_rows, known, masked, kept)
    for mine, theirs in zip(found, expected(counted() if masked else None, 0.1, 0.01, 0.37), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("tp", [2, 4])
def test_fault_28_tp_equals_the_dense_formula(tp: int) -> None:
    """A vocabulary that tp does not divide, and a last rank with padding alone."""
    loss, grad_x, grad_weight = expected(counted(), 0.1, 0.01, 0.37)
    for padded in (40, 60):
        ranks = run_ranks(tp, of_a_rank, tp, padded, 4, True, True, True)
        for found in ranks:
            torch.testing.assert_close(found[0], loss, rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(found[1], grad_x, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(torch.cat([found[2] for found in ranks]), grad_weight, rtol=1e-12, atol=1e-13)


def test_another_factor_than_announced_is_refused() -> None:
    x, weight = drawn(N, H, seed=1).requires_grad_(), torch.nn.Parameter(drawn(V, H, seed=2))
    loss = head_loss(x, weight, labels(), None, VocabularyLoss(single_rank_group(), V), torch.tensor(0.5))
    with pytest.raises(AssertionError, match="another factor"):
        loss.backward()


def test_without_gradients_only_the_loss_is_computed() -> None:
    weight = Parameter(shard("head", (V, H), ParameterKind.EMBEDDING), torch.float64, "cpu")
    target = Kept(weight, torch.float64)
    with torch.no_grad():
        weight.copy_(drawn(V, H, seed=2))
        found = head_loss(
            drawn(N, H, seed=1), weight, labels(), None, VocabularyLoss(single_rank_group(), V), torch.tensor(0.5)
        )
    torch.testing.assert_close(found, expected(None, 0.0, 0.0, 1.0)[0], rtol=1e-12, atol=1e-13)
    assert target.count == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_with_the_factor_of_a_loss_scale(dtype: torch.dtype) -> None:
    """Gradients are made with the factor in them: fp16 ones of a loss that is divided first would underflow."""
    x, weight = drawn(N, H, seed=1).to(dtype).requires_grad_(), torch.nn.Parameter(drawn(V, H, seed=2).to(dtype))
    factor = torch.tensor(2.0**-12 if dtype == torch.bfloat16 else 256.0)
    exact_x, exact_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = torch.autograd.grad(dense(exact_x, exact_weight, None, 0.0, 0.0) * factor, (exact_x, exact_weight))
    loss = head_loss(x, weight, labels(), None, VocabularyLoss(single_rank_group(), V), factor)
    loss.backward(factor)
    assert loss.dtype == torch.float32
    for found, wanted in zip((x.grad, weight.grad), exact, strict=True):
        assert found is not None
        assert (found.double() - wanted).abs().max() < 4 * torch.finfo(dtype).eps * wanted.abs().max()
