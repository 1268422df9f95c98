"""The softmax's reference body against a dense formula written with torch's own ops in fp64."""

import math

import pytest
import torch
from torch import Tensor

from fused_ops.softmax import alibi_slopes, scaled_causal_alibi_softmax
from tests.fused_ops.levels import drawn


def dense(scores: Tensor, scale: float, slopes: Tensor | None, documents: Tensor | None) -> Tensor:
    """The same in whole tensors, with masks and biases of full size."""
    queries, keys = scores.shape[2:]
    key = torch.arange(keys)
    values = scores * scale
    if slopes is not None:
        values = values + slopes.to(scores.dtype)[None, :, None, None] * key.to(scores.dtype)
    hidden = (key[None, :] > (keys - queries + torch.arange(queries))[:, None])[None, None]
    if documents is not None:
        hidden = hidden | (documents[:, None, keys - queries :, None] != documents[:, None, None, :])
    return torch.softmax(values.masked_fill(hidden, -math.inf), dim=-1)


def bloom_slopes(heads: int) -> list[float]:
    """BLOOM's definition, as DESIGN section 8 words it."""
    c = 2 ** math.floor(math.log2(heads))
    start = 2 ** (-8 / c)
    slopes = [start ** (i + 1) for i in range(c)]
    if c != heads:
        further = 2 ** (-8 / (2 * c))
        slopes += [further ** (i + 1) for i in range(2 * c)][0::2][: heads - c]
    return slopes


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 71, 112])
def test_fault_23_slopes_of_any_count(heads):
    slopes = alibi_slopes(heads)
    assert len(slopes) == heads
    assert slopes == pytest.approx(bloom_slopes(heads), rel=1e-14)


@pytest.mark.parametrize("documented", [False, True])
@pytest.mark.parametrize("sloped", [False, True])
@pytest.mark.parametrize(
    ("b", "n", "queries", "keys"), [(2, 3, 7, 7), (1, 2, 300, 300), (2, 3, 5, 11), (1, 1, 1, 9), (3, 40, 70, 70)]
)
def test_equals_dense_formula(b, n, queries, keys, sloped, documented):
    scores = drawn(b, n, queries, keys)
    slopes = torch.tensor(alibi_slopes(n), dtype=torch.float64) if sloped else None
    documents = (torch.arange(keys) * torch.arange(1, b + 1)[:, None] // 4) if documented else None
    weight = drawn(b, n, queries, keys, seed=2)
    leaf = scores.clone().requires_grad_()
    expected = dense(leaf, 0.3, slopes, documents)
    (expected * weight).sum().backward()

    ours = scores.clone().requires_grad_()
    held = ours * 1.0
    probs = scaled_causal_alibi_softmax(held, 0.3, slopes, documents=documents)
    assert probs.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
    torch.testing.assert_close(probs, expected, rtol=1e-13, atol=1e-15)
    (probs * weight.clone()).sum().backward()
    torch.testing.assert_close(ours.grad, leaf.grad, rtol=1e-12, atol=1e-14)


def test_gradient_equals_finite_differences():
    scores, slopes = drawn(1, 2, 4, 6), torch.tensor(alibi_slopes(2), dtype=torch.float64)
    weight = drawn(1, 2, 4, 6, seed=2)

    def value(x: Tensor) -> Tensor:
        return (scaled_causal_alibi_softmax(x * 1.0, 0.7, slopes) * weight).sum()

    leaf = scores.clone().requires_grad_()
    value(leaf).backward()
    for i in range(scores.numel()):
        step = torch.zeros(scores.numel(), dtype=torch.float64)
        step[i] = 1e-6
        step = step.view(scores.shape)
        slope = (value(scores + step) - value(scores - step)) / 2e-6
        assert leaf.grad is not None and leaf.grad.view(-1)[i].item() == pytest.approx(slope.item(), abs=1e-8)


def test_scores_that_are_a_view_and_gradients_that_are_shared():
    x = drawn(2, 3, 5, 5)
    outside = drawn(2, 3, 5, 5, seed=3).requires_grad_()
    leaf = x.clone().requires_grad_()
    scores = (leaf.view(6, 5, 5) * 1.0).view(2, 3, 5, 5)
    # An addition hands the same gradient tensor to both of its inputs: the softmax must not write over it.
    (scaled_causal_alibi_softmax(scores, 1.0, None) + outside).square().sum().backward()
    other, reference = outside.detach().clone().requires_grad_(), x.clone().requires_grad_()
    (dense(reference, 1.0, None, None) + other).square().sum().backward()
    torch.testing.assert_close(leaf.grad, reference.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(outside.grad, other.grad, rtol=1e-13, atol=1e-15)


def test_a_second_backward_is_refused():
    leaf = drawn(1, 1, 4, 4).requires_grad_()
    loss = scaled_causal_alibi_softmax(leaf * 1.0, 1.0, None).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_is_computed_in_fp32(dtype):
    """One rounding of the fp64 result, with scores near 16-bit's coarse end and long ALiBi distances."""
    scores, slopes = drawn(1, 4, 300, 300, dtype=dtype) * 8, torch.tensor(alibi_slopes(4))
    expected = dense(scores.double(), 0.125, slopes.double(), None)
    leaf = scores.clone().requires_grad_()
    probs = scaled_causal_alibi_softmax(leaf * 1.0, 0.125, slopes)
    assert probs.dtype == dtype
    torch.testing.assert_close(probs.double(), expected.to(dtype).double(), rtol=torch.finfo(dtype).eps, atol=1e-6)
    probs.backward(torch.ones_like(probs))
    assert leaf.grad is not None and leaf.grad.dtype == dtype


def test_the_same_bits_every_time_and_for_any_company():
    scores = drawn(2, 4, 33, 33, dtype=torch.float32)
    slopes = torch.tensor(alibi_slopes(4))
    whole = scaled_causal_alibi_softmax(scores.clone(), 0.2, slopes)
    assert torch.equal(whole, scaled_causal_alibi_softmax(scores.clone(), 0.2, slopes))
    part = scaled_causal_alibi_softmax(scores[:, 2:].clone(), 0.2, slopes[2:])
    assert torch.equal(whole[:, 2:], part)


def test_cached_generation_sees_what_the_whole_pass_saw():
    scores, slopes = drawn(1, 2, 9, 9), torch.tensor(alibi_slopes(2), dtype=torch.float64)
    whole = scaled_causal_alibi_softmax(scores.clone(), 1.0, slopes)
    last = scaled_causal_alibi_softmax(scores[:, :, -2:].clone(), 1.0, slopes)
    torch.testing.assert_close(last, whole[:, :, -2:], rtol=1e-14, atol=0)
