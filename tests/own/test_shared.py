"""Modules that several units share, on whatever stages, beside plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.own.models import Batch, Case, Trained, plainly_trained
from tests.own.training import RULE, require_equal, trained_with
from tests.ranks import run_ranks

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
    """Its layer has two names in it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = self.same = linear

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


SPREAD: dict[str, tuple[int, str, dict[str, Any]]] = {
    "neighbours": (3, "-a-ab-b", {"pp": 3, "partition": [3, 2, 4]}),
    "the first two": (3, "ab-ab--", {"pp": 3, "partition": [3, 3, 3], "zero_stage": 1, "late_update": True}),
    "the last two": (3, "--a-aba", {"pp": 3, "partition": [2, 2, 5], "pipeline_schedule": "zb-h1"}),
    "all": (3, "abcabca", {"pp": 3, "partition": [3, 3, 3], "recompute_granularity": "full"}),
    "several": (3, "a-abb-b", {"pp": 3, "partition": [2, 3, 4], "bucket_size": 40}),
    "sharded": (6, "a-aba-b", {"pp": 3, "partition": [2, 3, 4], "zero_stage": 3, "zero3_persist_below": 0}),
    "off the device": (3, "a-abb-b", {"pp": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}),
    "chunks": (2, "abba", {"pp": 2, "virtual_stages": 2, "partition": [2, 1, 1, 2]}),
    "chunks of one": (2, "abab-", {"pp": 2, "virtual_stages": 2, "partition": [1, 3, 1, 2], "zero_stage": 2}),
    "a turn": (2, "aba-b", {"pp": 2, "virtual_stages": 2, "pipeline_schedule": "zb-v", "partition": [2, 2, 1, 2]}),
}
"""Ranks, modules by letters from the first unit to the last ("-": one of its own), and a layout."""


def spread(letters: str) -> list[nn.Module]:
    torch.manual_seed(3)
    linears = {letter: nn.Linear(WIDE, WIDE) for letter in sorted({*letters} - {"-"})}
    made = [Added(nn.Linear(WIDE, WIDE) if letter == "-" else linears[letter]) for letter in letters]
    return [unit.double() for unit in (Begin(), *made, nn.Linear(WIDE, 1))]


def spread_case(letters: str) -> Case:
    return Case(lambda: spread(letters), loss, micro_batch, steps=4, micro_batches=4)


def trained_over(rank: int, name: str) -> Trained:
    _, letters, layout = SPREAD[name]
    return trained_with(spread_case(letters), {**RULE, **layout})


@pytest.mark.parametrize("name", SPREAD)
def test_any_stages_share_parameters(name: str) -> None:
    """Stages in the middle, several pairs of them, and several chunks of a stage."""
    size, letters, _ = SPREAD[name]
    expected = plainly_trained(spread_case(letters))
    for made in run_ranks(size, trained_over, name):
        require_equal(made, expected, name)
