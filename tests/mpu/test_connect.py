"""Every group of a grid is used once before training, in an order in which no rank waits for another for ever."""

from __future__ import annotations

import pytest
import torch

from megazero.mpu import connect as connecting
from megazero.mpu.axes import Axes
from megazero.mpu.connect import connect, use_once
from megazero.mpu.grid import Group, build_grid
from megazero.mpu.parameter import StateGroup
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def connected(
    rank: int, axes: Axes, on_host: bool, quantised: bool = False
) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    """The groups that are used, with gloo in place of a backend that connects late; and traffic afterwards."""
    used: list[tuple[int, ...]] = []

    def counting(group: Group, device: torch.device, *, parts: bool) -> None:
        used.append(group.ranks)
        of_state = [each for own in grid.shared.values() for each in (own.inner, own.across)]
        assert parts == (quantised and group.ranks in {own.ranks for own in of_state})
        use_once(group, device, parts=parts)

    grid = build_grid(axes, shared_memory=False)
    grid.tp.traffic["all_reduce", torch.float32] += 7 * (grid.tp.size > 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connecting, "use_once", counting)
        if not on_host:
            patch.setattr(Group, "is_on_host", False)
        connect(grid, quantised=quantised)
    traffic = {str(group.ranks): sum(group.traffic.values()) for group in grid.step_groups}
    return used, {ranks: count for ranks, count in traffic.items() if count}


@pytest.mark.few(cases=2)
@pytest.mark.parametrize(
    "axes",
    [
        *(Axes(tp=2, dp=3), Axes(pp=3, dp=2), Axes(tp=2, pp=3), Axes(tp=2, pp=2, dp=2), Axes(dp=4)),
        *(Axes(dp=4, shard_size=2), Axes(pp=3, dp=2, shard_size=1), Axes(pp=2, dp=4, shard_size=2)),
    ],
)
def test_each_group_is_used_once_and_counts_nothing(axes: Axes) -> None:
    for rank, (used, traffic) in enumerate(run_ranks(axes.world_size, connected, axes, False, axes.dp == 3)):
        at = axes.coordinates(rank)
        wanted = [tuple(range(axes.world_size)), axes.tensor_ranks(at)]
        for kind in (StateGroup.REPLICAS, StateGroup.TIED)[: 2 if at.pp in (0, axes.pp - 1) else 1]:
            wanted += [axes.inner_ranks(kind, at), axes.across_ranks(kind, at)]
        assert used == [ranks for ranks in dict.fromkeys(wanted) if len(ranks) > 1]
        assert traffic == ({str(axes.tensor_ranks(at)): 7} if axes.tp > 1 else {})


def test_a_backend_that_connects_at_once_is_left_alone() -> None:
    assert all(used == [] for used, _ in run_ranks(4, connected, Axes(tp=2, dp=2), True))


def wrong(rank: int) -> str:
    group = build_grid(Axes(dp=3), shared_memory=False).dp
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connecting, "reduce_scatter", lambda part, whole, group: _Done(part.fill_(5)))
        with pytest.raises(RuntimeError) as failed:
            use_once(group, CPU)
    return str(failed.value)


class _Done:
    def __init__(self, result: torch.Tensor) -> None:
        self.result = result

    def wait(self) -> None:
        return


def test_a_wrong_first_result_is_an_error() -> None:
    assert run_ranks(3, wrong) == ["the first collectives of ranks [0, 1, 2] gave [5, 5, 5], not [3, 12, 21]"] * 3


@pytest.mark.parametrize("size", [2, 257, 384, 4096])
def test_sums_over_many_ranks_are_exact(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's view of a large group; the others' parts are added one after the other, in the dtype that travels."""
    ranks = torch.arange(size)

    def summed(dtype: torch.dtype) -> torch.Tensor:
        total = torch.zeros(size, dtype=dtype)
        for other in range(size):
            total += (size * ranks + other).to(dtype)
        return total

    collectives = {
        "all_reduce": lambda tensor, group: _Done(tensor.mul_(size)),
        "reduce_scatter": lambda part, whole, group: _Done(part.copy_(summed(whole.dtype)[1:2])),
        "all_gather": lambda every, part, group: _Done(every.copy_(summed(part.dtype))),
        "broadcast": lambda tensor, group, source: _Done(tensor.fill_(source)),
    }
    for name, fake in collectives.items():
        monkeypatch.setattr(connecting, name, fake)
    use_once(Group(tuple(range(size)), 1, None), CPU)
