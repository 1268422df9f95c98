"""Modules that several units share, on one stage or on the first and the last, beside plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megazero
from tests.own.models import Batch, Case, Trained, plainly_trained
from tests.own.training import RULE, require_equal, trained_with
from tests.ranks import config_error, run_ranks

WIDE = 6
ENDS: tuple[tuple[str, str], ...] = (("ab", "ab"), ("ab", "ba"), ("cab", "bca"), ("aab", "ba"), ("a", "aaa"))
"""Modules by letters on the first stage and on the last one."""
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"zero_stage": 1, "bucket_size": 50},
    {"zero_stage": 2, "recompute_granularity": "full", "late_update": True},
    {"zero_stage": 3},
    {"zero_stage": 3, "zero3_persist_below": 0, "offload_optimizer": "cpu"},
)


class Begin(nn.Module):
    def forward(self, batch: Batch) -> Tensor:
        return batch["x"]


class Added(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


def shared(first: str, last: str) -> list[nn.Module]:
    torch.manual_seed(3)
    linears = {letter: nn.Linear(WIDE, WIDE) for letter in sorted({*first, *last})}
    units = [Begin(), *(Added(linears[letter]) for letter in first), Added(nn.Linear(WIDE, WIDE))]
    units += [Added(nn.Linear(WIDE, WIDE)), *(Added(linears[letter]) for letter in last), nn.Linear(WIDE, 1)]
    return [unit.double() for unit in units]


def loss(made: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return (made.squeeze(1) - batch["y"]).square().sum(), len(made)


def micro_batch(draw: torch.Generator) -> Batch:
    x = torch.randn(4, WIDE, generator=draw, dtype=torch.float64)
    return {"x": x, "y": x.sum(1).sin()}


def case_of(first: str, last: str) -> Case:
    return Case(lambda: shared(first, last), loss, micro_batch, steps=4, micro_batches=2)


def trained(rank: int, ends: tuple[str, str], layouts: list[dict[str, Any]]) -> list[Trained]:
    halves = [2 + len(ends[0]), 2 + len(ends[1])]
    return [trained_with(case_of(*ends), {**RULE, "pp": 2, "partition": halves, **layout}) for layout in layouts]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("ends", ENDS, ids="-".join)
def test_both_stages_add_up_the_same_parameters(ends: tuple[str, str], size: int) -> None:
    """In whatever order the stages use them, and however often."""
    expected = plainly_trained(case_of(*ends))
    for ranks in run_ranks(size, trained, ends, list(LAYOUTS)):
        for layout, made in zip(LAYOUTS, ranks, strict=True):
            require_equal(made, expected, str(layout))


def in_chunks(rank: int) -> str:
    """a is in the first chunk of all and in the last, b in the two between: each on both stages."""
    torch.manual_seed(3)
    a, b = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
    model = megazero.Model([Begin(), Added(a), Added(b), Added(b), Added(a), nn.Linear(WIDE, 1)], loss)
    run = {"pp": 2, "virtual_stages": 2, "partition": [2, 1, 1, 2]}
    return config_error(lambda: megazero.engine(model, run=run))


def test_shared_modules_in_other_chunks_of_a_stage_are_named() -> None:
    told = "parameters 1.linear.weight and 2.linear.weight are on the first stage and the last in other model chunks"
    for words in run_ranks(2, in_chunks):
        assert told in words
