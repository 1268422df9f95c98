"""Every layout of the toy against one process in float64: first gradients, norms, and the weights after three steps."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from megazero.mpu.axes import Axes
from tests.parameters import assemble, worst_difference
from tests.ranks import run_ranks
from tests.stages import STAGES
from tests.zero.toy import Case, joined, reference, train_all, train_late


def train_on(axes: Axes, cases: list[Case]) -> Iterable[tuple[Case, list[dict[str, Any]]]]:
    """(case, results of all ranks) for cases that share a world."""
    ranks = run_ranks(axes.world_size, train_all, cases)
    return ((case, [results[i] for results in ranks]) for i, case in enumerate(cases))


def check(axes: Axes, cases: list[Case]) -> None:
    for case, ranks in train_on(axes, cases):
        expected = reference(case)
        gradients, fragments = (joined(rank[name] for rank in ranks) for name in ("gradients", "fragments"))
        assert worst_difference(gradients, expected["gradients"], floor=0.0)[0] < 1e-13, case
        for rank in ranks:
            torch.testing.assert_close(rank["norms"], expected["norms"], rtol=1e-12, atol=0.0, msg=str(case))
        for weights in (assemble(rank["weights"] for rank in ranks), fragments):
            assert worst_difference(weights, expected["weights"], floor=0.0)[0] < 1e-10, case


@pytest.mark.slow
@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_data_parallel(dp: int) -> None:
    """Seven micro-batches of twelve samples over four ranks are unequal, and some hold no sample at all."""
    check(Axes(dp=dp), [Case(Axes(dp=dp), stage, accumulation) for stage, accumulation in product(STAGES, (1, 3, 7))])


@pytest.mark.slow
@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("axes", [Axes(pp=2), Axes(pp=2, dp=2), Axes(pp=3, dp=2), Axes(pp=2, dp=3)], ids=str)
def test_fault_01_tied_embedding_is_summed_over_both_stages(axes: Axes) -> None:
    """MLM#844: the embedding's gradient is that of one process on every rank that owns a part of it.

    Middle ranks have none.
    """
    check(axes, [Case(axes, stage, accumulation=2, blocks=5) for stage in STAGES])


@pytest.mark.slow
@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("axes", [Axes(tp=2), Axes(tp=2, dp=2), Axes(pp=2, dp=2, tp=2), Axes(tp=3, dp=2)], ids=str)
def test_fault_08_partial_gradients_are_summed_over_tp(axes: Axes) -> None:
    """MLM#1446, NEOX#1259, #1281: sharded, replicated and (sequence parallel) partial parameters; tp 2 inside a world
    of 4 and 8.
    """
    check(
        axes, [Case(axes, stage, accumulation=3, partial=partial) for stage, partial in product(STAGES, (False, True))]
    )


@pytest.mark.slow
@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize(
    "axes",
    [
        *(Axes(dp=4, shard_size=1), Axes(dp=6, shard_size=3), Axes(dp=2, cp=2, shard_size=2)),
        *(Axes(tp=2, dp=2, shard_size=1), Axes(pp=2, dp=4, shard_size=2), Axes(pp=3, dp=2, shard_size=1)),
    ],
    ids=str,
)
def test_hybrid_shards(axes: Axes) -> None:
    """State sharded over some of the replicas: two halves of a reduction, and a tied embedding across both stages.

    Unused memory is poisoned, as in `test_fault_19_unused_memory_is_poisoned`.
    """
    shapes: list[dict[str, Any]] = [{"poison": True, "accumulation": 3}, {"virtual_stages": 2}, {"overlap": False}]
    some = shapes if axes.world_size < 6 else shapes[:1]
    check(axes, [Case(axes, stage, partial=axes.tp > 1, **shape) for stage, shape in product(STAGES, some)])


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("axes", [Axes(), Axes(dp=2), Axes(pp=2, dp=2)], ids=str)
def test_virtual_stages(axes: Axes) -> None:
    """At pp 1 two chunks share the embedding: gradients that arrive while another chunk is armed only accumulate."""
    check(axes, [Case(axes, stage, accumulation=3, virtual_stages=2) for stage in STAGES])


@pytest.mark.slow
def test_zero_2_reduces_once_where_the_schedule_says_so() -> None:
    check(Axes(dp=3), [Case(Axes(dp=3), 2, accumulation=3, reduce_every=False)])


@pytest.mark.slow
def test_other_optimizers() -> None:
    axes = Axes(dp=2)
    check(axes, [Case(axes, stage, optimizer=optimizer) for stage, optimizer in product(STAGES, ("adam", "sgd"))])


@pytest.mark.slow
def test_bucket_sizes() -> None:
    """One parameter a bucket, and all in one; neither divides by 4."""
    axes = Axes(dp=4)
    sizes = product(STAGES, (1, 100_000))
    check(axes, [Case(axes, stage, accumulation=2, bucket_size=size, tied=False) for stage, size in sizes])


@pytest.mark.slow
@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize(
    ("carrier", "axes"),
    [("gloo", Axes(pp=2, dp=2)), ("late", Axes(pp=2, dp=2)), ("late", Axes(pp=2, dp=2, shard_size=1))],
    ids=str,
)
def test_fault_19_overlap_changes_no_bit(carrier: str, axes: Axes) -> None:
    """DS#8061, #8080. Where collectives run beside the backward: gloo's own, and such as come as late as they may."""
    cases = [
        Case(axes, stage, accumulation=3, precision=precision, steps=2)
        for stage, precision in product(STAGES, ("fp32", "bf16"))
    ]
    overlapped = run_ranks(4, train_late, cases) if carrier == "late" else run_ranks(4, train_all, cases, False)
    plain = run_ranks(4, train_all, [replace(case, overlap=False) for case in cases], carrier == "late")
    for ours, theirs in zip(overlapped, plain, strict=True):
        for case, one, other in zip(cases, ours, theirs, strict=True):
            assert one["norms"] == other["norms"], case
            for mine, yours in zip(one["fragments"], other["fragments"], strict=True):
                assert torch.equal(mine[2], yours[2]), (case, mine[0].name)
            for piece, counterpart in zip(one["weights"], other["weights"], strict=True):
                assert torch.equal(piece.values, counterpart.values), (case, piece.spec.name)


@pytest.mark.slow
@pytest.mark.parametrize("dp", [1, 4])
def test_fault_19_unused_memory_is_poisoned(dp: int) -> None:
    """DS#5268: NaN in bucket tails, spare buffers and last step's gradients never leaks."""
    check(Axes(dp=dp), [Case(Axes(dp=dp), stage, accumulation=2, poison=True) for stage in STAGES])
