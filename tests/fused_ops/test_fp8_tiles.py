"""Tiles of FP8 copies in shared memory: every byte arrives by columns, and no bank is asked twice at once."""

from __future__ import annotations

import re

import pytest
import torch

from fused_ops import fp8
from fused_ops.native.compile import SOURCES
from fused_ops.native.library import kernels_on
from tests.fused_ops.levels import cuda_level, drawn, integers

pytestmark = pytest.mark.sampled

__all__ = ["cuda_level"]

SHAPES = [(1, 1), (16, 16), (128, 128), (144, 272), (130, 48), (48, 130), (37, 41), (256, 129)]


@pytest.mark.parametrize("offset", [0, 1, 16])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_bytes_are_transposed(cuda_level, rows, columns, offset):
    memory = integers(0, 256, (rows * columns + offset,)).to(torch.uint8)
    values = memory[offset:].view(rows, columns)
    found = fp8.transpose(values)
    assert found.is_contiguous() and torch.equal(found, values.t())
    assert torch.equal(fp8.transpose(values.view(fp8.E4M3)).view(torch.uint8), values.t())


def test_what_is_not_contiguous_is_transposed_by_torch(cuda_level, monkeypatch):
    values = integers(0, 256, (32, 64)).to(torch.uint8)[:, ::2]
    found = kernels_on(values.device)
    assert found is not None
    monkeypatch.setattr(found, "call", None)
    assert torch.equal(fp8.transpose(values), values.t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_both_copies_of_a_cast_are_one_matrix(cuda_level, rows, columns, dtype):
    x = drawn(rows, columns, dtype=dtype)
    for scale in (None, torch.tensor(4.0)):
        into = fp8.empty(x, fp8.E4M3, True)
        fp8.fill("input", x, into, scale=scale)
        assert into.transposed is not None
        assert torch.equal(into.transposed.view(torch.uint8), into.values.view(torch.uint8).t())


def banks(words: list[int]) -> int:
    """How many turns 32 threads take that each read one word of shared memory."""
    return max(len({word for word in words if word % 32 == bank}) for bank in range(32))


@pytest.mark.parametrize("warp", range(8))
def test_a_warp_reads_32_banks(warp):
    """By the formula of the kernel: a thread reads four columns of sixteen rows, word by word."""
    found = re.search(
        r"int place\(int row, int word\) \{ return ([^;]+); \}", (SOURCES / "cuda" / "fp8.cu").read_text()
    )
    assert found is not None
    formula = found[1].replace("/", "//")  # numbers that are not negative
    threads = range(32 * warp, 32 * warp + 32)
    places = [(thread % 8 * 16, thread // 8) for thread in threads]
    exchanged = [row * 32 + eval(formula, {"row": row, "word": word, "RUN": 16}) for row, word in places]
    assert banks(exchanged) == 1 and banks([row * 32 + word for row, word in places]) == 8
