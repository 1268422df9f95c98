"""Which ranges the optimizer updates by one call: all of them, or a bucket's where its gather starts after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fused_ops.adam import AdamRange
from megazero.mpu.axes import Axes
from megazero.zero import optimizer
from tests.ranks import run_ranks
from tests.zero.toy import Case, build


def order(rank: int, case: Case) -> tuple[list[str], int]:
    """What a step does: "update N" for a call of Adam with N ranges, "gather I" for the launch of bucket I; and the
    number of buckets.
    """
    here, done = build(case), list[str]()
    update, gather = optimizer.ADAM["megazero"], here.state.gatherer.gather

    def counted(ranges: Sequence[AdamRange], **numbers: Any) -> None:
        done.append(f"update {len(ranges)}")
        update(ranges, **numbers)

    def launch(index: int) -> None:
        done.append(f"gather {index}")
        gather(index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(optimizer.ADAM, "megazero", counted)
        patch.setattr(here.state.gatherer, "gather", launch)
        here.step(0)
    return done, len(here.state.buckets)


def test_where_nothing_is_gathered_all_ranges_are_one_call() -> None:
    done, buckets = order(0, Case(precision="bf16"))
    assert buckets > 2 and len(done) == 1
    assert buckets < int(done[0].split()[1]) <= 2 * buckets  # nearly every bucket has parameters that do not decay


def test_a_bucket_is_gathered_before_the_next_is_updated() -> None:
    for done, buckets in run_ranks(2, order, Case(Axes(dp=2), 1, precision="bf16")):
        assert len(done) == 2 * buckets > 4 and [word.split()[0] for word in done] == ["update", "gather"] * (
            len(done) // 2
        )
        assert {int(word.split()[1]) for word in done[::2]} <= {0, 1, 2}
