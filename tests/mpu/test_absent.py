"""A group of ranks that are not there."""

from __future__ import annotations

import torch

from megazero.mpu.absent import absent_group
from megazero.mpu.collectives import all_gather, all_reduce, reduce_scatter
from megazero.mpu.functional import gather_sequence, reduce_from_tp, reduce_scatter_sequence


def test_collectives_leave_results_as_they_are() -> None:
    group = absent_group(4)
    assert (group.size, group.index) == (4, 0)
    x, whole, part = torch.arange(3.0), torch.full((12,), 5.0), torch.full((3,), 7.0)
    all_reduce(x, group).wait()
    all_gather(whole, x, group).wait()
    reduce_scatter(part, whole, group).wait()
    assert x.tolist() == [0.0, 1.0, 2.0] and whole.unique().tolist() == [5.0] and part.unique().tolist() == [7.0]


def test_shapes_are_those_of_a_group_with_ranks() -> None:
    group, x = absent_group(2), torch.empty(6, 3, device="meta")
    assert gather_sequence(x, group).shape == (12, 3)
    assert reduce_scatter_sequence(x, group).shape == (3, 3)
    assert reduce_from_tp(x, group).shape == (6, 3)
    assert gather_sequence(x, absent_group(1)) is x
