"""Collectives through shared memory: any sizes and order of waiting, ranks that die or are late, hosts that share
nothing.
"""

import fcntl
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megazero.mpu import shared_memory
from megazero.mpu.axes import Axes
from megazero.mpu.collectives import (
    CommunicationHandle,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce_scatter,
)
from megazero.mpu.grid import Group, build_grid
from megazero.mpu.shared_memory import SLOT, SLOTS
from tests.ranks import last_words, run_ranks

LARGEST = 3 * SLOT * SLOTS // 2
"""Bytes: more than a rank's area, so that chunks wait for slots."""


def world_of(size: int) -> Group:
    group = build_grid(Axes(dp=size)).world
    assert group.exchange is not None
    return group


def drawn(seed: int, rank: int, *shape: int) -> Tensor:
    """Small whole numbers: sums are exact."""
    return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(1000 * seed + rank)).float()


Case = tuple[CommunicationHandle, Callable[[], Tensor], Tensor]
"""What is under way, what it gives, what it should."""


def launched(kind: str, seed: int, group: Group, numel: int) -> Case:
    """A random collective, with what every rank put into it made again here."""
    size, index, part = group.size, group.index, max(1, numel // group.size)
    wholes = [drawn(seed, rank, numel) for rank in range(size)]
    if kind in ("all_reduce", "max"):
        tensor, stacked = wholes[index].clone(), torch.stack(wholes)
        pending = all_reduce(tensor, group, "max" if kind == "max" else "sum")
        return pending, lambda: tensor, stacked.amax(0) if kind == "max" else stacked.sum(0)
    if kind == "broadcast":
        tensor, root = wholes[index].clone(), seed % size
        return broadcast(tensor, group, root), lambda: tensor, wholes[root]
    mine, parts = slice(index * part, (index + 1) * part), [drawn(seed, rank, size * part) for rank in range(size)]
    if kind == "reduce_scatter":
        whole = parts[index].clone()
        output = whole[mine] if seed % 2 else torch.empty(part)
        wanted = torch.stack([each[mine] for each in parts]).sum(0)
        return reduce_scatter(output, whole, group), lambda: output, wanted
    whole = torch.full((size * part,), 99.0)
    if kind == "all_to_all":
        return all_to_all(whole, parts[index], group), lambda: whole, torch.cat([each[mine] for each in parts])
    pieces = [drawn(seed, rank, part) for rank in range(size)]
    piece = whole[mine].copy_(pieces[index]) if seed % 2 else pieces[index]
    return all_gather(whole, piece, group), lambda: whole, torch.cat(pieces)


def many(rank: int, size: int, seed: int, jitter: bool) -> int:
    """Launches in one order everywhere, waits in another, at times with other collectives between them."""
    group, draw, pause = world_of(size), random.Random(seed), random.Random(rank)
    cases: list[Case] = []
    done = 0
    for number in range(60):
        kind = draw.choice(["all_reduce", "max", "reduce_scatter", "all_gather", "all_to_all", "broadcast"])
        numel = draw.choice([1, 2, 7, 1000, 5000, 70_001, LARGEST // 4 if number % 20 == 7 else 333_333])
        cases.append(launched(kind, seed * 100 + number, group, numel))
        if jitter:
            time.sleep(pause.random() * 0.003)
        while cases and draw.random() < 0.5:
            pending, result, wanted = cases.pop(draw.randrange(len(cases)))
            pending.wait()
            assert torch.equal(result(), wanted)
            done += 1
        if draw.random() < 0.1:
            barrier(group)
    for pending, result, wanted in cases:
        pending.wait()
        assert torch.equal(result(), wanted)
    return done + len(cases)


@pytest.mark.slow
@pytest.mark.parametrize("jitter", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_order_of_sizes_and_waits(size, jitter):
    assert run_ranks(size, many, size, size, jitter) == [60] * size


def sums(rank: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of numbers whose sum depends on the order: the same bits on every rank, 16-bit numbers rounded once."""
    group = world_of(size)
    tensor = torch.randn(50_000, generator=torch.Generator().manual_seed(rank)).to(dtype)
    small = tensor[:100].clone()
    all_reduce(tensor, group).wait()
    all_reduce(small, group).wait()
    return tensor, small


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_the_same_bits_everywhere(dtype):
    parts = [torch.randn(50_000, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(3)]
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    exact = ((parts[0].to(wide) + parts[1].to(wide)) + parts[2].to(wide)).to(dtype)
    for whole, small in run_ranks(3, sums, 3, dtype):
        assert torch.equal(whole, exact) and torch.equal(small, exact[:100])


def not_numbers(rank: int) -> list[Tensor]:
    group = world_of(2)
    found = []
    for op in ("sum", "max", "min"):
        tensor = torch.tensor([1.0, float("nan"), float("inf")]) if rank else torch.tensor([float("nan"), 1.0, 1.0])
        all_reduce(tensor, group, op).wait()
        found.append(tensor)
    return found


def test_nan_and_infinity_arrive():
    for found in run_ranks(2, not_numbers):
        for tensor, last in zip(found, (float("inf"), float("inf"), 1.0), strict=True):
            assert tensor[:2].isnan().all() and tensor[2] == last


def in_flight(rank: int) -> list[int]:
    """Rank 0 fills the slots while rank 1 does not come, and launches more than they hold when it may; nothing that it
    puts is lost.
    """
    group = world_of(2)
    if rank:
        dist.recv(torch.zeros(1), 0)
    tensors = [torch.full((SLOT // 4,), float(number + rank)) for number in range(3 * SLOTS)]
    pending = [all_reduce(tensor, group) for tensor in tensors[:SLOTS]]
    if not rank:
        dist.send(torch.zeros(1), 1)
    pending += [all_reduce(tensor, group) for tensor in tensors[SLOTS:]]
    for work in pending:
        work.wait()
    return [int(tensor[-1]) for tensor in tensors]


def test_a_launch_that_finds_slots_does_not_wait():
    assert run_ranks(2, in_flight) == [[2 * number + 1 for number in range(3 * SLOTS)]] * 2


def at_different_places(rank: int) -> list[float]:
    """As the ends of a pipeline wait for a tied embedding: the first before it sends, the last after
    it has received.
    """
    group, found = world_of(2), []
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
        pending, result, wanted = launched(kind, 7, group, 2 * LARGEST // 4)
        if rank:
            dist.recv(torch.zeros(1), 0)
        pending.wait()
        if not rank:
            dist.send(torch.zeros(1), 1)
        assert torch.equal(result(), wanted)
        found.append(float(wanted[-1]))
    return found


@pytest.mark.slow
def test_a_wait_depends_on_no_later_deed_of_another():
    run_ranks(2, at_different_places)


def nothing_shared(rank: int, monkeyed: str) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        if monkeyed == "host" and rank:
            here = shared_memory._Host.here(rank)
            patch.setattr(shared_memory._Host, "here", lambda rank: replace(here, boot="elsewhere"))
        if (
            monkeyed == "clone" and rank
        ):  # a virtual machine that is a clone: the same boot, namespace and process ids, but other memory
            another, real = shared_memory._created(2).descriptor, os.open
            patch.setattr(
                os, "open", lambda path, *rest: another if str(path).startswith("/proc/") else real(path, *rest)
            )
        if monkeyed == "memory" and rank == 0:
            patch.setattr(os, "memfd_create", lambda *_: (_ for _ in ()).throw(OSError("none here")))
        if monkeyed == "kernels" and rank:
            patch.setenv("MEGAZERO_FUSED", "reference")
        group = build_grid(Axes(dp=2), shared_memory=monkeyed != "flag").world
        if group.exchange is not None:
            return False
        tensor = torch.ones(3)
        all_reduce(tensor, group).wait()
        assert tensor.tolist() == [2.0] * 3
        return True


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("monkeyed", ["host", "clone", "memory", "kernels", "flag"])
def test_where_nothing_is_shared_the_backend_carries_it(monkeyed):
    assert run_ranks(2, nothing_shared, monkeyed) == [True, True]


def sealed(rank: int) -> list[str]:
    """What somebody may not do to the file of a group: shrink it, which would kill who touches what is gone, or unseal
    it.
    """
    kept: list[int] = []
    real = shared_memory._created

    def kept_open(size: int) -> object:
        file = real(size)
        kept.append(os.dup(file.descriptor))
        return file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_created", kept_open)
        group = world_of(2)
    refused = []
    for file in kept[-1:] if rank == 0 else []:
        size = os.fstat(file).st_size
        deeds: dict[str, Callable[[], object]] = {
            "shrink": partial(os.ftruncate, file, 0),
            "grow": partial(os.ftruncate, file, 2 * size),
            "seal": partial(fcntl.fcntl, file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        }
        for name, deed in deeds.items():
            try:
                deed()
            except PermissionError:
                refused.append(name)
    tensor = torch.ones(LARGEST // 4)
    all_reduce(tensor, group).wait()
    assert bool((tensor == 2.0).all())
    for file in kept:
        os.close(file)
    return refused


def test_the_file_is_sealed():
    assert run_ranks(2, sealed) == [["shrink", "grow", "seal"], []]


def descriptors(rank: int) -> tuple[int, int]:
    """Open files before and after; what the groups themselves keep is let go with them."""
    build_grid(Axes(dp=2))
    before = len(os.listdir("/proc/self/fd"))
    group = world_of(2)
    during = len(os.listdir("/proc/self/fd"))
    assert during > before
    barrier(group)
    del group
    return before, len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_open():
    for before, after in run_ranks(2, descriptors):
        assert after == before
    assert not list(Path("/dev/shm").glob("*megazero*"))


def lonely(rank: int, how: str, seconds: float) -> None:
    """Rank 1 does not do its part of the second all-reduce."""
    group = build_grid(Axes(dp=2), timeout=timedelta(seconds=seconds)).world
    all_reduce(torch.ones(2), group).wait()
    if rank:
        if how == "dies":
            os._exit(3)
        if how == "leaves":
            group.exchange = None
        time.sleep(20)
    begin = time.monotonic()
    try:
        all_reduce(torch.ones(2), group).wait()
    finally:
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("how", "seconds", "words"),
    [("dies", 60.0, "has ended"), ("leaves", 60.0, "has ended"), ("sleeps", 1.0, "for 1 s")],
)
def test_a_rank_that_does_not_come(how, seconds, words):
    said = last_words(2, lonely, how, seconds)
    assert "PeerError: " in said and words in said and "rank 1, with which rank 0" in said


def unequal(rank: int) -> list[str]:
    """An error on every rank, at once, for sizes that differ; and afterwards, for the group is broken."""
    group, said = world_of(3), []
    for numel in (10 + 2 * (rank == 0), 4):
        try:
            all_reduce(torch.ones(numel), group).wait()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_unequal_sizes_are_an_error_and_no_sum():
    for rank, (first, second) in enumerate(run_ranks(3, unequal)):
        sizes, ended = "rank 0: 48 bytes, rank 1: 40 bytes, rank 2: 40 bytes", "has ended"
        assert sizes in first or ended in first
        assert any(words in second for words in (sizes, ended, f"rank {rank} has left"))
