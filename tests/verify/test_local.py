"""Collectives and messages between ranks that are threads: right, as late as can be, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.mpu import collectives
from megazero.mpu.axes import Axes
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.p2p import Channels, Tag
from megazero.verify.local import LocalWorld
from megazero.verify.turns import RankFailed, Standstill

FOUR = Axes(dp=4)


def on_ranks(axes: Axes, work: Callable[[ProcessGrid], Any], *, as_nccl: bool = False) -> list[Any]:
    world = LocalWorld(axes, as_nccl=as_nccl)
    return world.turns.run(lambda rank: work(world.grid(rank)))


def values(rank: int, n: int = 8) -> Tensor:
    return torch.arange(1.0, n + 1, dtype=torch.float64) * 10**rank


@pytest.mark.parametrize("as_nccl", [False, True])
def test_every_collective(as_nccl: bool) -> None:
    def work(grid: ProcessGrid) -> list[Tensor]:
        dp, own = grid.dp, values(grid.rank)
        total, most, part, every, exchanged, told = own.clone(), own.clone(), own[:2].clone(), own.repeat(4), own, own
        exchanged, told = torch.zeros(8, dtype=torch.float64), own.clone()
        collectives.all_reduce(total, dp).wait()
        collectives.all_reduce(most, dp, "max").wait()
        collectives.reduce_scatter(part, own, dp).wait()
        collectives.all_gather(every, own, dp).wait()
        collectives.all_to_all(exchanged, own, dp).wait()
        collectives.broadcast(told, dp, 2).wait()
        collectives.barrier(dp)
        return [total, most, part, every, exchanged, told]

    all_values = [values(rank) for rank in range(4)]
    total = torch.stack(all_values).sum(0)
    for rank, (summed, most, part, every, exchanged, told) in enumerate(on_ranks(FOUR, work, as_nccl=as_nccl)):
        assert torch.equal(summed, total) and torch.equal(most, all_values[3])
        assert torch.equal(part, total[2 * rank : 2 * rank + 2])
        assert torch.equal(every, torch.cat(all_values)) and torch.equal(told, all_values[2])
        assert torch.equal(exchanged, torch.cat([other[2 * rank : 2 * rank + 2] for other in all_values]))


def test_a_result_is_not_there_before_wait() -> None:
    def work(grid: ProcessGrid) -> tuple[Tensor, Tensor, Tensor]:
        own = values(grid.rank)
        every, total = torch.zeros(32, dtype=torch.float64), own.clone()
        piece = every[8 * grid.rank : 8 * grid.rank + 8].copy_(own)
        gathering, summing = collectives.all_gather(every, piece, grid.dp), collectives.all_reduce(total, grid.dp)
        before = torch.cat([every, total])
        gathering.wait()
        summing.wait()
        return before, piece.clone(), every

    for rank, (before, piece, every) in enumerate(on_ranks(FOUR, work)):
        assert int(before.isnan().sum()) == 32 and torch.equal(piece, values(rank)), "its own piece alone stays"
        assert torch.equal(every, torch.cat([values(other) for other in range(4)]))


def test_other_collectives_of_two_ranks_are_an_error_that_names_both() -> None:
    def work(grid: ProcessGrid) -> None:
        own = values(grid.rank)
        collectives.all_reduce(own[: 8 - (grid.rank == 3)].contiguous(), grid.dp).wait()

    with pytest.raises(RankFailed, match=r"rank 3 launches all-reduce of 7 .*, and rank 0 all-reduce of 8"):
        on_ranks(FOUR, work)


def test_a_rank_that_does_not_come_is_waited_for_in_words() -> None:
    def work(grid: ProcessGrid) -> None:
        if grid.rank:
            collectives.all_reduce(values(grid.rank), grid.dp).wait()

    with pytest.raises(Standstill, match=r"rank 1 in all-reduce of 8 .* of ranks 0, 1, 2, 3"):
        on_ranks(FOUR, work)


@pytest.mark.parametrize("as_nccl", [False, True])
def test_messages_arrive_by_their_tags(as_nccl: bool) -> None:
    def work(grid: ProcessGrid) -> list[Tensor]:
        channels, tags = Channels(grid), [Tag(False, 0, n) for n in range(3)]
        if grid.at.pp == 0:
            for tag in tags:
                channels.send(values(tag.micro_batch), 1, tag)
            return []
        buffers = [torch.zeros(8, dtype=torch.float64) for _ in tags]
        handles = [channels.receive(buffer, 0, tag) for buffer, tag in zip(buffers, tags, strict=True)]
        assert all(buffer.isnan().all() for buffer in buffers)
        for handle in reversed(handles):
            handle.wait()
        channels.flush()
        return buffers

    _, received = on_ranks(Axes(pp=2), work, as_nccl=as_nccl)
    assert all(torch.equal(buffer, values(n)) for n, buffer in enumerate(received))


def test_nccl_would_mistake_messages_of_another_order() -> None:
    def work(grid: ProcessGrid) -> None:
        channels, tags = Channels(grid), [Tag(False, 0, n) for n in range(2)]
        for tag in tags if grid.at.pp == 0 else reversed(tags):
            if grid.at.pp == 0:
                channels.send(values(0), 1, tag)
            else:
                channels.receive(values(1), 0, tag).wait()

    on_ranks(Axes(pp=2), work)
    with pytest.raises(
        RankFailed, match=r"receives the hidden states of micro-batch 1 .*, and the hidden states of mic"
    ):
        on_ranks(Axes(pp=2), work, as_nccl=True)
