"""Blocks of quantised messages begin with parameters: large weights cost their small neighbours no bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megazero.config.schema import OffloadConfig, OptimizerConfig, ParallelConfig
from megazero.mpu.axes import Axes, Coordinates
from megazero.mpu.grid import build_grid, single_rank_group
from megazero.mpu.parameter import Parameter, ParameterKind, ParameterSpec, shard
from megazero.zero.layout import group_sizes, pack, packing_of
from megazero.zero.sharding import Column
from megazero.zero.state import ModelState
from tests.ranks import run_ranks
from tests.zero.toy import Chunk, Unit

BLOCK = 256
SPECS = (
    shard("norm.weight", (25,), ParameterKind.NORM, fill=1.0),
    shard("up.weight", (13, 25), ParameterKind.MATRIX),
    shard("down.weight", (25, 13), ParameterKind.MATRIX),
    shard("down.bias", (3,), ParameterKind.BIAS),
)
SIZES = {"norm.weight": 100.0, "up.weight": 0.02, "down.weight": 1e-4, "down.bias": 3.0}
"""Of the largest weight, and of the largest gradient."""
STAGES = {0: False, 1: True, 2: True, 3: True}
"""Whether it gathers parameters."""


def values(spec: ParameterSpec) -> Tensor:
    """Between minus and plus the parameter's size, in float32."""
    drawn = torch.rand(spec.shape, generator=torch.Generator().manual_seed(spec.local_numel)) * 2 - 1
    return drawn * SIZES[spec.name]


def half_steps(spec: ParameterSpec) -> Tensor:
    """The most that each element can lose in a block of int8 of this parameter alone, [numel]."""
    blocks = values(spec).abs().flatten().split(BLOCK)
    return torch.cat([(block.max() / 254).expand_as(block) for block in blocks]) * 1.001


def carried(rank: int, axes: Axes, stages: list[int]) -> list[tuple[dict[str, Tensor], list[tuple[str, int, Tensor]]]]:
    """By stage: weights after a gather, and (name, first element, values) of a rank's gradients after a reduction."""
    grid, results = build_grid(axes), []
    for stage in stages:
        parallel = ParallelConfig(
            zero_stage=stage, zero_quantized_weights=STAGES[stage], zero_quantized_gradients="int8"
        )
        chunk = Chunk([Unit([Parameter(spec, torch.float32, "cpu") for spec in SPECS], "block", single_rank_group())])
        state = ModelState([chunk], grid, OptimizerConfig(precision="fp32"), parallel)
        (bucket,) = state.buckets
        with state.parameters[0].filling(), torch.no_grad():
            for entry, parameter in zip(bucket.layout.entries, bucket.parameters, strict=True):
                parameter.copy_(values(entry.spec))
        if stage in (1, 2):
            for fragment in bucket.layout.fragments(*bucket.shard):
                part = slice(fragment.start, fragment.stop)
                exact = state.weights.view(0, fragment.offset, fragment.offset + fragment.numel)
                exact.copy_(values(fragment.spec).flatten()[part])
            state.gatherer.gather(0)
            state.actions.ready([0])
        with state.reading():
            weights = {p.spec.name: p.detach().clone() for p in bucket.parameters}
            state.columns[Column.GRADIENT].held(0).fill_(1e9)  # of gaps nothing may be left
            state.reducer.before_backward(None)
            torch.stack([(p * values(p.spec)).sum() for p in bucket.parameters]).sum().backward()
            state.reducer.after_backward()
        state.reducer.reduce(0)
        if bucket.groups.across.size > 1:
            state.reducer.reduce_across(0)
        state.reducer.complete()
        column = state.columns[Column.GRADIENT]
        owned = bucket.layout.fragments(*bucket.owned)
        gradients = [(f.spec.name, f.start, column.view(0, f.offset, f.offset + f.numel).clone()) for f in owned]
        results.append((weights, gradients))
    return results


@pytest.mark.parametrize("axes", [Axes(dp=2), Axes(dp=4, shard_size=2)], ids=str)
def test_each_element_loses_what_its_own_parameters_block_can_lose(axes: Axes) -> None:
    """A weight half a step. A gradient half a step on each rank, and as a sum that is gathered or goes across more."""
    ranks = run_ranks(axes.world_size, carried, axes, list(STAGES))
    for number, stage in enumerate(STAGES):
        assert {name for results in ranks for name, _, _ in results[number][1]} == set(SIZES)
        for results in ranks:
            weights, gradients = results[number]
            for spec in SPECS if STAGES[stage] else ():
                lost = (weights[spec.name] - values(spec)).abs().flatten()
                assert (lost <= half_steps(spec)).all(), (stage, spec.name, lost.max(), half_steps(spec).max())
                assert lost.any(), "nothing was quantised"
            for name, start, found in gradients:
                spec = next(spec for spec in SPECS if spec.name == name)
                part = slice(start, start + found.numel())
                lost = (found - axes.dp * values(spec).flatten()[part]).abs()
                allowed = 3.1 * axes.dp * half_steps(spec)[part]
                assert (lost <= allowed).all(), (stage, name, lost.max(), allowed.max())


def test_offsets_and_parts_are_multiples_of_a_block_only_where_messages_are_quantised() -> None:
    at = Coordinates(0, 0, 0, 0)
    for axes in (Axes(dp=3), Axes(dp=4, shard_size=2)):
        sizes = group_sizes(axes, at)
        for words in ({"zero_quantized_weights": True}, {"zero_quantized_gradients": "int4"}):
            parallel = replace(ParallelConfig(zero_stage=1), **words)
            (bucket,) = pack([[list(SPECS)]], sizes, packing_of(parallel, OffloadConfig(), axes.dp, nccl=False))
            assert all(entry.offset % BLOCK == 0 for entry in bucket.entries)
            assert bucket.numel % (BLOCK * axes.dp) == 0 and bucket.parameters == 25 + 2 * 325 + 3
            covered = [*((entry.offset, entry.stop) for entry in bucket.entries), *bucket.gaps()]
            ends = sorted(covered)
            assert ends[0][0] == 0 and ends[-1][1] == bucket.numel
            assert all(one[1] == other[0] for one, other in pairwise(ends)), "each element once"
        (plain,) = pack(
            [[list(SPECS)]], sizes, packing_of(ParallelConfig(zero_stage=1), OffloadConfig(), axes.dp, nccl=False)
        )
        assert [entry.offset for entry in plain.entries] == [0, 325, 650, 675] and plain.used == 678


def lost_across(rank: int) -> Tensor:
    """What the hop across has lost, of neighbours' sums that bf16 has no number for: 127 + 127/128 and 100 + 1/4."""
    parallel = ParallelConfig(
        zero_stage=1, zero_quantized_gradients="int8", zero_gradient_error_feedback=True, grad_reduce_dtype="bf16"
    )
    spec = shard("up.weight", (1024,), ParameterKind.MATRIX)
    chunk = Chunk([Unit([Parameter(spec, torch.bfloat16, "cpu")], "block", single_rank_group())])
    state = ModelState([chunk], build_grid(Axes(dp=4, shard_size=2)), OptimizerConfig(precision="bf16"), parallel)
    (parameter,) = state.buckets[0].parameters
    state.reducer.before_backward(None)
    (
        parameter * torch.tensor(((127.0, 100.0), (127 / 128, 0.25))[rank % 2] * 512, dtype=torch.bfloat16)
    ).sum().backward()
    state.reducer.after_backward()
    state.reducer.reduce(0)
    state.reducer.reduce_across(0)
    state.reducer.complete()
    across = state.messages._kept[0][1]
    assert across is not None
    return across[:2]


def test_between_the_hops_sums_are_in_fp32() -> None:
    """The first hop is exact: its codes are whole numbers. In bf16 the sums would be 128 and 100."""
    for lost in run_ranks(4, lost_across):
        assert lost.tolist() == pytest.approx([0.0, 100.25 - 99 * (127 + 127 / 128) / 127], abs=1e-4)
