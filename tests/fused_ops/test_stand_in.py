"""Ops on the meta device in the place of a CPU or of a card."""

from __future__ import annotations

import pytest
import torch

from fused_ops.attention.sdpa import joined
from fused_ops.blocks import row_blocks
from fused_ops.native.library import kernels, kernels_on, matrix_kernels
from fused_ops.native.stand_in import kind_of, standing_for

META = torch.device("meta")


def test_meta_stands_for_a_kind_within_the_block_only() -> None:
    x = torch.empty(3, device=META)
    assert kind_of(META) == "meta" and kernels(x) is None and matrix_kernels(x) is None
    with standing_for("cuda"):
        library = kernels(x)
        assert library is not None and library.on_device and kind_of(META) == "cuda" and matrix_kernels(x) is None
        assert kind_of(torch.device("cpu")) == "cpu"
    with standing_for("cpu"):
        library = kernels(x)
        assert library is not None and not library.on_device and matrix_kernels(x) is library
        assert kernels(x.double()) is None, "there is none for fp64 on any device"
        library.call("no_such_kernel", x, None, 3, (1, x))
    assert kernels_on(META) is None


@pytest.mark.parametrize(("rows", "starts"), [(5, [0]), (400_000, [0, 1])])
def test_blocks_of_rows_are_two_at_most_on_meta(rows: int, starts: list[int]) -> None:
    wide = torch.empty(rows, 1000, device=META)
    with standing_for("cpu"):
        blocks = list(row_blocks(wide, rows, 1000))
    size = blocks[0].stop
    assert [block.start for block in blocks] == [size * start for start in starts]
    assert len(list(row_blocks(torch.empty(0), 400_000, 1000))) == -(-400_000 // size)


@pytest.mark.parametrize("samples", [1, 3])
def test_a_context_by_samples_is_joined_without_a_copy(samples: int) -> None:
    """torch's memory-efficient body writes [b, s, n, d]."""
    context = torch.empty(samples, 7, 4, 8).permute(0, 2, 1, 3)
    whole = joined(context)
    assert whole.shape == (7, samples, 32)
    assert whole.untyped_storage().data_ptr() == context.untyped_storage().data_ptr()
