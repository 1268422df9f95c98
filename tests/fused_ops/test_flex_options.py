"""Options of torch's FlexAttention kernel hold for the lists of blocks of one document, and not for several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

from fused_ops.attention import flex
from fused_ops.attention.flex import BLOCK, CONTIGUOUS, flex_attention, kernel_options, visible_blocks

CPU = torch.device("cpu")


def contiguous(counts: Tensor, indices: Tensor) -> bool:
    """Whether each list counts up by one, so that its first entry tells all."""
    slot = torch.arange(indices.shape[-1])
    counted = indices[..., :1] + slot == indices
    return bool((counted | (slot >= counts[..., None])).all())


@pytest.mark.parametrize("length", [1, 100, BLOCK, BLOCK + 1, 2 * BLOCK, 300, 640, 1000])
def test_options_of_the_kernel_hold_for_one_document(length: int) -> None:
    """In forward and backward."""
    lists = visible_blocks(length, None, CPU)
    chosen = kernel_options(length, documents=False)
    assert (CONTIGUOUS in chosen) == (length % BLOCK == 0)
    if chosen:
        assert all(contiguous(counts, indices) for counts, indices in zip(lists[::2], lists[1::2], strict=True))


def test_they_do_not_hold_for_several() -> None:
    """The block in which a document begins and the diagonal one: a jump."""
    documents = (torch.arange(640) >= 100).long()[None] + (torch.arange(640) >= 600).long()
    lists = visible_blocks(640, documents, CPU)
    assert not contiguous(lists[0], lists[1])
    assert kernel_options(640, documents=True) == ()


def test_a_block_that_the_sequence_does_not_fill_is_a_jump() -> None:
    lists = visible_blocks(300, None, CPU)
    assert [contiguous(*pair) for pair in zip(lists[::2], lists[1::2], strict=True)] == [True, True, False, True]


@pytest.mark.slow
def test_they_are_set_for_one_document_only(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, bool]] = []
    original: Any = torchs.flex_attention

    def noted(*arguments: Any, kernel_options: dict[str, bool], **named: Any) -> Any:
        given.append(kernel_options)
        return original(*arguments, kernel_options=kernel_options, **named)

    monkeypatch.setattr(torchs, "flex_attention", noted)
    monkeypatch.setattr(flex, "compiled_for", lambda function, *signature: function)
    for length, documents in ((130, None), (256, None), (256, (torch.arange(256) > 40).long()[None])):
        mixed = torch.randn(length, 1, 2 * 3 * 16, generator=torch.Generator().manual_seed(1))
        flex_attention(mixed, 2, 1, 16, scale=0.25, slopes=None, documents=documents)
    assert given == [{}, {CONTIGUOUS: True}, {}]
