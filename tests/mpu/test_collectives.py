"""Collectives over a group: values, dtypes, what is counted, groups of one, groups inside a larger world."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from megazero.mpu.axes import Axes
from megazero.mpu.collectives import all_gather, all_reduce, all_to_all, barrier, broadcast, reduce_scatter
from megazero.mpu.grid import Group, build_grid, single_rank_group
from tests.ranks import run_ranks


def mine(rank: int, n: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, so that sums are exact in every dtype."""
    return torch.randint(-8, 8, (n,), generator=torch.Generator().manual_seed(rank)).to(dtype)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)


def every_collective(rank: int, size: int) -> list[tuple[dict[str, Tensor], Counter]]:
    """By dtype."""
    group = build_grid(Axes(tp=size)).tp
    return [collectives_in(dtype, rank, size, group) for dtype in DTYPES]


def collectives_in(dtype: torch.dtype, rank: int, size: int, group: Group) -> tuple[dict[str, Tensor], Counter]:
    group.traffic.clear()
    n = 6 * size
    results = {}
    for op in ("sum", "max", "min"):
        tensor = mine(rank, n, dtype)
        handle = all_reduce(tensor, group, op)
        handle.wait()
        handle.wait()
        results[op] = tensor
    whole = torch.empty(n, dtype=dtype)
    all_gather(whole, mine(rank, 6, dtype), group).wait()
    results["gather"] = whole.clone()
    whole.fill_(99)
    own = whole[rank * 6 : rank * 6 + 6]
    own.copy_(mine(rank, 6, dtype))
    all_gather(whole, own, group).wait()
    results["gather in place"] = whole
    part, source = torch.empty(6, dtype=dtype), mine(rank, n, dtype)
    reduce_scatter(part, source, group).wait()
    assert torch.equal(source, mine(rank, n, dtype))
    results["scatter"] = part
    reduce_scatter(source[rank * 6 : rank * 6 + 6], source, group).wait()
    results["scatter in place"] = source[rank * 6 : rank * 6 + 6].clone()
    tensor = mine(rank, n, dtype)
    broadcast(tensor, group, size - 1).wait()
    results["broadcast"] = tensor
    barrier(group)
    return results, Counter(group.traffic)


@pytest.mark.few(cases=3)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_values_and_bytes(size):
    n, ranks = 6 * size, run_ranks(size, every_collective, size)
    for number, dtype in enumerate(DTYPES):
        all_of = torch.stack([mine(rank, n, dtype) for rank in range(size)])
        gathered = torch.cat([mine(rank, 6, dtype) for rank in range(size)])
        for rank, by_dtype in enumerate(ranks):
            results, traffic = by_dtype[number]
            assert torch.equal(results["sum"], all_of.sum(0, dtype=dtype))
            assert torch.equal(results["max"], all_of.amax(0)) and torch.equal(results["min"], all_of.amin(0))
            assert torch.equal(results["gather"], gathered) and torch.equal(results["gather in place"], gathered)
            share = all_of.sum(0, dtype=dtype)[rank * 6 : rank * 6 + 6]
            assert torch.equal(results["scatter"], share) and torch.equal(results["scatter in place"], share)
            assert torch.equal(results["broadcast"], all_of[size - 1])
            whole = n * dtype.itemsize
            counts = {"all_reduce": 6, "all_gather": 2, "reduce_scatter": 2, "broadcast": 1} if size > 1 else {}
            assert traffic == {(name, dtype): count * whole for name, count in counts.items()}


def test_a_group_of_one_copies_and_sends_nothing():
    group, source = single_rank_group(), torch.arange(4.0)
    for collective in (all_gather, reduce_scatter, all_to_all):
        target = torch.zeros(4)
        collective(target, source, group).wait()
        assert torch.equal(target, source)
        if collective is not all_to_all:
            collective(source, source, group).wait()
    all_reduce(source, group, "max").wait()
    broadcast(source, group).wait()
    barrier(group)
    assert not group.traffic


EXCHANGES = [
    (dtype, shared, n)
    for dtype in (torch.float64, torch.bfloat16, torch.uint8)
    for shared, n in ((True, 1), (True, 700_001), (False, 5))
]


def exchanged(rank: int, size: int) -> list[tuple[Tensor, Counter]]:
    groups = {shared: build_grid(Axes(tp=size), shared_memory=shared).tp for shared in (True, False)}
    results = []
    for dtype, shared, n in EXCHANGES:
        group = groups[shared]
        assert (group.exchange is not None) == shared
        group.traffic.clear()
        source, output = mine(rank, n * size, dtype), torch.full((n * size,), 99, dtype=dtype)
        all_to_all(output, source, group).wait()
        assert torch.equal(source, mine(rank, n * size, dtype))
        results.append((output, Counter(group.traffic)))
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_all_to_all_sends_each_part_to_its_rank(size):
    """Also more than the slots of the shared memory hold."""
    for rank, results in enumerate(run_ranks(size, exchanged, size)):
        for (dtype, _, n), (output, traffic) in zip(EXCHANGES, results, strict=True):
            wanted = [mine(other, n * size, dtype)[rank * n : rank * n + n] for other in range(size)]
            assert torch.equal(output, torch.cat(wanted))
            assert traffic == {("all_to_all", dtype): n * size * dtype.itemsize}


def two_at_once(rank: int) -> tuple[Tensor, Tensor]:
    """Collectives in flight together on two groups of a 2 x 2 world, waited for in the other order."""
    grid = build_grid(Axes(dp=2, tp=2))
    first, second = torch.full((1000,), float(rank)), torch.full((1000,), 10.0**rank)
    one, two = all_reduce(first, grid.tp), all_reduce(second, grid.dp)
    two.wait()
    one.wait()
    return first[:1], second[:1]


def test_tp_two_inside_world_four():
    results = [(a.item(), b.item()) for a, b in run_ranks(4, two_at_once)]
    assert results == [(1.0, 101.0), (1.0, 1010.0), (5.0, 101.0), (5.0, 1010.0)]


def sums_in_order(rank: int) -> Tensor:
    group = build_grid(Axes(dp=4)).dp
    part = torch.empty(5000)
    whole = torch.randn(20000, generator=torch.Generator().manual_seed(rank))
    reduce_scatter(part, whole, group).wait()
    return part


def test_reduce_scatter_adds_in_order_of_rank():
    """On gloo the sum's order is ours, so its bits do not depend on timing."""
    total = torch.zeros(20000)
    for rank in range(4):
        whole = torch.randn(20000, generator=torch.Generator().manual_seed(rank))
        total = whole if rank == 0 else total + whole
    assert torch.equal(torch.cat(run_ranks(4, sums_in_order)), total)
