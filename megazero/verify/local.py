"""Groups of ranks that are threads of one process (`verify.turns`): their collectives and messages.

They are as late as a backend may make them. A result is written by `wait` and not before, and until then its place
holds NaN; what is sent must stay as it is. So a missing wait, and a sent tensor that is overwritten, change a result
every time and not now and then. Sums are made in the order of the group's ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero.mpu.axes import Axes
from megazero.mpu.exchange import Exchange, SharedMemoryWork
from megazero.mpu.grid import Group, ProcessGrid, RanksOf, assembled
from megazero.mpu.p2p import Tag
from megazero.verify.turns import Turns


class Mismatch(RuntimeError):
    """Ranks of a group have launched different collectives, or a message is not the one that is received."""


class Launch(NamedTuple):
    """What a rank launches: all members must launch the same."""

    kind: str
    dtype: torch.dtype
    elements: int
    detail: object

    def __str__(self) -> str:
        return f"{self.kind} of {self.elements} {self.dtype} ({self.detail})"


@dataclass
class _Collective:
    """One collective of a group: what each member has launched, and how many have taken the result."""

    parts: dict[int, Tensor] = field(default_factory=dict)
    launch: Launch | None = None
    result: Tensor | None = None
    taken: int = 0


@dataclass
class _Members:
    """What the members of a group share: the collectives that not all have finished, by number."""

    ranks: tuple[int, ...]
    under_way: dict[int, _Collective] = field(default_factory=dict)


@dataclass
class _Channel:
    """Messages of one direction from a rank to another: how many have been sent and are received, and those that have
    not arrived, by number with their tags.
    """

    sent: int = 0
    posted: int = 0
    letters: dict[int, tuple[Tag, Tensor]] = field(default_factory=dict)


class LocalWorld:
    """All ranks of a world in one process.

    as_nccl  groups say of themselves what those of NCCL say: the program then warms up, fills its buckets and orders
             its messages as on GPUs, and copies between the device's memory and the host's as if these were two
    """

    def __init__(self, axes: Axes, *, as_nccl: bool) -> None:
        self.axes, self.as_nccl, self.turns = axes, as_nccl, Turns(axes.world_size)
        self._members: dict[tuple[int, ...], _Members] = {}
        self.channels: dict[tuple[int, int, bool], _Channel] = {}

    def grid(self, rank: int) -> ProcessGrid:
        """The grid of a rank, on the CPU."""

        def make(ranks_of: RanksOf) -> Group:
            ranks = ranks_of(self.axes.coordinates(rank))
            if len(ranks) == 1:
                return Group(ranks, 0, None)
            members = self._members.setdefault(ranks, _Members(ranks))
            exchange, mail = LocalExchange(self.turns, members, rank), LocalMail(self, rank)
            handle: Any = members
            kind = AsNcclGroup if self.as_nccl else LocalGroup
            return kind(ranks, ranks.index(rank), handle, exchange, mail=mail)

        return replace(assembled(self.axes, rank, "cpu", make), memory_apart=self.as_nccl)


class LocalGroup(Group):
    """A group of threads."""

    backend = "threads"
    is_on_host = True


class AsNcclGroup(LocalGroup):
    """A group of threads that the program takes for one of NCCL."""

    is_on_host = False


class _Work(SharedMemoryWork):
    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class LocalExchange(Exchange):
    """The collectives of a group of threads, for one of its members."""

    def __init__(self, turns: Turns, members: _Members, rank: int) -> None:
        self._turns, self._shared, self._rank = turns, members, rank
        self._index, self._size = members.ranks.index(rank), len(members.ranks)
        self._launched = 0

    def takes(self, tensor: Tensor) -> bool:
        return True

    def all_reduce(self, tensor: Tensor, op: str) -> SharedMemoryWork:
        reduce = _REDUCE[op]
        return self._launch("all-reduce", tensor, tensor, op, lambda parts: reduce(parts).view(-1), tensor.view(-1))

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> SharedMemoryWork:
        def own(result: Tensor) -> Tensor:
            return result.view(self._size, -1)[self._index]

        return self._launch("reduce-scatter", whole, output, "sum", _sum, output.view(-1), own)

    def all_gather(self, output: Tensor, piece: Tensor) -> SharedMemoryWork:
        return self._launch("all-gather", piece, output, "", torch.cat, output.view(-1))

    def all_to_all(self, output: Tensor, source: Tensor) -> SharedMemoryWork:
        def own(result: Tensor) -> Tensor:
            return result.view(self._size, self._size, -1)[:, self._index].reshape(-1)

        return self._launch("all-to-all", source, output, "", torch.cat, output.view(-1), own)

    def broadcast(self, tensor: Tensor, source_index: int) -> SharedMemoryWork:
        detail = f"from rank {self._shared.ranks[source_index]}"
        return self._launch("broadcast", tensor, tensor, detail, lambda parts: parts[source_index], tensor.view(-1))

    def barrier(self) -> None:
        empty = torch.empty(0)
        self._launch("barrier", empty, empty, "", lambda parts: parts[0], empty).wait()

    def _launch(  # type: ignore[override]
        self,
        kind: str,
        source: Tensor,
        place: Tensor,
        detail: object,
        combine: Callable[[list[Tensor]], Tensor],
        target: Tensor,
        own: Callable[[Tensor], Tensor] = lambda result: result,
    ) -> SharedMemoryWork:
        number, shared = self._launched, self._shared
        self._launched += 1
        collective = shared.under_way.setdefault(number, _Collective())
        launch = Launch(kind, source.dtype, source.numel(), detail)
        if collective.launch not in (None, launch):
            first = shared.ranks[next(iter(collective.parts))]
            raise Mismatch(
                f"collective {number} of ranks {_listed(shared.ranks)}: rank {self._rank} launches {launch}, and rank "
                f"{first} {collective.launch}"
            )
        collective.launch = launch
        collective.parts[self._index] = kept = source.detach().reshape(-1).clone()
        if place.is_floating_point():
            place.data.fill_(math.nan)  # .data: as with a backend, autograd does not see that memory changes
            if kind in _KEEP and source.untyped_storage().data_ptr() == place.untyped_storage().data_ptr():
                source.data.view(-1).copy_(kept)
        key: Hashable = (shared.ranks, number)
        if len(collective.parts) == self._size:
            self._turns.wake(key)

        def finish() -> None:
            while len(collective.parts) < self._size:
                self._turns.wait(self._rank, key, f"{launch} of ranks {_listed(shared.ranks)}")
            if collective.result is None:
                collective.result = combine([collective.parts[index] for index in range(self._size)])
            target.data.copy_(own(collective.result))
            collective.taken += 1
            if collective.taken == self._size:
                del shared.under_way[number]

        return _Work(finish)


class LocalMail:
    """Messages between stages, for one rank. With NCCL the order of messages is what matches them."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self._world, self._rank = world, rank

    def send(self, tensor: Tensor, rank: int, tag: Tag) -> None:
        """Hand a tensor to a rank. The receiver reads it when it waits."""
        name = (self._rank, rank, tag[0])
        channel = self._world.channels.setdefault(name, _Channel())
        channel.letters[channel.sent] = tag, tensor.detach()
        channel.sent += 1
        self._world.turns.wake(name)

    def receive(self, buffer: Tensor, rank: int, tag: Tag) -> Callable[[], None]:
        """Begin to receive from a rank; return a function that waits until the buffer has the message."""
        name = (rank, self._rank, tag[0])
        channel = self._world.channels.setdefault(name, _Channel())
        number = channel.posted
        channel.posted += 1
        buffer.fill_(math.nan)

        def place() -> int | None:
            """The number of the message: with NCCL that of the receive."""
            if self._world.as_nccl:
                return number if number in channel.letters else None
            return next((at for at, (sent, _) in channel.letters.items() if sent == tag), None)

        def arrive() -> None:
            while (at := place()) is None:
                self._world.turns.wait(self._rank, name, f"the receive of {tag} from rank {rank}")
            came, tensor = channel.letters.pop(at)
            if came != tag:
                raise Mismatch(f"rank {self._rank} receives {tag} from rank {rank}, and {came} comes")
            buffer.copy_(tensor)

        return arrive


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


_REDUCE: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": _sum,
    "max": lambda parts: torch.stack(parts).amax(0),
    "min": lambda parts: torch.stack(parts).amin(0),
}


_KEEP = ("all-gather", "broadcast")
"""Collectives that leave what a rank brings as it is, also where that is a part of the place of the result."""


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]} ({len(ranks)})"
