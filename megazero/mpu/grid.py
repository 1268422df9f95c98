"""The process grid of a rank: the groups that it is in.

`Group` is a process group as a value that is passed as an argument. `ProcessGrid` holds the groups of one rank. Which
ranks a group has, `mpu.axes` computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fused_ops.native import library
from megazero.mpu.axes import Axes, Coordinates
from megazero.mpu.exchange import Exchange
from megazero.mpu.parameter import StateGroup
from megazero.mpu.shared_memory import share_memory

RanksOf = Callable[[Coordinates], tuple[int, ...]]
"""From a rank's coordinates to the ranks of one of its groups."""


class Mail(Protocol):
    """Messages between the members of a group that no backend carries. Ranks are global ones, as with torch, and tags
    are those of `mpu.p2p`.
    """

    def send(self, tensor: Tensor, rank: int, tag: Any) -> None:
        """Hand a tensor to a rank. It must not be written to afterwards."""

    def receive(self, buffer: Tensor, rank: int, tag: Any) -> Callable[[], None]:
        """Begin to receive from a rank; return a function that waits until the buffer has the message."""


@dataclass
class Group:
    """A process group as a value.

    ranks     global ranks of the members
    index     this rank's index among them
    handle    torch's process group; None in a group of one, whose collectives do nothing
    exchange  collectives through shared memory; None where the members are on several hosts, where the backend takes
              device tensors, and where shared memory is off or cannot be had
    mail      messages between members that are in one process (`megazero.verify`); None: the backend carries them
    traffic   bytes by (operation, dtype): a reduce-scatter's or an all-to-all's input, an all-gather's output, twice
              an all-reduce's tensor, the tensor of a broadcast, a send or a receive
    """

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None
    exchange: Exchange | None = None
    traffic: Counter[tuple[str, torch.dtype]] = field(default_factory=Counter)
    mail: Mail | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def backend(self) -> str:
        """The name of what carries collectives and messages; "" in a group of one."""
        return "" if self.handle is None else str(dist.get_backend(self.handle))

    @property
    def is_on_host(self) -> bool:
        """Whether the backend (gloo, MPI) takes host tensors only."""
        return self.backend in ("gloo", "mpi")

    @property
    def is_on_device(self) -> bool:
        """Whether the backend (NCCL) takes device tensors. False in a group of one."""
        return self.handle is not None and not self.is_on_host


@dataclass(frozen=True)
class StateGroups:
    """The ranks that hold the same parameters, as this rank divides them (`Axes.inner_ranks`, `across_ranks`).

    inner   the neighbours over which state is sharded, in the order of their shards
    across  the ranks that store the same shards: one of each set of neighbours. One rank where all are neighbours
    """

    inner: Group
    across: Group


def single_rank_group(rank: int = 0) -> Group:
    """The group of one rank."""
    return Group((rank,), 0, None)


@contextmanager
def uncounted(*groups: Group) -> Iterator[None]:
    """A context after which the traffic of these groups is what it was before."""
    before = [(group, group.traffic.copy()) for group in groups]
    yield
    for group, traffic in before:
        group.traffic.clear()
        group.traffic.update(traffic)


@dataclass
class ProcessGrid:
    """The grid from one rank's view: its coordinates, its device and its groups."""

    axes: Axes
    rank: int
    at: Coordinates
    device: torch.device
    world: Group
    tp: Group
    pp: Group
    dp: Group
    """The ranks that split a batch's samples."""
    cp: Group
    """The ranks that split a sample's tokens."""
    replicas: Group
    """dp x cp: the ranks that hold the same layers. With cp 1: `dp`."""
    shared: dict[StateGroup, StateGroups]
    """The groups over which parameters are reduced and their state is sharded; without those of a tied embedding on
    ranks of stages that do not hold it."""
    timeout: timedelta | None = None
    """How long a collective may take; None: torch's default."""
    made: list[dist.ProcessGroup] = field(default_factory=list)
    """Groups made next to a caller's default group. They have to be destroyed one by one."""
    memory_apart: bool = False
    """Whether model state is copied between device and host memory as on a GPU, also where a CPU has one memory."""

    def state_groups(self, group: StateGroup) -> StateGroups:
        """The groups over which parameters of this kind are reduced and sharded. This rank must hold such ones."""
        assert group in self.shared, f"rank {self.rank} of stage {self.at.pp} shares no {group.value} parameters"
        return self.shared[group]

    @property
    def step_groups(self) -> list[Group]:
        """The groups of whose collectives a step consists, each once, in one order on all ranks."""
        of_state = [each for groups in self.shared.values() for each in (groups.inner, groups.across)]
        return list({group.ranks: group for group in (self.world, self.tp, *of_state)}.values())


def single_process_grid(device: str | torch.device = "cpu") -> ProcessGrid:
    """The grid of a single process: every group is of size 1."""
    dp = single_rank_group()
    shared = StateGroups(single_rank_group(), single_rank_group())
    return ProcessGrid(
        Axes(),
        0,
        Coordinates(0, 0, 0, 0),
        torch.device(device),
        single_rank_group(),
        single_rank_group(),
        single_rank_group(),
        dp,
        single_rank_group(),
        dp,
        dict.fromkeys(StateGroup, shared),
    )


def build_grid(
    axes: Axes,
    device: str | torch.device = "cpu",
    timeout: timedelta | None = None,
    *,
    shared_memory: bool = True,
    guest_backend: str | None = None,
) -> ProcessGrid:
    """The grid of this rank. `torch.distributed` must be initialised, unless the world is one process.

    timeout        of the groups' collectives (torch does not take it from the world's group)
    shared_memory  groups within a host exchange CPU tensors through shared memory where the backend is gloo or MPI
    guest_backend  the caller owns torch's default group, and it stays as it is. All groups, the world's included, are
                   new ones of this backend, listed in `made`

    All ranks call this. A rank creates only the groups that it is a member of, in the same order everywhere, so
    start-up does not grow with the number of groups (with `guest_backend` it does). Raises ValueError when the product
    of the axes is not the world size, or when the shard size does not divide dp x cp.
    """
    if axes.world_size == 1 and not dist.is_initialized():
        return single_process_grid(device)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if axes.world_size != world_size:
        raise ValueError(
            f"pp({axes.pp}) * dp({axes.dp}) * cp({axes.cp}) * tp({axes.tp}) = {axes.world_size} != world size "
            f"({world_size})"
        )
    if axes.shard_size is not None and axes.dp * axes.cp % axes.shard_size:
        raise ValueError(f"the shard size {axes.shard_size} does not divide dp({axes.dp}) * cp({axes.cp})")
    at = axes.coordinates(rank)
    listed: list[dist.ProcessGroup] = []
    world = tuple(range(world_size))

    def handle_of(ranks_of: RanksOf) -> dist.ProcessGroup | None:
        if guest_backend is not None:
            return _made_by_all(axes, ranks_of, rank, timeout, guest_backend, listed)
        ranks = ranks_of(at)
        return None if len(ranks) == 1 else dist.group.WORLD if ranks == world else join_group(ranks, timeout)

    def group(ranks_of: RanksOf) -> Group:
        return _group_of(ranks_of(at), rank, handle_of(ranks_of), timeout, shared_memory)

    grid = assembled(axes, rank, device, group, timeout, absent=handle_of if guest_backend is not None else None)
    grid.made = listed
    return grid


def assembled(
    axes: Axes,
    rank: int,
    device: str | torch.device,
    make: Callable[[RanksOf], Group],
    timeout: timedelta | None = None,
    absent: Callable[[RanksOf], object] | None = None,
) -> ProcessGrid:
    """The grid of a rank from its groups, which `make` makes one after the other in the same order on all ranks: each
    group of ranks once.

    absent: called with the ranks of a group that other stages make, and this one does not
    """
    at = axes.coordinates(rank)
    made: dict[tuple[int, ...], Group] = {}

    def group(ranks_of: RanksOf) -> Group:
        ranks = ranks_of(at)
        if ranks not in made:
            made[ranks] = make(ranks_of)
        return made[ranks]

    everybody = group(lambda _: tuple(range(axes.world_size)))
    tp, dp, pp = group(axes.tensor_ranks), group(axes.data_ranks), group(axes.pipeline_ranks)
    cp, replicas = group(axes.context_ranks), group(axes.replica_ranks)
    shared = {}
    for kind in StateGroup:
        inner, across = partial(axes.inner_ranks, kind), partial(axes.across_ranks, kind)
        if kind is StateGroup.REPLICAS or at.pp in axes.tied_stages:
            shared[kind] = StateGroups(group(inner), group(across))
        elif absent is not None:  # of a tied embedding's two groups, the one that spans stages is new
            absent(inner if axes.shard_size is None else across)
    return ProcessGrid(axes, rank, at, torch.device(device), everybody, tp, pp, dp, cp, replicas, shared, timeout)


def _made_by_all(
    axes: Axes,
    ranks_of: RanksOf,
    rank: int,
    timeout: timedelta | None,
    backend: str,
    listed: list[dist.ProcessGroup],
) -> dist.ProcessGroup | None:
    """Create all groups of this kind in the grid. Return this rank's and add it to `listed`; None for one member.

    Every rank of the world creates all groups in the same order, also those that it is not in. Only then does torch
    give each a name that was never used before. The caller's default group outlives them, and its store keeps old
    names.
    """
    mine: dist.ProcessGroup | None = None
    options = stream_options(backend, timeout)
    for ranks in dict.fromkeys(ranks_of(axes.coordinates(other)) for other in range(axes.world_size)):
        if len(ranks) == 1:
            continue
        handle = dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=options)
        if rank in ranks:
            assert isinstance(handle, dist.ProcessGroup)
            mine = handle
            listed.append(handle)
    return mine


def stream_options(backend: str, timeout: timedelta | None, max_ctas: int | None = None) -> Any:
    """Options of a new group: for NCCL a stream of high priority, else None.

    max_ctas  the most thread blocks (CTAs) of a collective or message; None: NCCL decides

    NCCL's kernels are small and other ranks wait for them. At equal priority they would wait for the end of a GEMM that
    fills the GPU.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    if timeout is not None:
        options._timeout = timeout
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return options


def join_group(
    ranks: Sequence[int], timeout: timedelta | None, like: Group | None = None, max_ctas: int | None = None
) -> dist.ProcessGroup:
    """A new group of these global ranks. Each of its members calls this; other ranks do not.

    Its backend is that of `like`, or by default that of torch's default group. max_ctas: as in `stream_options`.
    """
    backend = dist.get_backend(None if like is None else like.handle)
    options = stream_options(backend, timeout, max_ctas)
    handle = dist.new_group(
        list(ranks), timeout=timeout, backend=backend, pg_options=options, use_local_synchronization=True
    )
    assert isinstance(handle, dist.ProcessGroup)
    return handle


def background_group(grid: ProcessGrid, timeout: timedelta = timedelta(days=1)) -> Group:
    """A second group of all ranks, over gloo, for a background thread. All ranks call this.

    On the run's own groups the thread's messages would mix with those of training. timeout: how long one rank may be
    behind the others; a slow disk decides this.
    """
    world = grid.world
    if world.handle is None:
        return single_rank_group(world.ranks[0])
    handle = dist.new_group(list(world.ranks), timeout=timeout, backend="gloo")
    assert isinstance(handle, dist.ProcessGroup)
    if grid.made:
        grid.made.append(handle)
    return Group(world.ranks, world.index, handle)


def _group_of(
    ranks: tuple[int, ...], rank: int, handle: dist.ProcessGroup | None, timeout: timedelta | None, shared_memory: bool
) -> Group:
    group = Group(ranks, ranks.index(rank), handle)
    if handle is not None and shared_memory and group.is_on_host:
        kernels = library.host_library(library.choice())
        memory = share_memory(handle, group.index, group.size, kernels, timeout or dist.default_pg_timeout)
        if memory is not None and kernels is not None:
            group.exchange = Exchange(memory, kernels)
    return group
