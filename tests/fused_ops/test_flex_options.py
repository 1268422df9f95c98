"""Options of torch's FlexAttention kernel hold for the lists of blocks of one document, and not for several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

from fused_ops.attention import flex
from fused_ops.attention.flex import BLOCK, CONTIGUOUS, SAFE, flex_attention, kernel_options, visible_blocks

CPU = torch.device("cpu")


def contiguous(counts: Tensor, indices: Tensor) -> bool:
    """Whether each list counts up by one, so that its first entry tells all."""
    slot = torch.arange(indices.shape[-1])
    counted = indices[..., :1] + slot == indices
    return bool((counted | (slot >= counts[..., None])).all())


def never_infinite(length: int, documents: Tensor | None, part: int) -> bool:
    """Whether each row's maximum is finite after the first `part` keys that torch's kernel takes: those at the start of
    the first partly visible block (of the lists, these come first).
    """
    counts, indices = visible_blocks(length, documents, CPU)[:2]
    rows = torch.arange(length)
    assert (counts > 0).all()
    keys = indices[:, 0, rows // BLOCK, 0, None].long() * BLOCK + torch.arange(part)
    seen = (keys <= rows[:, None]) & (keys < length)
    if documents is not None:
        at = keys.clamp(max=length - 1)
        seen &= documents.gather(1, at.flatten(1)).view_as(at) == documents[:, rows, None]
    return bool(seen.any(-1).all())


@pytest.mark.parametrize("length", [1, 100, BLOCK, BLOCK + 1, 2 * BLOCK, 300, 640, 1000])
def test_options_of_the_kernel_hold_for_one_document(length: int) -> None:
    """In forward and backward, and for every size of the parts into which the kernel cuts a block."""
    lists = visible_blocks(length, None, CPU)
    chosen = kernel_options(length, documents=False)
    if CONTIGUOUS in chosen:
        assert all(contiguous(counts, indices) for counts, indices in zip(lists[::2], lists[1::2], strict=True))
    assert SAFE in chosen and (CONTIGUOUS in chosen) == (length % BLOCK == 0)
    assert all(never_infinite(length, None, part) for part in (16, 32, 64, 128))


def test_they_do_not_hold_for_several() -> None:
    """A block that the beginning of a document and the diagonal share with others: jumps, and rows that see nothing."""
    documents = (torch.arange(640) >= 100).long()[None] + (torch.arange(640) >= 600).long()
    lists = visible_blocks(640, documents, CPU)
    assert not contiguous(lists[0], lists[1])
    assert not never_infinite(640, documents, 64)
    assert kernel_options(640, documents=True) == ()


def test_a_block_that_the_sequence_does_not_fill_is_a_jump() -> None:
    lists = visible_blocks(300, None, CPU)
    assert [contiguous(*pair) for pair in zip(lists[::2], lists[1::2], strict=True)] == [True, True, False, True]


def test_they_are_set_for_one_document_only(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, bool]] = []
    original: Any = torchs.flex_attention

    def noted(*arguments: Any, kernel_options: dict[str, bool], **named: Any) -> Any:
        given.append(kernel_options)
        return original(*arguments, kernel_options=kernel_options, **named)

    monkeypatch.setattr(torchs, "flex_attention", noted)
    monkeypatch.setattr(flex, "_compiled", lambda function: function)
    for length, documents in ((130, None), (256, None), (256, (torch.arange(256) > 40).long()[None])):
        mixed = torch.randn(length, 1, 2 * 3 * 16, generator=torch.Generator().manual_seed(1))
        flex_attention(mixed, 2, 1, 16, scale=0.25, slopes=None, documents=documents)
    assert given == [{SAFE: True}, {CONTIGUOUS: True, SAFE: True}, {}]
