"""What computes the next token: products of few rows, and attention on a cache, on every level of instruction set,
against float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_ops.attention.cached import cached_attention, store_keys_values
from fused_ops.attention.reference import reference_attention
from fused_ops.graph import apply_or_forward
from fused_ops.linear import FEW, linear
from fused_ops.softmax import alibi_slopes
from tests.fused_ops.levels import (
    CPU_LEVELS,
    DTYPES,
    assert_close,
    cpu_level,
    drawn,
    same_kind,
    surrounded,
    the_same_for_any_threads,
)

pytestmark = pytest.mark.sampled

__all__ = ["cpu_level"]


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_products_of_few_rows(cpu_level: str, dtype: torch.dtype, with_bias: bool) -> None:
    """Every number of rows up to the limit and beyond it; widths that fill no vector; outputs that fill no block."""
    for k, n in ((1, 1), (31, 3), (32, 7), (33, 8), (64, 17), (200, 40)):
        weight, bias = drawn(n, k, dtype=dtype, seed=2), drawn(n, dtype=dtype, seed=3) if with_bias else None
        for rows in (*range(1, FEW + 1), FEW + 1):
            x = drawn(rows, k, dtype=dtype, seed=rows)
            exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
            found = linear(x.view(rows, 1, k), weight, bias)
            assert found.shape == (rows, 1, n) and found.dtype == dtype
            assert_close(found.view(rows, n), exact, slack=2, size=k**0.5 * 4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_each_other_or_on_threads(dtype: torch.dtype) -> None:
    x, weight = drawn(FEW, 300, dtype=dtype), drawn(2000, 300, dtype=dtype, seed=2)
    together = linear(x, weight, None)
    for count in range(1, FEW + 1):
        assert torch.equal(linear(x[:count], weight, None), together[:count])
    the_same_for_any_threads(lambda: [linear(x, weight, None)])


@torch.no_grad()
def test_what_is_not_finite_arrives(cpu_level: str) -> None:
    x, weight = drawn(3, 40, dtype=torch.float32), drawn(9, 40, dtype=torch.float32, seed=2)
    x[1, 35], weight[4, 2] = torch.nan, torch.inf
    assert same_kind(linear(x, weight, None), x @ weight.t())


def test_gradients_are_autograds() -> None:
    """Where gradients are recorded the kernel is no part of the graph."""
    x, weight = (
        drawn(2, 5, dtype=torch.float32).requires_grad_(),
        drawn(3, 5, dtype=torch.float32, seed=2).requires_grad_(),
    )
    linear(x, weight, None).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, weight.detach().sum(0).expand(2, 5))


class Kept:
    """Rows of different lengths in slots 0, 1, 3 of a cache, whose next tokens are then computed; NaN where nobody may
    look.
    """

    def __init__(self, groups: int, repeats: int, head_dim: int, dtype: torch.dtype) -> None:
        self.heads = groups, repeats, head_dim
        self.starts, self.count, self.slots = torch.tensor([5, 17, 1]), 3, torch.tensor([0, 1, 3])
        self.whole = drawn(20, 3, groups * (repeats + 2) * head_dim, dtype=dtype)
        self.keys, self.values = (torch.full((4, groups, 24, head_dim), torch.nan, dtype=dtype) for _ in range(2))
        for row, start in enumerate(self.starts.tolist()):
            store_keys_values(
                self.whole[:start, row : row + 1], self.keys, self.values, self.slots[row : row + 1], *self.heads
            )

    def new(self) -> Tensor:
        """The projection of the new tokens, [count, 3, ...]."""
        places = self.starts + torch.arange(self.count).unsqueeze(1)
        return self.whole[places, torch.arange(3)]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("alibi", [True, False])
@pytest.mark.parametrize(
    "heads", [(1, 1, 1), (2, 3, 20), (3, 1, 64), (1, 4, 33), (2, 2, 14), (1, 2, 72), (2, 1, 80), (1, 3, 96)], ids=str
)
def test_attention_on_a_cache(cpu_level: str, heads: tuple[int, int, int], alibi: bool, dtype: torch.dtype) -> None:
    """As attention over the whole row computes it, in float64; the cache then holds the new tokens too."""
    kept = Kept(*heads, dtype)
    groups, repeats, head_dim = heads
    slopes = (
        torch.tensor(alibi_slopes(groups * repeats), dtype=torch.promote_types(dtype, torch.float32)) if alibi else None
    )
    if dtype == torch.float64:  # the specification multiplies with zero what lies beyond
        kept.keys.nan_to_num_(), kept.values.nan_to_num_()
    positions = kept.starts, 20
    found = cached_attention(
        surrounded(kept.new()),
        kept.keys,
        kept.values,
        kept.slots,
        *positions,
        *heads,
        scale=head_dim**-0.5,
        slopes=slopes,
    )
    exact = reference_attention(
        kept.whole.double(),
        *heads,
        scale=head_dim**-0.5,
        slopes=None if slopes is None else slopes.double(),
        documents=None,
    )
    places = kept.starts + torch.arange(kept.count).unsqueeze(1)
    assert_close(found, exact[places, torch.arange(3)], slack=2, size=4)
    for row, (slot, start) in enumerate(zip(kept.slots.tolist(), kept.starts.tolist(), strict=True)):
        held = kept.whole[: start + kept.count, row].view(-1, groups, repeats + 2, head_dim)
        assert torch.equal(kept.keys[slot, :, : start + kept.count], held[:, :, repeats].transpose(0, 1))
        assert torch.equal(kept.values[slot, :, : start + kept.count], held[:, :, repeats + 1].transpose(0, 1))


@torch.no_grad()
def test_scores_of_any_size() -> None:
    """A key that outweighs all others by more than fp32's exponents hold, and one with the smallest weight there is."""
    kept = Kept(1, 1, 16, torch.float32)
    kept.whole[:, :, :32] *= 40
    kept = _again(kept)
    found = cached_attention(
        kept.new(), kept.keys, kept.values, kept.slots, kept.starts, 20, *kept.heads, scale=1.0, slopes=None
    )
    exact = reference_attention(kept.whole.double(), *kept.heads, scale=1.0, slopes=None, documents=None)
    places = kept.starts + torch.arange(kept.count).unsqueeze(1)
    assert torch.isfinite(found).all()
    # Scores are some thousands: their rounding in fp32 is what the weights are off by.
    assert (found.double() - exact[places, torch.arange(3)]).abs().max() < 0.02


def _again(kept: Kept) -> Kept:
    for row, start in enumerate(kept.starts.tolist()):
        store_keys_values(
            kept.whole[:start, row : row + 1], kept.keys, kept.values, kept.slots[row : row + 1], *kept.heads
        )
    return kept


def test_a_forward_without_autograd_is_the_same() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.wanted = any(ctx.needs_input_grad)
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    x = torch.ones(3, requires_grad=True)
    apply_or_forward(Doubled, x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2, 2]
    with torch.no_grad():
        assert apply_or_forward(Doubled, x).tolist() == [2, 2, 2]


def test_there_are_levels() -> None:
    assert CPU_LEVELS
