"""Bytes held and bytes that travel are those of DESIGN's "ZeRO arithmetic"."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from megazero.mpu.axes import Axes
from megazero.mpu.grid import build_grid
from megazero.mpu.parameter import StateGroup
from megazero.zero.sharding import Column
from megazero.zero.storage import Bucket
from tests.parameters import parameters_of
from tests.ranks import run_ranks
from tests.stages import STAGES
from tests.zero.toy import Case, build

BYTES = {"bf16": (2, 4, 12), "fp32": (4, 4, 8), "fp64": (8, 8, 16)}
"""Of a parameter: weights, gradients, optimizer state."""
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
                "parameters": sum(parameter.numel() for parameter in parameters_of(here.chunks)),
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


@pytest.mark.slow
@pytest.mark.parametrize(("bucket_size", "shard_size"), [(80, None), (100_000, None), (80, 1), (80, 2)])
def test_a_step_holds_and_sends_what_the_arithmetic_says(bucket_size: int, shard_size: int | None) -> None:
    """Bytes of m micro-batches: stage 0 2gP; 1 (g+p)P; 2 (m*g+p)P; 3 (m*g+2m*p)P but for what `gathers_of` says.

    Of K neighbours each has a K-th. They reduce and gather as N ranks would; one sum of a K-th goes across. Under
    ZeRO-0 a reduce-scatter and an all-gather around that sum take the place of the all-reduce.
    """
    axes, k = Axes(dp=N, shard_size=shard_size), shard_size or N
    base = Case(axes, accumulation=3, bucket_size=bucket_size, samples=24)
    cases = [replace(base, zero_stage=stage, precision=precision) for precision in BYTES for stage in STAGES]
    for results in run_ranks(N, measure, cases):
        for case, measured in zip(cases, results, strict=True):
            (p, g, o), stage, m, total = BYTES[case.precision], case.zero_stage, case.accumulation, measured["padded"]
            parameters = measured["parameters"]
            assert 0 <= total - parameters <= (N - 1) * math.ceil(parameters / 20), "at most N - 1 elements a bucket"
            sizes, dtypes = measured["bytes"], measured["dtypes"]
            columns = sizes.pop("parameter"), sizes.pop("gradient"), sum(sizes.values())
            shares = [1.0 if stage < first else 1 / k for first in (3, 2, 1)]
            assert columns == tuple(each * total * share for each, share in zip((p, g, o), shares, strict=True)), case

            wide = torch.float64 if case.precision == "fp64" else torch.float32
            narrow = torch.bfloat16 if case.precision == "bf16" else wide
            assert dtypes.pop("parameter") == narrow and {*dtypes.values()} == {wide}
            assert ("master" in dtypes) == (case.precision == "bf16")

            whole = {("all_reduce", wide): 2 * g * total}
            if shard_size is not None:
                whole = {("reduce_scatter", wide): g * total, ("all_gather", wide): g * total}
            inside = {
                0: whole,
                1: {("reduce_scatter", wide): g * total, ("all_gather", narrow): p * total},
                2: {("reduce_scatter", wide): m * g * total, ("all_gather", narrow): p * total},
                3: {("reduce_scatter", wide): m * g * total, ("all_gather", narrow): p * measured["gathered"]},
            }[stage]
            assert measured["traffic"] == (inside if k > 1 else {}), case
            assert measured["across"] == ({} if k == N else {("all_reduce", wide): 2 * g * total / k}), case

            # With overlap a backward has a few buckets of whole gradients; the toy's all arrive in reverse order.
            spare, limit = measured["spare"], 5 * measured["largest"] * g
            assert 0 < spare <= limit if stage >= 2 else spare == 0, (case, spare, limit)


def test_fault_13_the_dtype_that_travels_is_the_one_asked_for() -> None:
    """DS#5170: fp32 sums were reduced in bf16.

    Here fp32 travels unless a narrower dtype is asked for, and the sum stays fp32.
    """
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for axes in (Axes(dp=2), Axes(dp=4, shard_size=2)):
        cases = [Case(axes, s, precision="bf16", grad_reduce_dtype=wanted) for s, wanted in product(STAGES, dtypes)]
        for results in run_ranks(axes.world_size, measure, cases):
            for case, measured in zip(cases, results, strict=True):
                gathers = {"all_gather"} if case.zero_stage > 0 else set()  # of parameters
                launched = measured["traffic"].keys() | measured["across"].keys()
                travelled = {dtype for operation, dtype in launched if operation not in gathers}
                assert travelled == {dtypes[case.grad_reduce_dtype]}, case
                assert measured["dtypes"]["gradient"] == torch.float32


def reduce_tiny(rank: int, cases: list[Case]) -> list[list[float]]:
    """The first gradient after a reduction of 2 from the first rank and 2^-11 from the second: lost in bf16, kept in
    fp32.
    """
    results, grid = [], build_grid(cases[0].axes)
    for case in cases:
        here = build(case, grid)
        value = 2.0 if rank == 0 else 2.0**-11
        with here.state.reading():
            here.state.reducer.before_backward(None)
            torch.stack([(parameter * value).sum() for parameter in here.chunks[0].parameters()]).sum().backward()
            here.state.reducer.after_backward()
        here.reduce()
        results.append([here.state.columns[Column.GRADIENT].shard(0)[0].item()])
    return results


def test_fault_13_the_sum_is_that_of_the_dtype() -> None:
    pairs = product(STAGES, ("fp32", "bf16"))
    asked = [Case(Axes(dp=2), stage, precision="bf16", grad_reduce_dtype=dtype) for stage, dtype in pairs]
    for found in run_ranks(2, reduce_tiny, asked):
        for case, (got,) in zip(asked, found, strict=True):
            assert got == (2.0 if case.grad_reduce_dtype == "bf16" else 2.0 + 2.0**-11), case
