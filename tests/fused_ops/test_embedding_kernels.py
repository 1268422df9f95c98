"""The CUDA kernel of the embedding's gradient: tokens of one id are summed in pieces, in an order that the ids fix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_ops.embedding import embedding, embedding_gradient
from tests.fused_ops.levels import DTYPES, assert_close, cuda_level, drawn, integers

pytestmark = pytest.mark.sampled

__all__ = ["cuda_level"]

PIECE = 64
"""Tokens of a piece, where there are up to 4,096."""


def summed_in_pieces(rows: Tensor, table: Tensor) -> Tensor:
    """table [h] plus the sum of each piece of rows [n, h], in fp32, one addition after the other."""
    for piece in rows.float().split(PIECE):
        total = torch.zeros_like(table)
        for row in piece:
            total = total + row
        table = table + total
    return table


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_that_is_half_of_all_is_summed_in_pieces(cuda_level, dtype):
    """Its additions have the order of pieces, to the bit: they were one block's work before."""
    tokens, rows, h, frequent = 4096, 500, 24, 0
    ids = integers(0, rows, (tokens,))
    ids[integers(0, 2, (tokens,), seed=5) == 1] = frequent
    grad, table = drawn(tokens, h, seed=2, dtype=dtype), drawn(rows, h, dtype=torch.float32)
    assert tokens // 2 - 200 < int((ids == frequent).sum()) < tokens // 2 + 200
    exact = torch.zeros(rows, h, dtype=torch.float64).index_add(0, ids, grad.double())

    into = table.clone()
    embedding_gradient(ids, grad, into)
    assert_close(into, table.double() + exact)
    own = grad[ids == frequent]  # id 0 is the first after sorting, so its pieces begin with its first token
    assert torch.equal(into[frequent], summed_in_pieces(own, table[frequent]))
    if dtype == torch.float32:
        return
    weight = drawn(rows, h, dtype=dtype).requires_grad_()
    embedding(ids, weight).backward(grad)
    assert weight.grad is not None
    assert_close(weight.grad, exact)
    assert torch.equal(weight.grad[frequent], summed_in_pieces(own, torch.zeros(h)).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("h", [3, 16])
@pytest.mark.parametrize(
    "counts",
    [
        (10, 54, 64, 64, 1),  # runs that end where a piece ends
        (63, 2, 63, 200, 1, 1, 500, 3),  # over borders, over whole pieces, two borders in one piece
        (4, 4300, 9, 800),  # more than 4,096: longer pieces
    ],
)
def test_runs_that_cross_borders_of_pieces(cuda_level, counts, h, dtype):
    found = [torch.full((count,), index, dtype=torch.int64) for index, count in enumerate(counts)]
    ids = torch.cat(found)
    ids = ids[torch.randperm(len(ids), generator=torch.Generator("cpu").manual_seed(3), device="cpu").to(ids.device)]
    grad, into = drawn(len(ids), h, seed=2, dtype=dtype), drawn(len(counts) + 1, h, dtype=torch.float32)
    exact = into.double().index_add(0, ids, grad.double())
    before = into[-1].clone()
    embedding_gradient(ids, grad, into)
    assert_close(into, exact, slack=2)
    assert torch.equal(into[-1], before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_lookup_of_16_bits_does_not_ask_the_device_which_ids_occur(cuda_level, dtype, monkeypatch):
    """How many occur is known to the device only: torch.unique would wait for it, and no graph could hold it."""
    monkeypatch.setattr(torch, "unique", None)
    ids, weight = integers(0, 5, (300,)), drawn(7, 8, dtype=dtype).requires_grad_()
    grad = drawn(300, 8, seed=2, dtype=dtype)
    embedding(ids.view(3, 100), weight).backward(grad.view(3, 100, 8))
    assert weight.grad is not None and weight.grad.dtype == dtype
    assert_close(weight.grad, torch.zeros(7, 8, dtype=torch.float64).index_add(0, ids, grad.double()))
