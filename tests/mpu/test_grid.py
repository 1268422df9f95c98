"""The grid's arithmetic without processes, and groups that really talk only to their members."""

from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from megazero.mpu.axes import Axes, Coordinates, SharingAxes
from megazero.mpu.collectives import all_reduce
from megazero.mpu.grid import build_grid, single_process_grid
from megazero.mpu.parameter import StateGroup
from tests.ranks import run_ranks


@pytest.mark.parametrize("axes", [Axes(12, 1, 1, 4), Axes(2, 3, 2, 4), Axes(1, 1, 1, 1), Axes(3, 5, 1, 2)])
def test_rank_and_coordinates_are_inverse(axes):
    places = product(range(axes.pp), range(axes.dp), range(axes.cp), range(axes.tp))
    assert [axes.rank(Coordinates(*place)) for place in places] == list(range(axes.world_size))
    assert all(axes.rank(axes.coordinates(rank)) == rank for rank in range(axes.world_size))


def test_forty_eight_ranks_of_the_mission():
    axes = Axes(pp=12, tp=4)
    assert axes.world_size == 48
    at = axes.coordinates(22)
    assert (at.pp, at.dp, at.cp, at.tp) == (5, 0, 0, 2)
    assert axes.tensor_ranks(at) == (20, 21, 22, 23)
    assert axes.pipeline_ranks(at) == tuple(range(2, 48, 4))
    assert axes.replica_ranks(at) == (22,)
    assert axes.tied_ranks(at) == (2, 46)


def test_groups_of_an_axis_partition_the_world():
    axes = Axes(pp=3, dp=2, cp=2, tp=4)
    everyone = [axes.coordinates(rank) for rank in range(axes.world_size)]
    by_size = [(axes.tensor_ranks, 4), (axes.pipeline_ranks, 3), (axes.data_ranks, 2), (axes.context_ranks, 2)]
    by_size.append((axes.replica_ranks, 4))
    for ranks_of, size in by_size:
        groups = {ranks_of(at) for at in everyone}
        assert Counter(rank for group in groups for rank in group) == Counter(range(48))
        assert all(len(group) == size for group in groups)
        assert all(rank in ranks_of(axes.coordinates(rank)) for rank in range(48))
    tied = {axes.tied_ranks(at) for at in everyone}
    assert len(tied) == 4 and all(len(group) == 8 for group in tied)
    spread = SharingAxes(pp=4, dp=2, sharing=(1, 2))  # as of modules of a user
    assert spread.tied_ranks(Coordinates(3, 1, 0, 0)) == (2, 3, 4, 5)
    assert spread.inner_ranks(StateGroup.TIED, Coordinates(2, 1, 0, 0)) == (2, 3, 4, 5)
    assert Axes(pp=1, dp=3, tp=2).tied_ranks(Coordinates(0, 1, 0, 1)) == (1, 3, 5)
    at = axes.coordinates(37)
    assert axes.state_ranks(StateGroup.REPLICAS, at) == (33, 37, 41, 45)
    assert axes.state_ranks(StateGroup.TIED, at) == (1, 5, 9, 13, 33, 37, 41, 45)


def test_one_process_needs_no_torch_distributed():
    grid = build_grid(Axes())
    assert not torch.distributed.is_initialized()
    assert grid.replicas is grid.dp and grid.tp.size == 1
    assert all(groups.inner.size == groups.across.size == 1 for groups in grid.shared.values())
    assert single_process_grid().world.handle is None


def sums_of_ranks(rank: int, axes: Axes, guest_backend: str | None = None) -> dict[str, float]:
    grid = build_grid(axes, guest_backend=guest_backend)
    sums = {}
    groups = {name: getattr(grid, name) for name in ("world", "tp", "pp", "dp", "cp", "replicas")}
    for kind, shared in grid.shared.items():
        groups |= {f"{kind.value} inner": shared.inner, f"{kind.value} across": shared.across}
    for name, group in groups.items():
        number = torch.tensor(float(rank), dtype=torch.float64)
        all_reduce(number, group).wait()
        assert group.ranks[group.index] == rank
        assert (group.handle is None) == (group.size == 1)
        assert all(group is other for other in groups.values() if other.ranks == group.ranks), "one group for its ranks"
        sums[name] = number.item()
    return sums


@pytest.mark.few(cases=2)
@pytest.mark.parametrize(
    "axes",
    [
        *(Axes(pp=2, tp=2), Axes(dp=2, tp=2), Axes(pp=3), Axes(dp=4), Axes(pp=2, dp=2), Axes(dp=2, cp=2)),
        *(Axes(dp=2, cp=2, shard_size=2), Axes(dp=4, shard_size=1), Axes(pp=3, dp=2, shard_size=1)),
        Axes(pp=2, dp=2, shard_size=2),
    ],
)
def test_groups_talk_to_their_members_only(axes):
    check_sums(axes, run_ranks(axes.world_size, sums_of_ranks, axes))


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("axes", [Axes(pp=3, dp=2), Axes(pp=3, dp=2, shard_size=1), Axes(pp=3, dp=2, shard_size=2)])
def test_groups_beside_a_callers_group_are_made_by_all_in_one_order(axes):
    """Ranks of the middle stage make the groups of the tied embedding too, as often as its own ranks."""
    check_sums(axes, run_ranks(axes.world_size, sums_of_ranks, axes, "gloo"))


def check_sums(axes: Axes, found: list[dict[str, float]]) -> None:
    for rank, sums in enumerate(found):
        at = axes.coordinates(rank)
        ranks_of = {"tp": axes.tensor_ranks, "pp": axes.pipeline_ranks, "dp": axes.data_ranks, "cp": axes.context_ranks}
        assert sums["world"] == sum(range(axes.world_size)) and sums["replicas"] == sum(axes.replica_ranks(at))
        assert all(sums[name] == sum(ranks(at)) for name, ranks in ranks_of.items())
        assert ("tied inner" in sums) == (at.pp in (0, axes.pp - 1))
        for kind in StateGroup:
            if f"{kind.value} inner" in sums:
                assert sums[f"{kind.value} inner"] == sum(axes.inner_ranks(kind, at))
                assert sums[f"{kind.value} across"] == sum(axes.across_ranks(kind, at))


def shapes() -> Iterator[Axes]:
    """Grids of several sizes of every axis, with every shard size."""
    for pp, dp, cp, tp in product((1, 3), (1, 2, 6), (1, 2), (1, 2)):
        yield Axes(pp, dp, cp, tp)
        yield from (Axes(pp, dp, cp, tp, size) for size in range(1, dp * cp + 1) if dp * cp % size == 0)


@pytest.mark.slow
def test_neighbours_and_the_ranks_across_divide_those_that_hold_the_same_parameters():
    """Each set of neighbours and each shard once; neighbours are on one stage and follow each other on the dp axis."""
    for axes in shapes():
        everyone = [axes.coordinates(rank) for rank in range(axes.world_size)]
        for kind, at in product(StateGroup, everyone):
            if kind is StateGroup.TIED and at.pp not in (0, axes.pp - 1):
                continue
            held, inner, across = (
                ranks_of(kind, at) for ranks_of in (axes.state_ranks, axes.inner_ranks, axes.across_ranks)
            )
            rank = axes.rank(at)
            assert set(inner) & set(across) == {rank} and len(inner) * len(across) == len(held)
            assert set(held) == {r for other in across for r in axes.inner_ranks(kind, axes.coordinates(other))}
            assert all(axes.inner_ranks(kind, axes.coordinates(other)) == inner for other in inner)
            for other in across:
                theirs = axes.inner_ranks(kind, axes.coordinates(other))
                assert axes.across_ranks(kind, axes.coordinates(other)) == across
                assert theirs.index(other) == inner.index(rank), "they store the same shard"
            if axes.shard_size is None:
                assert inner == held and across == (rank,)
            else:
                assert len(inner) == axes.shard_size
                assert inner == axes.inner_ranks(StateGroup.REPLICAS, at), "on one stage, and the same for both kinds"
                assert inner == tuple(range(inner[0], inner[0] + axes.tp * axes.shard_size, axes.tp))


def test_numbers_of_two_sets_of_neighbours():
    axes = Axes(pp=3, dp=4, tp=2, shard_size=2)
    at = axes.coordinates(21)
    assert (at.pp, at.dp, at.tp) == (2, 2, 1)
    assert (axes.inner_ranks(StateGroup.REPLICAS, at), axes.across_ranks(StateGroup.REPLICAS, at)) == (
        (21, 23),
        (17, 21),
    )
    assert (axes.inner_ranks(StateGroup.TIED, at), axes.across_ranks(StateGroup.TIED, at)) == ((21, 23), (1, 5, 17, 21))
    assert Axes(dp=2, cp=2, shard_size=2).inner_ranks(StateGroup.REPLICAS, Coordinates(0, 1, 0, 0)) == (2, 3)


def grid_of_wrong_size(rank: int) -> str:
    with pytest.raises(ValueError, match=r"= 3 != world size \(2\)") as error:
        build_grid(Axes(pp=3))
    return str(error.value)


def test_axes_that_do_not_make_the_world():
    assert all("pp(3)" in message for message in run_ranks(2, grid_of_wrong_size))


def grid_of_wrong_shards(rank: int) -> None:
    with pytest.raises(ValueError, match=r"the shard size 2 does not divide dp\(3\) \* cp\(1\)"):
        build_grid(Axes(dp=3, shard_size=2))


def test_a_shard_size_that_does_not_divide_the_replicas():
    run_ranks(3, grid_of_wrong_shards)
