"""Memory that the ranks of one host share: an area of slots for each rank, and counters that say how far each rank is.

An anonymous file of the first rank (memfd), which the others open through /proc: nothing is left behind however a
process ends, and the size of /dev/shm does not limit it. Only pages that are used take memory. The file is sealed: were
another process to shrink it, a rank that touches what is gone would die of SIGBUS. It begins with a random number, by
which a rank knows that the file it has opened is the first rank's: virtual machines that are clones of one have the
same boot id, and may have the same process ids.
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
"""Bytes of a slot: small enough to stay in a cache on its way through, large enough to be worth a message."""
SLOTS = 16
"""Slots of a rank's area, used in turn: how far a rank may be ahead of the slowest."""
POSTED, FOLDED, TAKEN, _LEFT = range(4)
"""What a rank counts: chunks that it has put into its slots, folded (its part of a sum), taken what it wanted of; and
whether it has left.
"""
_LINE = 64
_KEY = 16
"""Bytes of the random number."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_ADD_SEALS") else 0
"""What nobody may do to the file any more, which includes taking seals off. The attributes are Linux's."""
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


@dataclass(frozen=True)
class _File:
    """The file as the first member knows it: its descriptor there, and the random number that it begins with."""

    descriptor: int
    key: bytes


class SharedMemory:
    """One rank's view of the memory: the random number, counters [4, size], each in a cache line of its own, labels
    [size, SLOTS], slots.

    index, size  this rank's place among the members
    slots        [size, SLOTS, SLOT] bytes
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
        """Say what this rank puts into its slot, before it is published."""
        self._labels[self.index * SLOTS + slot] = label

    def check_labels(self, slot: int, label: int, members: Sequence[int] | None) -> None:
        """Raises RuntimeError unless the members (None: all) have put what this rank expects."""
        found = {
            member: self._labels[member * SLOTS + slot] for member in (range(self.size) if members is None else members)
        }
        if any(other != label for other in found.values()):
            told = ", ".join(f"rank {self._hosts[member].rank}: {other} bytes" for member, other in found.items())
            raise RuntimeError(
                f"rank {self._hosts[self.index].rank} expects {label} bytes of each rank of its group, but found {told}"
            )

    def leave(self) -> None:
        """Let nobody wait for this rank any more."""
        self.publish(_LEFT, 1)

    def publish(self, stage: int, count: int) -> None:
        """Say that this rank has come to `count` chunks in a stage; what it wrote before can be read by whoever sees
        that.
        """
        self._library.call("publish", self._counter(stage, self.index), count)

    def reached(self, stage: int, count: int, members: Sequence[int] | None = None) -> bool:
        """Whether all members (default: all) have come to `count`."""
        return self._laggard(stage, count, members, 0) is None

    def wait(self, stage: int, count: int, members: Sequence[int] | None = None) -> None:
        """Until they have. Raises PeerError when one of them has died or left its group, or the timeout has passed; or
        this one has left.
        """
        if self.reached(_LEFT, 1, [self.index]):
            raise PeerError(f"rank {self._hosts[self.index].rank} has left this group after an error")
        deadline = time.monotonic() + self._timeout.total_seconds()
        while (late := self._laggard(stage, count, members, _SLICE_MS)) is not None:
            gone = self._is_gone(late)
            if gone and self._laggard(stage, count, [late], 0) is None:  # it went after its part was done
                continue
            if gone or time.monotonic() > deadline:
                why = "has ended" if gone else f"has not answered for {self._timeout.total_seconds():.0f} s"
                raise PeerError(
                    f"rank {self._hosts[late].rank}, with which rank {self._hosts[self.index].rank} exchanges tensors, "
                    f"{why}"
                )

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
        if self.reached(_LEFT, 1, [member]):
            return True
        poll = select.poll()
        poll.register(self._alive[member], select.POLLIN)
        return bool(poll.poll(0))


def _close(leave: Callable[[], None], memory: Tensor, alive: dict[int, int], process: int) -> None:
    """What is left to do for a view that is gone. memory: kept until here, for `leave` writes to it."""
    if os.getpid() == process:  # and not a child that was forked off it
        leave()
    for file in alive.values():
        os.close(file)


def _header_bytes(size: int) -> int:
    whole = (1 + 4 * size) * _LINE + 8 * size * SLOTS
    return -(-whole // mmap.PAGESIZE) * mmap.PAGESIZE


def _total_bytes(size: int) -> int:
    return _header_bytes(size) + size * SLOTS * SLOT


def lacking() -> str:
    """What this system lacks or refuses for sharing memory; empty where nothing."""
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
    """The memory of a group whose ranks are all on this host; None, on all of them, where that is not so or cannot be
    had.

    library: the compiled kernels, which some rank may lack. Communicates three small gathers of Python objects over
    `handle`.
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
    """A file for so many members, with a number of its own, whose size is final. Raises OSError."""
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
    """Raises OSError or ValueError where the first member's file cannot be had here, or what has its name is another
    file.
    """
    file = os.open(f"/proc/{hosts[0].pid}/fd/{first.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(file, _KEY, 0) != first.key:
            raise ValueError(f"process {hosts[0].pid} of this host is not rank {hosts[0].rank}")
        return SharedMemory(file, hosts, index, library, timeout)
    finally:
        os.close(file)
