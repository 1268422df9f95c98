"""A cache of as many positions as a window or a chunk has, against dense masks over the whole rows in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_ops.attention.cached import cached_attention, store_keys_values
from fused_ops.attention.reach import EVERYTHING, Reach
from fused_ops.native.library import kernels
from fused_ops.softmax import alibi_slopes
from tests.fused_ops.levels import DTYPES, cpu_level, drawn
from tests.fused_ops.test_attention_reach import ALLOWED, dense

__all__ = ["cpu_level"]
STARTS, PADDED, COUNTS, LONGEST = (3, 17, 9), 20, (1, 4, 1, 1, 2), 26
"""Lengths of the prompts, to what they are padded, numbers of the tokens that follow, length of the longest row."""


def generated(
    whole: Tensor, heads: tuple[int, int, int], reach: Reach, starts: tuple[int, ...] = STARTS, **options: Any
) -> Tensor:
    """The context of the tokens that follow the prompts of rows [s, b, ...], each after the other; NaN is in padding
    and wherever nothing was stored.
    """
    dtype, slots, lengths = whole.dtype, torch.tensor([0, 1, 3]), torch.tensor(starts)
    room = 2 + (LONGEST if reach.width is None else min(LONGEST, reach.width))  # two places that nobody may read
    empty = 0.0 if kernels(whole) is None else torch.nan  # the specification multiplies with zero what lies beyond
    keys, values = (torch.full((4, heads[0], room, heads[2]), empty, dtype=dtype) for _ in range(2))
    prompts = whole[:PADDED].clone()
    for row, start in enumerate(starts):
        prompts[start:, row] = empty
    store_keys_values(prompts, keys, values, slots, *heads, reach=reach, lengths=lengths)
    found, rows = [], torch.arange(3)
    for count in COUNTS:
        new = whole[lengths + torch.arange(count).unsqueeze(1), rows]
        end = int(lengths.max()) + count
        found.append(cached_attention(new, keys, values, slots, lengths, end, *heads, **options, reach=reach))
        lengths = lengths + count
    return torch.cat(found)


def check(
    dtype: torch.dtype, heads: tuple[int, int, int], reach: Reach, *, cap: float | None, sloped: bool = True
) -> None:
    groups, repeats, head_dim = heads
    whole = drawn(LONGEST, 3, groups * (repeats + 2) * head_dim, dtype=dtype)
    slopes = torch.tensor(alibi_slopes(groups * repeats)).double() if sloped else None
    options: dict[str, Any] = {"scale": 0.7, "cap": cap, "slopes": slopes}
    exact = dense(whole.double(), *heads, documents=None, reach=reach, **options)
    if slopes is not None and dtype != torch.float64:
        options["slopes"] = slopes.float()
    found = generated(whole, heads, reach, **options)
    places = torch.tensor(STARTS) + torch.arange(sum(COUNTS)).unsqueeze(1)
    error = found.double() - exact[places, torch.arange(3)]
    assert error.norm() <= ALLOWED[dtype] * exact.norm()


REACHES = [
    EVERYTHING,
    *(Reach(width) for width in (1, 2, 5, 16, 20, 100)),
    *(Reach(chunk=width) for width in (1, 5, 18, 100)),
]


@torch.no_grad()
@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_a_cache_of_a_window_equals_the_whole_row(reach: Reach) -> None:
    for dtype in (*DTYPES, torch.float64):
        for cap, sloped in ((None, True), (2.0, True), (1.5, False)):
            check(dtype, (2, 2, 20), reach, cap=cap, sloped=sloped)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reach", [Reach(5), Reach(chunk=5), EVERYTHING], ids=str)
def test_on_every_level(cpu_level: str, reach: Reach, dtype: torch.dtype) -> None:
    check(dtype, (1, 3, 33), reach, cap=2.0)


@torch.no_grad()
def test_a_prompt_that_is_longer_than_the_window_leaves_its_end() -> None:
    """Position p at place p % 4: of 6 and of 3 tokens, the last 4 and all 3."""
    heads, width = (1, 1, 1), 4
    mixed = torch.arange(8).view(8, 1, 1) * 10 + torch.tensor([[[0.0, 1.0, 2.0]]])
    mixed = mixed.expand(8, 2, 3).clone()
    keys, values = torch.full((3, 1, width, 1), -1.0), torch.full((3, 1, width, 1), -1.0)
    slots, lengths = torch.tensor([0, 2]), torch.tensor([6, 3])
    store_keys_values(mixed, keys, values, slots, *heads, reach=Reach(width), lengths=lengths)
    assert keys[0].flatten().tolist() == [41, 51, 21, 31] and values[0].flatten().tolist() == [42, 52, 22, 32]
    assert keys[2, 0, :3].flatten().tolist() == [1, 11, 21] and (keys[1] == -1).all()
    store_keys_values(mixed, keys, values, slots, *heads, reach=Reach(chunk=width))
    assert keys[2].flatten().tolist() == [41, 51, 61, 71], "without lengths the rows are whole"
