"""The sharded optimizer by apex: a stand-in for its extension trains as our own step does, and a poisoned step changes
nothing.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megazero.zero.optimizer import ShardedOptimizer
from megazero.zero.sharding import Column
from tests.fused_ops.test_apex import multi_tensor_adam_capturable
from tests.parameters import assemble
from tests.zero.toy import Case, Rank, build, configs


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []

    def counted(*arguments: object) -> None:
        made.append(1)
        multi_tensor_adam_capturable(*arguments)  # type: ignore[arg-type]

    monkeypatch.setitem(sys.modules, "amp_C", SimpleNamespace(multi_tensor_adam_capturable=counted))
    return made


def by_apex(case: Case) -> Rank:
    rank = build(case)
    cfg, _ = configs(case)
    rank.optimizer = ShardedOptimizer(rank.state, replace(cfg, optimizer_impl="apex"), rank.grid)
    return rank


@pytest.mark.parametrize(
    "case", [Case(precision="bf16"), Case(precision="fp32", optimizer="adam", zero_stage=1)], ids=["bf16", "fp32"]
)
def test_it_trains_as_our_own(case: Case, calls: list[int]) -> None:
    ours, theirs = build(case), by_apex(case)
    for number in range(6):
        torch.testing.assert_close(theirs.step(number), ours.step(number), rtol=1e-3, atol=0.0)
    assert len(calls) >= 6
    found, expected = (assemble([rank.values()]) for rank in (theirs, ours))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-2 if case.precision == "bf16" else 1e-4, atol=1e-4)


def test_a_poisoned_step_leaves_every_bit(calls: list[int]) -> None:
    rank = by_apex(Case(precision="bf16"))
    rank.step(0)
    columns = [rank.state.columns[c] for c in (Column.PARAMETER, Column.MASTER, Column.EXP_AVG, Column.EXP_AVG_SQ)]
    tensors = [column.held(index) for column in columns for index in range(len(rank.state.buckets))]
    before = [tensor.clone() for tensor in tensors]
    rank.backward(1)
    rank.state.columns[Column.GRADIENT].held(0)[1] = torch.nan
    norm = rank.norm()
    rank.update(0.05, 1 / norm, ~torch.isfinite(norm))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert rank.optimizer.step_count == 1
