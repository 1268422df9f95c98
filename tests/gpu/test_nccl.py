"""NCCL with a world of one: its groups as the program makes them, and every collective of a step through it.

One rank sums and gathers nothing new, so a run equals the one without process groups to the bit; what is shown is that
the calls are taken, that waits are those of streams, and that graphs are captured beside NCCL's threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megazero.mpu import collectives
from megazero.mpu.axes import Axes, Coordinates
from megazero.mpu.grid import Group, ProcessGrid, StateGroups, single_rank_group, stream_options
from megazero.mpu.parameter import StateGroup
from megazero.system import device as devices
from megazero.zero.layout import SharedBy, state_groups
from tests.gpu.jobs import assert_equal, deterministic_again, flags_of, job_on_card, train
from tests.gpu.synchronisation import raise_on_synchronisation
from tests.stages import STAGES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not devices.cuda_available() or not dist.is_nccl_available(), reason="no NVIDIA GPU, or torch without NCCL"
    ),
]

NUMBERS = ["--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "1e-3", "--deterministic"]


def one_rank(backend: str, device: torch.device, *, hybrid: bool = False) -> Iterator[ProcessGrid]:
    """A grid whose world and dp groups have a handle although they have one member.

    hybrid: dp is also the group of the ranks that store the same shards.
    """
    timeout = timedelta(seconds=60)
    dist.init_process_group(
        backend,
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timeout,
        pg_options=stream_options(backend, timeout),
    )
    world = Group((0,), 0, dist.group.WORLD)
    made = dist.new_group(
        [0], timeout=timeout, pg_options=stream_options(backend, timeout), use_local_synchronization=True
    )
    assert isinstance(made, dist.ProcessGroup)
    dp = Group((0,), 0, made)
    yield ProcessGrid(
        Axes(),
        0,
        Coordinates(0, 0, 0, 0),
        device,
        world,
        single_rank_group(),
        single_rank_group(),
        dp,
        single_rank_group(),
        dp,
        dict.fromkeys(StateGroup, StateGroups(dp, dp if hybrid else single_rank_group())),
        timeout,
    )
    dist.destroy_process_group()


@pytest.fixture
def grid() -> Iterator[ProcessGrid]:
    yield from one_rank("nccl", devices.resolve("cuda", 0))


@pytest.fixture
def hybrid_grid() -> Iterator[ProcessGrid]:
    yield from one_rank("nccl", devices.resolve("cuda", 0), hybrid=True)


def sets_of_two(axes: Axes, at: Coordinates) -> dict[StateGroup, SharedBy]:
    """As if two ranks held each shard. For one rank a step's list has no sum across, and no backward that is cut."""
    return {group: shared._replace(across=2) for group, shared in state_groups(axes, at).items()}


def test_every_collective(grid: ProcessGrid) -> None:
    for group in (grid.world, grid.replicas):
        x = torch.arange(12.0, device=grid.device)
        for launch in (
            partial(collectives.all_reduce, x),
            partial(collectives.all_reduce, x, op="max"),
            partial(collectives.broadcast, x),
            partial(collectives.all_gather, x, x),
            partial(collectives.reduce_scatter, x, x),
        ):
            launch(group=group).wait()  # the first makes the communicator
            with raise_on_synchronisation(grid.device):
                launch(group=group).wait()
            assert torch.equal(x, torch.arange(12.0, device=grid.device))
        out = torch.empty(12, device=grid.device)
        collectives.all_gather(out, x, group).wait()
        assert torch.equal(out, x)


@pytest.mark.parametrize(
    "more", [["--zero-stage", "1"], ["--zero-stage", "2"], ["--zero-stage", "1", "--cuda-graphs"]], ids=" ".join
)
def test_a_run_equals_the_one_without_groups(more: list[str], grid: ProcessGrid, corpus: Path, tmp_path: Path) -> None:
    flags = flags_of([*NUMBERS, "--train-iters", "10", *more], corpus, tmp_path / "cache")
    with deterministic_again():
        alone, ours = train(flags), train(flags, grid)
    assert_equal(ours, alone)


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_with_hybrid_shards_equals_the_one_without_groups(
    stage: int, hybrid_grid: ProcessGrid, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = flags_of([*NUMBERS, "--train-iters", "10", "--zero-stage", str(stage)], corpus, tmp_path / "cache")
    with deterministic_again():
        alone = train(flags)
        monkeypatch.setattr("megazero.zero.state.state_groups", sets_of_two)
        ours = train(flags, hybrid_grid)
    assert_equal(ours, alone)
    assert hybrid_grid.replicas.traffic["all_reduce", torch.float32] > 0


def test_a_step_waits_for_no_collective(grid: ProcessGrid, corpus: Path, tmp_path: Path) -> None:
    flags = "--micro-batch-size 2 --global-batch-size 4 --train-iters 50 --log-interval 50 --zero-stage 1".split()
    job, _ = job_on_card(flags_of(flags, corpus, tmp_path / "cache"), grid)
    for _ in range(2):
        job.trainer.train_step(stop=False)
    with raise_on_synchronisation(grid.device):
        for _ in range(2):
            job.trainer.train_step(stop=False)
    assert grid.replicas.traffic["reduce_scatter", torch.float32] > 0


def test_a_copy_of_nccl_runs_beside_a_product(grid: ProcessGrid) -> None:
    """On another stream than what computes: the trace has both at one time."""
    a, piece = torch.randn(8192, 8192, device=grid.device), torch.randn(1 << 28, device=grid.device)
    whole = torch.empty_like(piece)
    collectives.all_gather(whole, piece, grid.replicas).wait()
    a @ a
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        handle = collectives.all_gather(whole, piece, grid.replicas)
        for _ in range(3):
            a @ a
        handle.wait()
        torch.cuda.synchronize()
    events = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = [event.time_range for event in events if "memcpy" in event.name.lower() or "nccl" in event.name.lower()]
    products = [event.time_range for event in events if "gemm" in event.name.lower() or "nvjet" in event.name.lower()]
    assert copies and products, [event.name for event in events]
    assert any(copy.start < product.end and product.start < copy.end for copy in copies for product in products)
