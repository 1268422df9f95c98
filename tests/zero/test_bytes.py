"""Bytes held and bytes that travel are those of DESIGN's "ZeRO arithmetic"."""

import math
from dataclasses import replace

import pytest
import torch

from megazero.mpu.axes import Axes
from megazero.mpu.grid import build_grid
from megazero.mpu.parameter import StateGroup
from megazero.zero.placement import Column
from megazero.zero.storage import Bucket
from tests.ranks import run_ranks
from tests.stages import STAGES
from tests.zero.toy import Case, build

# bytes per parameter: weights, gradients, optimizer
BYTES = {"bf16": (2, 4, 12), "fp16": (2, 4, 12), "fp32": (4, 4, 8), "fp64": (8, 8, 16)}
PRECISIONS = ("fp64", "fp32", "bf16")
N = 4


def gathers_of(bucket: Bucket, m: int) -> int:
    """How often a step of m micro-batches gathers a bucket of the toy with --zero-stage 3.

    Twice a micro-batch, for forward and backward, with three exceptions. Tables are not read in backward (the word
    embedding by two forwards). The last block's backward follows its forward, without a gather in between, and the
    first block's forward follows the backward of the micro-batch before.
    """
    counts = {"word": 2 * m, "position": m, "0": m + 1, str(Case.blocks - 1): m}
    units = {entry.spec.name.split(".")[1] for entry in bucket.layout.entries}
    return max(counts.get(unit, 2 * m) for unit in units)


def measure(rank: int, cases: list[Case]) -> list[dict]:
    """Bytes by column, parameters, bytes of the spare buffers, and bytes of one step by (operation, dtype): inside a
    set of neighbours that share out the state, and across the sets.
    """
    results = []
    grid = build_grid(cases[0].axes)
    for case in cases:
        here = build(case, grid)
        here.backward(0)
        # no norm: its group is dp itself here
        here.update(0.05, torch.ones((), dtype=torch.float64), torch.tensor(False))
        here.state.wait_parameters()
        groups = here.grid.shared[StateGroup.REPLICAS]
        results.append(
            {
                "bytes": here.state.bytes(),
                "dtypes": {column.value: stored.dtype for column, stored in here.state.columns.items()},
                "parameters": sum(
                    p.numel() for p in {id(p): p for chunk in here.chunks for p in chunk.parameters()}.values()
                ),
                "gathered": sum(
                    bucket.layout.numel * gathers_of(bucket, case.accumulation)
                    for bucket in here.state.buckets
                    if case.zero_stage == 3
                ),
                "padded": sum(bucket.layout.numel for bucket in here.state.buckets),
                "largest": max(bucket.layout.numel for bucket in here.state.buckets),
                "traffic": dict(groups.inner.traffic),
                "across": dict(groups.across.traffic),
                "spare": here.state.reducer.pool.nbytes,
            }
        )
    return results


def cases(bucket_size: int, shard_size: int | None = None) -> list[Case]:
    axes = Axes(dp=N, shard_size=shard_size)
    base = Case(axes, accumulation=3, bucket_size=bucket_size, samples=24)
    return [replace(base, zero_stage=stage, precision=precision) for precision in PRECISIONS for stage in STAGES]


@pytest.mark.slow
@pytest.mark.parametrize("bucket_size", [80, 100_000])
def test_bytes_are_those_of_the_arithmetic(bucket_size: int) -> None:
    for found in run_ranks(N, measure, cases(bucket_size)):
        for case, got in zip(cases(bucket_size), found, strict=True):
            p, g, k = BYTES[case.precision]
            stage, size, padding = case.zero_stage, got["parameters"], got["padded"] - got["parameters"]
            assert 0 <= padding <= (N - 1) * math.ceil(size / 20), "at most N - 1 elements a bucket"
            share = [1.0 if stage < first else 1 / N for first in (3, 2, 1)]
            held = got["bytes"]
            optimizer = sum(held.get(column, 0) for column in ("master", "exp_avg", "exp_avg_sq"))
            total = got["padded"]
            assert (held["parameter"], held["gradient"], optimizer) == (
                p * total * share[0],
                g * total * share[1],
                k * total * share[2],
            ), case
            exact = (p * share[0] + g * share[1] + k * share[2]) * size
            assert exact <= sum(held.values()) <= exact + (p + g + k) * padding


@pytest.mark.slow
@pytest.mark.parametrize("shard_size", [1, 2])
def test_bytes_and_traffic_of_hybrid_shards(shard_size: int) -> None:
    """Of K neighbours each has a K-th. They reduce and gather as N ranks would; one sum of a K-th goes across.

    Under ZeRO-0 a reduce-scatter and an all-gather around that sum take the place of the all-reduce.
    """
    layouts = cases(80, shard_size)
    for found in run_ranks(N, measure, layouts):
        for case, got in zip(layouts, found, strict=True):
            p, g, k = BYTES[case.precision]
            stage, total, m = case.zero_stage, got["padded"], case.accumulation
            share = [1.0 if stage < first else 1 / shard_size for first in (3, 2, 1)]
            held = got["bytes"]
            assert held.pop("parameter") == p * total * share[0] and held.pop("gradient") == g * total * share[1], case
            assert sum(held.values()) == k * total * share[2], case
            wide, narrow = got["dtypes"]["gradient"], got["dtypes"]["parameter"]
            inside = {
                0: {("reduce_scatter", wide): g * total, ("all_gather", wide): g * total},
                1: {("reduce_scatter", wide): g * total, ("all_gather", narrow): p * total},
                2: {("reduce_scatter", wide): m * g * total, ("all_gather", narrow): p * total},
                3: {("reduce_scatter", wide): m * g * total, ("all_gather", narrow): p * got["gathered"]},
            }[stage]
            assert got["traffic"] == (inside if shard_size > 1 else {}), case
            assert got["across"] == {("all_reduce", wide): 2 * g * total / shard_size}, case


@pytest.mark.slow
def test_dtypes_are_those_claimed() -> None:
    for case, got in zip(cases(80), run_ranks(N, measure, cases(80))[0], strict=True):
        wide = torch.float64 if case.precision == "fp64" else torch.float32
        narrow = torch.bfloat16 if case.precision == "bf16" else wide
        assert got["dtypes"].pop("parameter") == narrow
        assert set(got["dtypes"].values()) == {wide}
        assert ("master" in got["dtypes"]) == (case.precision == "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("bucket_size", [80, 100_000])
def test_traffic_is_that_of_the_arithmetic(bucket_size: int) -> None:
    """Stage 0 2gP; 1 (g+p)P; 2 (m*g+p)P; 3 (m*g+2m*p)P but for what `gathers_of` says; nothing else travels over dp."""
    for found in run_ranks(N, measure, cases(bucket_size)):
        for case, got in zip(cases(bucket_size), found, strict=True):
            p, g, _ = BYTES[case.precision]
            wide = got["dtypes"]["gradient"]
            narrow = got["dtypes"]["parameter"]
            total, m = got["padded"], case.accumulation
            expected = {
                0: {("all_reduce", wide): 2 * g * total},
                1: {("reduce_scatter", wide): g * total, ("all_gather", narrow): p * total},
                2: {("reduce_scatter", wide): m * g * total, ("all_gather", narrow): p * total},
                3: {("reduce_scatter", wide): m * g * total, ("all_gather", narrow): p * got["gathered"]},
            }[case.zero_stage]
            assert got["traffic"] == expected, case


@pytest.mark.slow
def test_sharded_gradients_keep_a_few_buckets_of_whole_gradients() -> None:
    """During a backward with overlap; the toy's parameters all arrive in reverse order.

    None are kept by the other stages.
    """
    for case, got in zip(cases(80), run_ranks(N, measure, cases(80))[0], strict=True):
        limit = 5 * got["largest"] * BYTES[case.precision][1]
        assert (0 < got["spare"] <= limit) if case.zero_stage >= 2 else got["spare"] == 0, (case, got["spare"], limit)


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("wanted", ["bf16", "fp16", "fp32"])
def test_fault_13_the_dtype_that_travels_is_the_one_asked_for(wanted: str) -> None:
    """DS#5170: fp32 sums were reduced in bf16.

    Here fp32 travels unless a narrower dtype is asked for, and the sum stays fp32.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[wanted]
    for axes in (Axes(dp=2), Axes(dp=4, shard_size=2)):
        asked = [Case(axes, stage, precision="bf16", grad_reduce_dtype=wanted) for stage in STAGES]
        for found in run_ranks(axes.world_size, measure, asked):
            for case, got in zip(asked, found, strict=True):
                gathers = {"all_gather"} if case.zero_stage > 0 else set()  # of parameters
                travelled = got["traffic"].keys() | got["across"].keys()
                assert {d for operation, d in travelled if operation not in gathers} == {dtype}, case
                assert got["dtypes"]["gradient"] == torch.float32


def reduce_tiny(rank: int, cases: list[Case]) -> list[list[float]]:
    """The first gradient after a reduction of 2 from the first rank and 2^-11 from the second: lost in bf16, kept in
    fp32.
    """
    results, grid = [], build_grid(cases[0].axes)
    for case in cases:
        here = build(case, grid)
        value = 2.0 if rank == 0 else 2.0**-11
        with here.state.reading():
            here.state.actions.before_backward(None)
            torch.stack([(parameter * value).sum() for parameter in here.chunks[0].parameters()]).sum().backward()
            here.state.actions.after_backward()
        here.reduce()
        results.append([here.state.columns[Column.GRADIENT].shard(0)[0].item()])
    return results


def test_fault_13_the_sum_is_that_of_the_dtype() -> None:
    asked = [
        Case(Axes(dp=2), stage, precision="bf16", grad_reduce_dtype=dtype)
        for stage in STAGES
        for dtype in ("fp32", "bf16")
    ]
    for found in run_ranks(2, reduce_tiny, asked):
        for case, (got,) in zip(asked, found, strict=True):
            assert got == (2.0 if case.grad_reduce_dtype == "bf16" else 2.0 + 2.0**-11), case
