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
STAGES = POSTED, FOLDED, TAKEN = 0, 1, 2
"""What a rank counts: chunks that it has put into its slots, folded (its part of a sum), taken what it wanted of."""
_LEFT = 3
_LINE = 64
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

    @classmethod
    def here(cls) -> _Host:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(boot, os.readlink("/proc/self/ns/pid"), os.getpid())


class SharedMemory:
    """One rank's view of the memory.

    index, size  this rank's place among the members
    slots        [size, SLOTS, SLOT] bytes
    """

    def __init__(self, file: int, pids: Sequence[int], index: int, library: Library, timeout: timedelta) -> None:
        self.index, self.size, self._library, self._timeout = index, len(pids), library, timeout
        words, header = (_LEFT + 1) * self.size * _LINE, _header_bytes(self.size)
        self._map = mmap.mmap(file, _total_bytes(self.size))
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._left = memory[:words].view(-1, self.size, _LINE)[_LEFT, :, 0]
        self._counters = memory.data_ptr()
        self.slots = memory[header:].view(self.size, SLOTS, SLOT)
        self._answer = ctypes.c_int64()
        self._alive = {i: os.pidfd_open(pid) for i, pid in enumerate(pids) if i != index}
        weakref.finalize(self, _leave, self._left[index], list(self._alive.values()))

    def publish(self, stage: int, count: int) -> None:
        """Say that this rank has come to `count` chunks in a stage; what it wrote before can be read by whoever sees that."""
        self._library.call("publish", self._counter(stage, self.index), count)

    def reached(self, stage: int, count: int, members: Sequence[int] | None = None) -> bool:
        """Whether all members (default: all) have come to `count`."""
        return self._laggard(stage, count, members, 0) is None

    def wait(self, stage: int, count: int, members: Sequence[int] | None = None) -> None:
        """Until they have. Raises PeerError when one of them has died or left its group, or the timeout has passed."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        while (late := self._laggard(stage, count, members, _SLICE_MS)) is not None:
            gone = self._is_gone(late)
            if gone and self._laggard(stage, count, [late], 0) is None:  # it went after its part was done
                continue
            if gone or time.monotonic() > deadline:
                why = "has ended" if gone else f"has not answered for {self._timeout.total_seconds():.0f} s"
                raise PeerError(f"member {late} of a group of {self.size} ranks on this host {why}")

    def _laggard(self, stage: int, count: int, members: Sequence[int] | None, milliseconds: int) -> int | None:
        """The first member that has not come to `count` in time."""
        ranges = [(0, self.size)] if members is None else [(member, 1) for member in members]
        for first, number in ranges:
            answer = ctypes.addressof(self._answer)
            self._library.call("wait_for", self._counter(stage, first), _LINE // 4, number, count, milliseconds, answer)
            if self._answer.value < number:
                return first + self._answer.value
        return None

    def _counter(self, stage: int, member: int) -> int:
        """Address of a member's counter, in a cache line of its own."""
        return self._counters + (stage * self.size + member) * _LINE

    def _is_gone(self, member: int) -> bool:
        if self._left[member]:
            return True
        poll = select.poll()
        poll.register(self._alive[member], select.POLLIN)
        return bool(poll.poll(0))


def _leave(left: Tensor, files: list[int]) -> None:
    left.fill_(1)
    for file in files:
        os.close(file)


def _header_bytes(size: int) -> int:
    whole = (_LEFT + 1) * size * _LINE
    return -(-whole // mmap.PAGESIZE) * mmap.PAGESIZE


def _total_bytes(size: int) -> int:
    return _header_bytes(size) + size * SLOTS * SLOT


def lacking() -> str:
    """What this system lacks for sharing memory; empty where nothing."""
    absent = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
    return f"os.{absent[0]} is missing" if absent else "" if Path("/proc/self/ns/pid").exists() else "there is no /proc"


def share_memory(handle: dist.ProcessGroup, index: int, size: int, library: Library | None, timeout: timedelta) -> SharedMemory | None:
    """The memory of a group whose ranks are all on this host; None, on all of them, where that is not so or cannot be had.

    library: the compiled kernels, which some rank may lack. Communicates three small gathers of Python objects over `handle`.
    """
    found = _gathered(handle, size, _Host.here() if library is not None and not lacking() else None)
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
        return SharedMemory(file, [host.pid for host in hosts], index, library, timeout)
    finally:
        os.close(file)
