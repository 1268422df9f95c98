"""Which ranks share the folder of checkpoints: all ranks one folder, or the ranks of each node one on its local disk.

Ranks that see the same folder share a file system. The lowest of these ranks is the leader: it creates, publishes and
deletes there. Every file system has a copy of the manifest. On one host, device and inode numbers identify a folder.
Between hosts they do not, because a shared file system has different numbers on each. So the first rank of every
(host, folder) creates a marker file and looks for the markers of the others.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megazero.mpu.collectives import all_gather
from megazero.mpu.grid import Group

_MARK = ".run_token-{token}-rank-{rank}"  # the next run deletes files of this name if this one is killed here


@dataclass(frozen=True)
class Filesystems:
    """leaders: for each rank, the leader of its file system. rank: this process's rank."""

    leaders: tuple[int, ...]
    rank: int

    @property
    def leads(self) -> bool:
        return self.leaders[self.rank] == self.rank

    @property
    def all_leaders(self) -> list[int]:
        return sorted(set(self.leaders))

    def members(self, leader: int) -> list[int]:
        return [rank for rank, other in enumerate(self.leaders) if other == leader]


def host_name() -> str:
    """The name of this machine in messages."""
    return socket.gethostname()


def _identity(root: Path) -> list[int]:
    """Two int64 that are equal on two ranks if and only if host and folder are the same."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.exists() else host_name()
    found = os.stat(root)
    digest = hashlib.sha256(f"{host} {found.st_dev} {found.st_ino}".encode()).digest()
    return [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in (0, 8)]


def _gathered(world: Group, device: torch.device, numbers: list[int]) -> list[list[int]]:
    """Every rank's numbers, by rank. A collective: all-gather of int64."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    every = torch.empty(world.size * len(numbers), dtype=torch.int64, device=device)
    all_gather(every, mine, world).wait()
    found: list[list[int]] = every.view(world.size, -1).tolist()
    return found


def find_filesystems(
    root: Path, token: str, world: Group, device: torch.device, attempt: Callable[[Callable[[], None] | None], None]
) -> Filesystems:
    """Create the folder if it is missing, and find out which ranks see the same one.

    A collective of the world: two all-gathers of 24 bytes per rank in all.

    attempt: runs a function on this rank, and returns when all ranks have run theirs (or raises on all).
    """
    identity: list[int] = []

    def arrive() -> None:
        root.mkdir(parents=True, exist_ok=True)
        identity.extend(_identity(root))

    attempt(arrive)
    first = _first_of_each(_gathered(world, device, identity))
    mark = root / _MARK.format(token=token, rank=world.index)
    is_first, leader = first[world.index] == world.index, [world.index]

    def leave_mark() -> None:
        mark.touch()

    def look() -> None:
        leader[0] = _lowest_mark(root, token)

    attempt(leave_mark if is_first else None)
    attempt(look if is_first else None)
    attempt((lambda: mark.unlink(missing_ok=True)) if is_first else None)
    leaders = [found[0] for found in _gathered(world, device, leader)]
    return Filesystems(tuple(leaders[rank] for rank in first), world.index)


def _first_of_each(identities: list[list[int]]) -> list[int]:
    """For each rank, the lowest rank of the same identity."""
    lowest: dict[tuple[int, ...], int] = {}
    return [lowest.setdefault(tuple(identity), rank) for rank, identity in enumerate(identities)]


def _lowest_mark(root: Path, token: str) -> int:
    """The lowest rank that has a marker file in this folder.

    Rank 0's marker is looked up by name, because a network file system may cache a listing without it.
    """
    if (root / _MARK.format(token=token, rank=0)).exists():
        return 0
    start = _MARK.format(token=token, rank="")
    return min(int(path.name.removeprefix(start)) for path in root.iterdir() if path.name.startswith(start))
