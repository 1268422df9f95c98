"""Quantised collectives against float64: half a step of each block as the bound, the same bits on every rank, bytes,
error feedback over many steps, and numbers that are not finite.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest
import torch
from torch import Tensor

from megazero.mpu.axes import Axes
from megazero.mpu.grid import Group, build_grid, single_rank_group
from megazero.mpu.quantized import all_gather_quantized, all_reduce_quantized, reduce_scatter_quantized
from tests.ranks import run_ranks

LARGEST = {8: 127, 4: 7}
FP32 = torch.float32


def drawn(rank: int, n: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    """Of very different size from place to place, so that a scale for all would lose the small ones."""
    values = torch.randn(n, generator=torch.Generator().manual_seed(100 * seed + rank), dtype=torch.float64)
    return (values * torch.logspace(-2, 2, n, dtype=torch.float64)).to(dtype)


def half_steps(part: Tensor, bits: int) -> Tensor:
    """For each element of a part [n] the most that its block of 256 can lose of it, in float64."""
    blocks = part.double().abs().split(256)
    return torch.cat([(b.max() / LARGEST[bits] / 2).expand_as(b) for b in blocks]) * (1 + 1e-5)


def lost_of(whole: Tensor, bits: int, parts: int) -> Tensor:
    return torch.cat([half_steps(part, bits) for part in whole.view(parts, -1)])


def rounding(exact: Tensor, dtype: torch.dtype) -> Tensor:
    return exact.abs() * torch.finfo(dtype).eps


def groups_of(size: int) -> dict[bool, Group]:
    """By whether they share memory."""
    return {shared: build_grid(Axes(dp=size), shared_memory=shared).dp for shared in (True, False)}


WAYS = ((1, True, False), (257, True, True), (5000, False, True))
"""Elements, whether memory is shared, and whether the piece is within the whole."""
GATHERS = list(product((FP32, torch.bfloat16, torch.float64), WAYS))


def gathered(rank: int, size: int) -> list[tuple[Tensor, Counter]]:
    groups, results = groups_of(size), []
    for dtype, (n, shared, inside) in GATHERS:
        groups[shared].traffic.clear()
        output, piece = torch.full((size * n,), math.nan, dtype=dtype), drawn(rank, n, dtype)
        if inside:
            piece = output[rank * n : rank * n + n].copy_(piece)
        all_gather_quantized(output, piece, groups[shared]).wait()
        results.append((output, Counter(groups[shared].traffic)))
    return results


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gathers_the_same_bits(size):
    first, *others = run_ranks(size, gathered, size)
    for number, (dtype, (n, _, _)) in enumerate(GATHERS):
        exact = torch.cat([drawn(rank, n, dtype) for rank in range(size)]).double()
        bytes_of_part = math.ceil(n / 16) * 16 + math.ceil(math.ceil(n / 256) / 4) * 16
        output = first[number][0]
        assert ((output.double() - exact).abs() <= lost_of(exact, 8, size) + rounding(exact, dtype)).all()
        assert n == 1 or not torch.equal(output.double(), exact), "nothing was quantised"
        assert all(torch.equal(results[number][0], output) for results in others)
        for results in (first, *others):
            assert results[number][1] == {("all_gather", torch.uint8): size * bytes_of_part}


SCATTERS = list(product((FP32, torch.float16, torch.float64), (8, 4), ((1, True), (257, False), (3000, True))))


def scattered(rank: int, size: int) -> list[tuple[Tensor, Tensor, Counter]]:
    """The part in a tensor of its own, and within the whole; both launched before the first is waited for."""
    groups, results = groups_of(size), []
    for dtype, bits, (k, shared) in SCATTERS:
        groups[shared].traffic.clear()
        whole, output = drawn(rank, size * k, dtype), torch.full((k,), math.nan, dtype=dtype)
        first = reduce_scatter_quantized(output, whole, groups[shared], bits)
        inside = whole[rank * k : rank * k + k]
        second = reduce_scatter_quantized(inside, whole, groups[shared], bits)
        second.wait()
        first.wait()
        results.append((output, inside.clone(), Counter(groups[shared].traffic)))
    return results


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("size", [2, 3])
def test_parts_travel_quantised_and_sums_do_not(size):
    ranks = run_ranks(size, scattered, size)
    for number, (dtype, bits, (k, _)) in enumerate(SCATTERS):
        wholes = [drawn(rank, size * k, dtype).double() for rank in range(size)]
        exact = torch.stack(wholes).sum(0).view(size, k)
        allowed = torch.stack([lost_of(whole, bits, size) for whole in wholes]).sum(0).view(size, k)
        codes, scales = math.ceil(k * bits / 8), 4 * math.ceil(k / 256)
        bytes_of_part = math.ceil(codes / 16) * 16 + math.ceil(scales / 16) * 16
        for rank, results in enumerate(ranks):
            output, inside, traffic = results[number]
            slack = rounding(exact[rank], dtype) + size * 2e-7 * allowed[rank] * LARGEST[bits]
            assert ((output.double() - exact[rank]).abs() <= allowed[rank] + slack).all(), SCATTERS[number]
            assert k == 1 or not torch.allclose(output.double(), exact[rank], rtol=1e-4), "nothing was quantised"
            assert torch.equal(output, inside)
            assert traffic == {("all_to_all", torch.uint8): 2 * size * bytes_of_part}


def feedback(rank: int, size: int, k: int, bits: int, steps: int, keep: bool) -> tuple[Tensor, Tensor | None]:
    """The sum over the steps of what this rank gets, in float64. Gradients are the same in every step."""
    group = build_grid(Axes(dp=size)).dp
    whole, total = drawn(rank, size * k), torch.zeros(k, dtype=torch.float64)
    error = torch.zeros(size * k) if keep else None
    for _ in range(steps):
        output = torch.empty(k)
        reduce_scatter_quantized(output, whole, group, bits, error).wait()
        total += output
    return total, error


@pytest.mark.slow
@pytest.mark.parametrize(("size", "bits"), [(2, 4), (3, 8)])
def test_error_feedback_loses_nothing_over_fifty_steps(size, bits):
    """What is missing after the steps is what is kept: of one step, not of fifty."""
    k, steps = 700, 50
    wholes = [drawn(rank, size * k).double() for rank in range(size)]
    exact = torch.stack(wholes).sum(0).view(size, k)
    bound = torch.stack([lost_of(whole, bits, size) for whole in wholes]).sum(0).view(size, k)
    kept = run_ranks(size, feedback, size, k, bits, steps, True)
    errors = torch.stack([error for _, error in kept]).double().sum(0).view(size, k)
    for rank, (total, _) in enumerate(kept):
        missing = steps * exact[rank] - total
        assert ((missing - errors[rank]).abs() <= 1e-5 * steps * exact[rank].abs().clamp(min=bound[rank])).all()
        assert (missing.abs() <= 2 * bound[rank]).all()
    biased = [
        (steps * exact[rank] - total).abs()
        for rank, (total, _) in enumerate(run_ranks(size, feedback, size, k, bits, steps, False))
    ]
    assert all((missing > 10 * bound[rank]).float().mean() > 0.2 for rank, missing in enumerate(biased))


def overflowed(rank: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rank 1 overflows in the part of rank 0; what the step after it gives."""
    group = build_grid(Axes(dp=2)).dp
    error, outputs = torch.zeros(1200), []
    for step in range(2):
        whole, output = drawn(rank, 1200, torch.float16), torch.empty(600, dtype=torch.float16)
        if rank == 1 and step == 0:
            whole[300] = math.inf
        reduce_scatter_quantized(output, whole, group, bits, error).wait()
        outputs.append(output)
    return outputs[0], outputs[1], error


@pytest.mark.parametrize("bits", [8, 4])
def test_an_overflow_arrives_and_leaves_nothing_behind(bits):
    (first, second, error), (other, _, theirs) = run_ranks(2, overflowed, bits)
    assert first[256:512].isnan().all() and first[:256].isfinite().all() and first[512:].isfinite().all()
    assert other.isfinite().all() and second.isfinite().all()
    assert error.isfinite().all() and theirs.isfinite().all() and theirs[300] != 0


def reduced(rank: int, size: int) -> Tensor:
    group = build_grid(Axes(dp=size)).dp
    tensor = drawn(rank, size * 300)
    all_reduce_quantized(tensor, group, 8).wait()
    return tensor


def test_an_all_reduce_has_the_same_bits_everywhere():
    results = run_ranks(3, reduced, 3)
    wholes = [drawn(rank, 900).double() for rank in range(3)]
    exact = torch.stack(wholes).sum(0)
    lost = torch.stack([lost_of(whole, 8, 3) for whole in wholes]).sum(0)
    allowed = lost + lost_of(exact.abs() + lost, 8, 3)
    assert all(torch.equal(found, results[0]) for found in results)
    assert ((results[0].double() - exact).abs() <= allowed * (1 + 1e-5)).all()


def test_a_group_of_one_quantises_nothing():
    group, source, error = single_rank_group(), drawn(0, 300), torch.full((300,), 3.0)
    for result in (torch.empty(300), torch.empty(300), torch.empty(300), source.clone()):
        target = result
        if result.equal(source):
            all_reduce_quantized(target, group, 4, error).wait()
        else:
            reduce_scatter_quantized(target, source, group, 4, error).wait()
        assert torch.equal(target, source)
    output = torch.empty(300)
    all_gather_quantized(output, source, group).wait()
    assert torch.equal(output, source) and (error == 3.0).all() and not group.traffic
