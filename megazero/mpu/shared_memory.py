"""Memory that the ranks of one host share: an area of slots for each rank, and counters of each rank's progress.

The memory is an anonymous file (memfd) of the first rank, which the others open through /proc. It disappears with the
processes however they end, and the size of /dev/shm does not limit it. Only pages that are used take memory. The file
is sealed: if a process could shrink it, a rank that reads beyond its end would die of SIGBUS.

The file begins with a random number. By it a rank checks that it has opened the first rank's file: cloned virtual
machines have the same boot id and may have the same process ids.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import select
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fused_ops.native.library import Library

SLOT = 1 << 20
"""Bytes of a slot: small enough to stay in a cache, large enough to outweigh the cost of synchronisation."""
SLOTS = 16
"""Slots of a rank's area, used in turn. A rank may be this many chunks ahead of the slowest rank."""
POSTED, FOLDED, TAKEN, _LEFT = range(4)
"""The counters of a rank: chunks that it has posted (written into its slots), folded (summed its part of) and taken
(read the results of), and whether it has left.
"""
_LINE = 64
_KEY = 16
"""Bytes of the file's random number."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_ADD_SEALS") else 0
"""Seals: no process may shrink or grow the file, or change its seals. Linux only."""
_SPINS = 2000
"""Reads of a counter before a rank sleeps: about 20 microseconds, less than it costs to sleep and wake up."""
_SLICE_MS = 200
"""A waiting rank checks this often (milliseconds) whether the other processes still run."""


class PeerError(RuntimeError):
    """Another rank of a group has failed, has ended, or has not answered within the timeout."""


@dataclass(frozen=True)
class _Host:
    """Where a process runs: processes of one boot and one PID namespace can share memory."""

    boot: str
    namespace: str
    pid: int
    rank: int

    @classmethod
    def here(cls, rank: int) -> _Host:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(boot, os.readlink("/proc/self/ns/pid"), os.getpid(), rank)


@dataclass(frozen=True)
class _File:
    """The shared file: its descriptor in the first member's process, and the random number at its beginning."""

    descriptor: int
    key: bytes


class SharedMemory:
    """One rank's view of the shared memory.

    The file holds: the random number, counters [4, size] in a cache line each, labels int64 [size, SLOTS], the slots.

    index  this rank's index among the members
    size   number of members
    slots  uint8 [size, SLOTS, SLOT]
    """

    def __init__(self, file: int, hosts: Sequence[_Host], index: int, library: Library, timeout: timedelta) -> None:
        self.index, self.size, self._library, self._timeout = index, len(hosts), library, timeout
        self._hosts, labels = hosts, (1 + 4 * self.size) * _LINE
        self._map = mmap.mmap(file, _total_bytes(self.size))
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._start = memory.data_ptr() + _LINE
        self._labels = memoryview(self._map)[labels : labels + 8 * self.size * SLOTS].cast("q")
        self.slots = memory[_header_bytes(self.size) :].view(self.size, SLOTS, SLOT)
        self._answer = ctypes.c_int64()
        self._spins = _SPINS if self.size <= len(os.sched_getaffinity(0)) else 0
        self._alive: dict[int, int] = {}
        leave = partial(library.call, "publish", self._counter(_LEFT, index), 1)
        weakref.finalize(self, _close, leave, memory, self._alive, os.getpid())
        for member, host in enumerate(hosts):
            if member != index:
                self._alive[member] = os.pidfd_open(host.pid)

    def label(self, slot: int, label: int) -> None:
        """Write how many bytes this rank puts into its slot. Called before the slot is published."""
        self._labels[self.index * SLOTS + slot] = label

    def check_labels(self, slot: int, label: int, members: Sequence[int] | None) -> None:
        """Raise RuntimeError unless the members (None: all) have put `label` bytes into this slot."""
        found = {
            member: self._labels[member * SLOTS + slot] for member in (range(self.size) if members is None else members)
        }
        if any(other != label for other in found.values()):
            told = ", ".join(f"rank {self._hosts[member].rank}: {other} bytes" for member, other in found.items())
            raise RuntimeError(
                f"rank {self._hosts[self.index].rank} expects {label} bytes of each rank of its group, but found {told}"
            )

    def leave(self) -> None:
        """Publish that this rank has left: ranks that wait for it raise PeerError."""
        self.publish(_LEFT, 1)

    def publish(self, stage: int, count: int) -> None:
        """Publish that this rank has reached `count` chunks in a stage.

        A rank that reads this count also sees what this rank wrote before (release and acquire).
        """
        self._library.call("publish", self._counter(stage, self.index), count)

    def reached(self, stage: int, count: int, members: Sequence[int] | None = None) -> bool:
        """Whether the members (None: all) have reached `count` chunks in a stage."""
        return self._laggard(stage, count, members, 0) is None

    def wait(self, stage: int, count: int, members: Sequence[int] | None = None) -> None:
        """Return once the members (None: all) have reached `count` chunks in a stage.

        Raises PeerError when one of them has ended or left, when the timeout has passed, or when this rank has left.
        """
        if self.reached(_LEFT, 1, [self.index]):
            raise PeerError(f"rank {self._hosts[self.index].rank} has left this group after an error")
        deadline = time.monotonic() + self._timeout.total_seconds()
        while (late := self._laggard(stage, count, members, _SLICE_MS)) is not None:
            gone = self._is_gone(late)
            if gone and self._laggard(stage, count, [late], 0) is None:  # it ended after it had done its part
                continue
            if gone or time.monotonic() > deadline:
                why = "has ended" if gone else f"has not answered for {self._timeout.total_seconds():.0f} s"
                raise PeerError(
                    f"rank {self._hosts[late].rank}, with which rank {self._hosts[self.index].rank} exchanges tensors, "
                    f"{why}"
                )

    def _laggard(self, stage: int, count: int, members: Sequence[int] | None, milliseconds: int) -> int | None:
        """The first member that has not reached `count` within so many milliseconds; None if all have."""
        ranges = [(0, self.size)] if members is None else [(member, 1) for member in members]
        for first, number in ranges:
            answer = ctypes.addressof(self._answer)
            words = self._counter(stage, first), _LINE // 4, number
            self._library.call("wait_for", *words, count, self._spins, milliseconds, answer)
            if self._answer.value < number:
                return first + self._answer.value
        return None

    def _counter(self, stage: int, member: int) -> int:
        """Address of a member's counter. Each counter has a cache line of its own."""
        return self._start + (stage * self.size + member) * _LINE

    def _is_gone(self, member: int) -> bool:
        if self.reached(_LEFT, 1, [member]):
            return True
        poll = select.poll()
        poll.register(self._alive[member], select.POLLIN)
        return bool(poll.poll(0))


def _close(leave: Callable[[], None], memory: Tensor, alive: dict[int, int], process: int) -> None:
    """Clean up after a view was garbage-collected. memory: is kept alive by this argument, for `leave` to write to."""
    if os.getpid() == process:  # not in a forked child
        leave()
    for file in alive.values():
        os.close(file)


def _header_bytes(size: int) -> int:
    whole = (1 + 4 * size) * _LINE + 8 * size * SLOTS
    return -(-whole // mmap.PAGESIZE) * mmap.PAGESIZE


def _total_bytes(size: int) -> int:
    return _header_bytes(size) + size * SLOTS * SLOT


def lacking() -> str:
    """What keeps this system from sharing memory (an error message); empty if it can."""
    try:
        _Host.here(0)
        os.close(_created(1).descriptor)
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return str(error)
    return ""


def share_memory(
    handle: dist.ProcessGroup, index: int, size: int, library: Library | None, timeout: timedelta
) -> SharedMemory | None:
    """The shared memory of a group. All its ranks call this and all get memory, or all get None.

    None: the ranks are on several hosts, or one of them lacks the compiled kernels (`library`) or cannot share memory.
    timeout: how long `wait` waits. Communicates up to three all-gathers of small Python objects over `handle`.
    """
    found = _gathered(handle, size, _Host.here(dist.get_rank()) if library is not None and not lacking() else None)
    hosts = [host for host in found if host is not None]
    if library is None or len(hosts) < size or len({(host.boot, host.namespace) for host in hosts}) > 1:
        return None
    memory, file = None, None
    with suppress(OSError):
        file = _created(size) if index == 0 else None
    first = _gathered(handle, size, file)[0]
    with suppress(OSError, ValueError):
        if first is not None:
            memory = _opened(first, hosts, index, library, timeout)
    worked = _gathered(handle, size, memory is not None)
    if file is not None:
        os.close(file.descriptor)
    return memory if all(worked) else None


T = TypeVar("T")


def _gathered(handle: dist.ProcessGroup, size: int, own: T) -> list[T]:
    every: list[T] = [own] * size
    dist.all_gather_object(every, own, group=handle)
    return every


def _created(size: int) -> _File:
    """Create the sealed file for `size` members, with a new random number. Raises OSError."""
    key = secrets.token_bytes(_KEY)
    file = os.memfd_create("megazero", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(file, _total_bytes(size))
        os.pwrite(file, key, 0)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(file)
        raise
    return _File(file, key)


def _opened(first: _File, hosts: Sequence[_Host], index: int, library: Library, timeout: timedelta) -> SharedMemory:
    """Open the first member's file. Raises OSError if that fails, ValueError if it is another file of that name."""
    file = os.open(f"/proc/{hosts[0].pid}/fd/{first.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(file, _KEY, 0) != first.key:
            raise ValueError(f"process {hosts[0].pid} of this host is not rank {hosts[0].rank}")
        return SharedMemory(file, hosts, index, library, timeout)
    finally:
        os.close(file)
