"""Memory that the ranks of one host share: an area of slots for each rank, and counters that say how far each rank is.

An anonymous file of the first rank (memfd), which the others open through /proc: nothing is left behind however a process ends, and
the size of /dev/shm does not limit it. Only pages that are used take memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fused_ops.native.library import Library

SLOT = 1 << 20
"""Bytes of a slot: small enough to stay in a cache on its way through, large enough to be worth a message."""
SLOTS = 16
"""Slots of a rank's area, used in turn: how far a rank may be ahead of the slowest."""
POSTED, FOLDED, TAKEN, _LEFT = range(4)
"""What a rank counts: chunks that it has put into its slots, folded (its part of a sum), taken what it wanted of; and whether it has left."""
_LINE = 64
_SPINS = 2000
"""Looks before a rank sleeps: some 20 microseconds, less than to sleep and be woken costs."""
_SLICE_MS = 200
"""A rank that waits looks this often whether the others are still there."""


class PeerError(RuntimeError):
    """Another rank of a group has failed, died, or not answered within the timeout."""


@dataclass(frozen=True)
class _Host:
    """Where a process runs, as far as sharing memory goes."""

    boot: str
    namespace: str
    pid: int
    rank: int

    @classmethod
    def here(cls, rank: int) -> _Host:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(boot, os.readlink("/proc/self/ns/pid"), os.getpid(), rank)


class SharedMemory:
    """One rank's view of the memory: counters [4, size] in cache lines of their own, labels [size, SLOTS], and the slots.

    index, size  this rank's place among the members
    slots        [size, SLOTS, SLOT] bytes
    """

    def __init__(self, file: int, hosts: Sequence[_Host], index: int, library: Library, timeout: timedelta) -> None:
        self.index, self.size, self._library, self._timeout = index, len(hosts), library, timeout
        self._hosts, self._labelled = hosts, 4 * self.size * _LINE
        self._map = mmap.mmap(file, _total_bytes(self.size))
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._start = memory.data_ptr()
        self._left = memory[: self._labelled].view(4, self.size, _LINE)[_LEFT, :, 0]
        self._labels = memoryview(self._map)[self._labelled : self._labelled + 8 * self.size * SLOTS].cast("q")
        self.slots = memory[_header_bytes(self.size) :].view(self.size, SLOTS, SLOT)
        self._answer = ctypes.c_int64()
        self._spins = _SPINS if self.size <= len(os.sched_getaffinity(0)) else 0
        self._alive: dict[int, int] = {}
        weakref.finalize(self, _leave, self._left[index], self._alive, os.getpid())
        for member, host in enumerate(hosts):
            if member != index:
                self._alive[member] = os.pidfd_open(host.pid)

    def label(self, slot: int, label: int) -> None:
        """Say what this rank puts into its slot, before it is published."""
        self._labels[self.index * SLOTS + slot] = label

    def check_labels(self, slot: int, label: int, members: Sequence[int] | None) -> None:
        """Raises RuntimeError unless the members (None: all) have put what this rank expects."""
        found = {member: self._labels[member * SLOTS + slot] for member in (range(self.size) if members is None else members)}
        if any(other != label for other in found.values()):
            told = ", ".join(f"rank {self._hosts[member].rank}: {other} bytes" for member, other in found.items())
            raise RuntimeError(f"rank {self._hosts[self.index].rank} expects {label} bytes of each rank of its group, but found {told}")

    def leave(self) -> None:
        """Let nobody wait for this rank any more."""
        self._left[self.index].fill_(1)

    def publish(self, stage: int, count: int) -> None:
        """Say that this rank has come to `count` chunks in a stage; what it wrote before can be read by whoever sees that."""
        self._library.call("publish", self._counter(stage, self.index), count)

    def reached(self, stage: int, count: int, members: Sequence[int] | None = None) -> bool:
        """Whether all members (default: all) have come to `count`."""
        return self._laggard(stage, count, members, 0) is None

    def wait(self, stage: int, count: int, members: Sequence[int] | None = None) -> None:
        """Until they have. Raises PeerError when one of them has died or left its group, or the timeout has passed; or this one has left."""
        if self._left[self.index]:
            raise PeerError(f"rank {self._hosts[self.index].rank} has left this group after an error")
        deadline = time.monotonic() + self._timeout.total_seconds()
        while (late := self._laggard(stage, count, members, _SLICE_MS)) is not None:
            gone = self._is_gone(late)
            if gone and self._laggard(stage, count, [late], 0) is None:  # it went after its part was done
                continue
            if gone or time.monotonic() > deadline:
                why = "has ended" if gone else f"has not answered for {self._timeout.total_seconds():.0f} s"
                raise PeerError(f"rank {self._hosts[late].rank}, with which rank {self._hosts[self.index].rank} exchanges tensors, {why}")

    def _laggard(self, stage: int, count: int, members: Sequence[int] | None, milliseconds: int) -> int | None:
        """The first member that has not come to `count` in time."""
        ranges = [(0, self.size)] if members is None else [(member, 1) for member in members]
        for first, number in ranges:
            answer = ctypes.addressof(self._answer)
            words = self._counter(stage, first), _LINE // 4, number
            self._library.call("wait_for", *words, count, self._spins, milliseconds, answer)
            if self._answer.value < number:
                return first + self._answer.value
        return None

    def _counter(self, stage: int, member: int) -> int:
        """Address of a member's counter, in a cache line of its own."""
        return self._start + (stage * self.size + member) * _LINE

    def _is_gone(self, member: int) -> bool:
        if self._left[member]:
            return True
        poll = select.poll()
        poll.register(self._alive[member], select.POLLIN)
        return bool(poll.poll(0))


def _leave(left: Tensor, alive: dict[int, int], process: int) -> None:
    if os.getpid() == process:  # and not a child that was forked off it
        left.fill_(1)
    for file in alive.values():
        os.close(file)


def _header_bytes(size: int) -> int:
    whole = 4 * size * _LINE + 8 * size * SLOTS
    return -(-whole // mmap.PAGESIZE) * mmap.PAGESIZE


def _total_bytes(size: int) -> int:
    return _header_bytes(size) + size * SLOTS * SLOT


def lacking() -> str:
    """What this system lacks or refuses for sharing memory; empty where nothing."""
    try:
        _Host.here(0)
        os.close(os.memfd_create("megazero", os.MFD_CLOEXEC))
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return str(error)
    return ""


def share_memory(handle: dist.ProcessGroup, index: int, size: int, library: Library | None, timeout: timedelta) -> SharedMemory | None:
    """The memory of a group whose ranks are all on this host; None, on all of them, where that is not so or cannot be had.

    library: the compiled kernels, which some rank may lack. Communicates three small gathers of Python objects over `handle`.
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
        os.close(file)
    return memory if all(worked) else None


T = TypeVar("T")


def _gathered(handle: dist.ProcessGroup, size: int, own: T) -> list[T]:
    every: list[T] = [own] * size
    dist.all_gather_object(every, own, group=handle)
    return every


def _created(size: int) -> int:
    file = os.memfd_create("megazero", os.MFD_CLOEXEC)
    os.truncate(file, _total_bytes(size))
    return file


def _opened(first: int, hosts: Sequence[_Host], index: int, library: Library, timeout: timedelta) -> SharedMemory:
    """first: the file as the first member knows it."""
    file = os.open(f"/proc/{hosts[0].pid}/fd/{first}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return SharedMemory(file, hosts, index, library, timeout)
    finally:
        os.close(file)
