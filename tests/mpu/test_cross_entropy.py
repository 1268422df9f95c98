"""Vocabulary-parallel cross-entropy against a dense formula in fp64; rows 16, 17 and 28 of the numerical faults."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fused_ops import blocks
from megazero.mpu.axes import Axes
from megazero.mpu.cross_entropy import vocab_parallel_cross_entropy
from megazero.mpu.grid import build_grid, single_rank_group
from tests.ranks import run_ranks


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels_for(count: int, vocab: int) -> Tensor:
    """Labels on every rank's columns, the last real one among them."""
    labels = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(9))
    labels[:2] = torch.tensor([0, vocab - 1])
    return labels


def dense(logits: Tensor, labels: Tensor, e: float, z: float) -> Tensor:
    """The docstring's formula on the real columns."""
    log_normaliser = torch.log(torch.exp(logits - logits.amax(1, keepdim=True)).sum(1)) + logits.amax(1)
    own = logits[torch.arange(len(labels)), labels]
    loss = (1 - e) * (log_normaliser - own) + z * log_normaliser**2
    return loss + e * (log_normaliser[:, None] - logits).mean(1) if e else loss


def local(rank: int, logits: Tensor, labels: Tensor, width: int, size: int, e: float, z: float, weight: Tensor):
    """Loss, gradient of the local logits and messages of one rank; its padding columns hold the worst values."""
    group = build_grid(Axes(tp=size)).tp
    vocab = logits.shape[1]
    padded = torch.full((logits.shape[0], width * size), 1e4, dtype=logits.dtype)
    padded[:, vocab:][:, ::2] = float("nan")
    padded[:, :vocab] = logits
    leaf = padded[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf * 1.0, labels, group, vocab=vocab, label_smoothing=e, z_loss=z)
    (loss * weight).sum().backward()
    return loss.detach(), leaf.grad, dict(group.traffic)


@pytest.mark.few(cases=2)
@pytest.mark.sampled
@pytest.mark.parametrize("z", [0.0, 1e-2])
@pytest.mark.parametrize("e", [0.0, 0.1])
@pytest.mark.parametrize(
    ("vocab", "width", "size"),
    [(29, 32, 1), (29, 16, 2), (29, 10, 3), (31, 8, 4), (5, 4, 4), (1003, 252, 4), (1003, 335, 3)],
)
def test_fault_28_equals_the_dense_formula(vocab, width, size, e, z):
    """V % tp != 0; (5, 4, 4): two ranks hold nothing but padding."""
    count = 150 if vocab > 100 else 6
    logits, labels, weight = drawn(count, vocab) * 3, labels_for(count, vocab), drawn(count, seed=4)
    leaf = logits.clone().requires_grad_()
    expected = dense(leaf, labels, e, z)
    (expected * weight).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(
        expected.detach() - z * logits.logsumexp(1).square(),
        torch.nn.functional.cross_entropy(logits, labels, label_smoothing=e, reduction="none"),
    )
    results = run_ranks(size, local, logits, labels, width, size, e, z, weight)
    gradient = torch.cat([result[1] for result in results], 1)
    torch.testing.assert_close(gradient[:, :vocab], leaf.grad, rtol=1e-12, atol=1e-14)
    assert not gradient[:, vocab:].any()
    for loss, _, traffic in results:
        assert torch.equal(loss, results[0][0])
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=1e-14)
        # Maxima, then sums packed into one message; in fp64 nothing narrower travels.
        sums = 3 if e else 2
        assert traffic == ({} if size == 1 else {("all_reduce", torch.float64): 2 * 8 * count * (1 + sums)})


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_infinite_logits(size):
    """-inf takes no part, even where it is all that a rank holds; a label of -inf costs infinitely much; +inf shows as
    NaN.
    """
    logits, labels = drawn(5, 8), torch.tensor([7, 7, 0, 3, 3])
    logits[0, :4] = -math.inf
    logits[1, 0] = -math.inf
    logits[2, 0] = -math.inf
    logits[4, 6] = math.inf
    leaf = logits.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(leaf, labels, reduction="none")
    expected[:4].sum().backward()
    results = run_ranks(
        size, local, logits, labels, 8 // size, size, 0.0, 0.0, torch.tensor([1.0, 1, 1, 1, 0]).double()
    )
    gradient = torch.cat([result[1] for result in results], 1)
    for loss, _, _ in results:
        torch.testing.assert_close(loss[:4], expected[:4].detach(), rtol=1e-13, atol=1e-14)
        assert loss[2] == math.inf and not loss[4].isfinite()
    assert leaf.grad is not None
    torch.testing.assert_close(gradient[:4], leaf.grad[:4], rtol=1e-12, atol=1e-14)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], dtype=torch.float64)
    loss = vocab_parallel_cross_entropy(logits.clone(), torch.tensor([0, 1]), single_rank_group(), vocab=3)
    torch.testing.assert_close(loss, torch.tensor([0.0, math.log(3)], dtype=torch.float64))


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes anew, and the dtypes that it saw."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.known, self.elements = {known.untyped_storage().data_ptr()}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_no_second_copy_of_the_logits(dtype, monkeypatch):
    """Forward and backward make nothing larger than a few rows, and the gradient lies where the logits lay."""
    monkeypatch.setattr(blocks, "rows_of", lambda x, columns: 4)
    logits = drawn(256, 1000).to(dtype).requires_grad_() * 1.0
    with Largest(logits) as seen:
        loss = vocab_parallel_cross_entropy(
            logits, labels_for(256, 990), single_rank_group(), vocab=990, label_smoothing=0.1, z_loss=0.01
        )
        (gradient,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))
    assert 0 < seen.elements <= 4 * 1000
    assert gradient.data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_logits_are_computed_in_fp32(dtype):
    logits, labels = (drawn(40, 5000) * 2).to(dtype), labels_for(40, 5000)
    exact = logits.double().requires_grad_()
    expected = dense(exact, labels, 0.1, 1e-4)
    expected.sum().backward()
    leaf = logits.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(
        leaf * 1.0, labels, single_rank_group(), vocab=5000, label_smoothing=0.1, z_loss=1e-4
    )
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    loss.sum().backward()
    assert leaf.grad is not None and exact.grad is not None
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_a_second_backward_is_refused():
    leaf = drawn(4, 8).requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf * 1.0, labels_for(4, 8), single_rank_group(), vocab=8).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_fault_17_masked_tokens_and_no_tokens():
    """Weight 0 for all tokens gives zero gradients and no NaN; no token at all gives an empty loss."""
    leaf = drawn(4, 8).requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf * 1.0, labels_for(4, 8), single_rank_group(), vocab=8)
    (loss * 0.0).sum().backward()
    assert leaf.grad is not None and not leaf.grad.any()
    empty = torch.zeros(0, 8, dtype=torch.float64, requires_grad=True)
    nothing = vocab_parallel_cross_entropy(empty * 1.0, torch.zeros(0, dtype=torch.int64), single_rank_group(), vocab=8)
    assert nothing.shape == (0,)
    nothing.sum().backward()
