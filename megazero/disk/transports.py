"""What moves bytes between swap files and memory: a ring (io_uring), or a pool of threads where there is none; which of
the two does it here, and why.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch

from fused_ops.native import library
from fused_ops.native.binding import Library
from megazero.disk.buffers import AlignedBuffers
from megazero.disk.checksum import BLOCK, MASK, Copier, copier
from megazero.disk.layout import ALIGNMENT, HEADER_BYTES, Move, padded
from megazero.disk.swap_file import DiskError, SwapFile, reason

AUTO, IO_URING, THREADS = CHOICES = "auto", "io_uring", "threads"
NO_ANSWER = -2
REFUSED = {
    errno.EPERM: "the kernel or the container's seccomp filter forbids it",
    errno.EACCES: "the kernel or a security module forbids it",
    errno.ENOSYS: "this kernel or container has none",
    errno.ENOMEM: "the limit of locked memory (ulimit -l) is too small",
    errno.EINVAL: "this kernel has an older one",
}
"""Why there may be no ring."""


@dataclass(frozen=True)
class DiskOptions:
    """How bytes are moved.

    buffer_bytes  of one aligned buffer, and so of the largest request that needs one: a multiple of 64 KiB
    depth         buffers, and so requests in flight, of each of the two lanes: 1, or an even number
    backend       auto, io_uring or threads
    seconds       after which a disk that does not answer is an error
    direct_bytes  of the largest request that needs no buffer: a multiple of 64 KiB
    """

    buffer_bytes: int = 1 << 20
    depth: int = 16
    backend: str = AUTO
    seconds: int = 300
    direct_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        for what, count in (("buffer", self.buffer_bytes), ("request", self.direct_bytes)):
            if count < BLOCK or count % BLOCK:
                raise ValueError(f"a {what} of {count:,} bytes: it must be a multiple of {BLOCK:,} bytes")
        if self.depth != 1 and (not 2 <= self.depth <= 1024 or self.depth % 2):
            raise ValueError(f"a depth of {self.depth}: it must be 1, or even and at most 1024")
        if self.backend not in CHOICES:
            raise ValueError(f"{self.backend!r} moves no bytes: choose one of {', '.join(CHOICES)}")

    @property
    def workers(self) -> int:
        """Threads of a lane, which share its buffers: while one request ends, the next one begins."""
        return min(2, self.depth)

    @property
    def memory_bytes(self) -> int:
        """Of all buffers, which may be pinned."""
        return 2 * self.depth * self.buffer_bytes


ENDED = 0
"""The code of a Failure without errno: nothing more could be read or written."""


class Failure(Exception):
    """A move has failed, and nothing is under way any more. `swap.run_moves` makes a DiskError of it.

    code    errno, or ENDED
    number  of the move in its list
    done    bytes of it that were moved
    """

    def __init__(self, code: int, number: int = 0, done: int = 0) -> None:
        super().__init__(code, number, done)
        self.code, self.number, self.done = code, number, done


class Broken(Exception):
    """The system has not answered, and may still use the buffers. The transport cannot be used any more."""


class Transport(Protocol):
    """One thread at a time uses it."""

    def run(self, write: bool, moves: Sequence[Move], pieces: int, memory: object) -> list[int]:
        """Execute the moves, whose files are descriptors, and return when all are done.

        Returns the checksum of each of `pieces` pieces. A move's bytes are written with zeros up to the next multiple
        of ALIGNMENT; of a read the rest is dropped. Raises Failure, Broken.

        memory: what keeps the moves' addresses valid. After Broken, a transport that may still use them holds it.
        """

    def close(self) -> None:
        """End its threads and free its memory. It may be called twice."""


class RingTransport:
    """A ring with its buffers, for the compiled kernels. Raises Failure where the system has none for this process.

    registered  whether the kernel knows the buffers, and does not map them anew for every request
    """

    def __init__(self, kernels: Library, depth: int, buffer_bytes: int, seconds: int) -> None:
        self._kernels, self._seconds = kernels, seconds
        self._buffers = AlignedBuffers(depth, buffer_bytes)
        answer = torch.zeros(3, dtype=torch.int64)
        kernels.call("disk_ring_open", self._buffers.address, buffer_bytes, depth, answer)
        self._ring, refused, unregistered = map(int, answer)
        if refused:
            self._buffers.close()
            raise Failure(refused)
        self.registered = not unregistered
        self._broken = False
        self._kept: object = None

    def run(self, write: bool, moves: Sequence[Move], pieces: int, memory: object) -> list[int]:
        """As `Transport.run`."""
        if self._broken:
            raise Broken("its ring has failed before")
        table, sums = torch.tensor(moves, dtype=torch.int64), torch.zeros(pieces, dtype=torch.int64)
        answer = torch.zeros(4, dtype=torch.int64)
        self._kernels.call("disk_ring_move", self._ring, int(write), table, len(moves), self._seconds, sums, answer)
        code, number, done, in_flight = map(int, answer)
        if in_flight:
            self._broken, self._kept = True, memory  # the kernel may still write there
            fault = f"no answer for {self._seconds} s" if code == NO_ANSWER else reason(code)
            raise Broken(f"{fault}, with {in_flight} requests under way")
        if code:
            raise Failure(code if code > 0 else ENDED, number, done)
        return [total & MASK for total in sums.tolist()]

    def close(self) -> None:
        """Free ring and buffers. Buffers that the kernel may still write into stay."""
        if self._ring:
            self._kernels.call("disk_ring_close", self._ring)
            self._ring = 0
            if not self._broken:
                self._buffers.close()


@dataclass
class _Call:
    """A call of `run` on its way: moves that are left, checksums so far, the memory that it uses, the first failure."""

    write: bool
    left: int
    sums: list[int]
    memory: object
    failure: Failure | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)

    def take(self, piece: int, total: int, failure: Failure | None) -> None:
        with self.lock:
            self.sums[piece] = (self.sums[piece] + total) & MASK
            self.failure = self.failure or failure
            self.left -= 1
            if not self.left:
                self.ended.set()


_Job = tuple[_Call, int, Move]


class ThreadTransport:
    """`depth` threads with pread and pwrite, each with a buffer of its own. They hold no reference to this object, and
    end at `close` or with the process.
    """

    def __init__(self, copier: Copier, depth: int, buffer_bytes: int, seconds: int) -> None:
        self._buffers, self._seconds, self._broken = AlignedBuffers(depth, buffer_bytes), seconds, False
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = [
            threading.Thread(
                target=_work, args=(self._jobs, copier, self._buffers, number), name=f"disk-{number}", daemon=True
            )
            for number in range(depth)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, write: bool, moves: Sequence[Move], pieces: int, memory: object) -> list[int]:
        """As `Transport.run`."""
        if self._broken:
            raise Broken("its threads have failed before")
        if not moves:
            return [0] * pieces
        call = _Call(write, len(moves), [0] * pieces, memory)
        for number, move in enumerate(moves):
            self._jobs.put((call, number, move))
        left_before = call.left + 1
        while not call.ended.wait(self._seconds):
            if call.left == left_before:  # a slow disk is none that does not answer: some move has to end in the time
                self._broken = True
                under_way = min(call.left, self._buffers.count)
                raise Broken(f"no answer for {self._seconds} s, with {under_way} requests under way")
            left_before = call.left
        if call.failure:
            raise call.failure
        return call.sums

    def close(self) -> None:
        """End the threads and free the buffers. A thread that the system does not let go keeps them."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(0.1 if self._broken else None)
        if not any(thread.is_alive() for thread in self._threads):
            self._buffers.close()
        self._threads = []


def _work(jobs: SimpleQueue[_Job | None], copier: Copier, buffers: AlignedBuffers, own_buffer: int) -> None:
    while (job := jobs.get()) is not None:
        call, number, move = job
        total, failure = 0, None
        if call.failure is None:  # else the rest of the call is only counted
            try:
                total = _moved(call.write, move, copier, buffers, own_buffer)
            except Failure as error:
                failure = Failure(error.code, number, error.done)
            except BaseException as error:  # whoever waits must be told
                failure = Failure(ENDED, number)
                failure.__cause__ = error
        call.take(move.piece, total, failure)


def _moved(write: bool, move: Move, copier: Copier, buffers: AlignedBuffers, own_buffer: int) -> int:
    """Execute a move, through the buffer of this number unless it is direct; return its checksum."""
    whole, total = padded(move.bytes), 0
    buffer = 0 if move.direct else buffers.at(own_buffer)
    with memory_at(move.address, move.bytes) if move.direct else buffers.view(own_buffer) as view:
        if write:
            total = copier(buffer, move.address, move.bytes, move.block)
            view[move.bytes : whole] = bytes(whole - move.bytes)
        # A file may end behind the bytes of its last move, before their padding.
        done, needed = 0, whole if write else move.bytes
        while done < needed:
            with view[done:whole] as rest:
                try:
                    moved = (os.pwrite if write else read_at)(move.file, rest, move.offset + done)
                except OSError as error:
                    raise Failure(error.errno or ENDED, 0, done) from error
            if done + moved >= needed:
                break
            aligned = (done + moved) // ALIGNMENT * ALIGNMENT  # O_DIRECT goes on at an aligned byte only
            if aligned == done:
                raise Failure(ENDED, 0, done + moved)
            done = aligned
        if not write:
            to, source = (move.address, buffer) if buffer else (0, move.address)
            total = copier(to, source, move.bytes, move.block)
    return total


def memory_at(address: int, count: int) -> memoryview:
    """The bytes at an address, which somebody else has to keep."""
    return memoryview((ctypes.c_uint8 * count).from_address(address)).cast("B")


def read_at(file: int, into: memoryview, offset: int) -> int:
    """Read as `os.pwrite` writes. `os.pread` would make bytes of its own."""
    return os.preadv(file, [into], offset)


class Backend(NamedTuple):
    """Transports for each lane, and in words what they are and why."""

    reads: Sequence[Transport]
    writes: Sequence[Transport]
    words: str


def open_backend(options: DiskOptions, files: Sequence[SwapFile]) -> Backend:
    """The transports for these files: io_uring if all of them take O_DIRECT and the system lets us, else threads.

    Raises DiskError where the options ask for io_uring and there is none.
    """
    kernels = library.host_library(library.choice())
    buffered = next((file.buffered for file in files if file.buffered), "")
    direct = "the page cache" if buffered else "O_DIRECT"
    if options.backend == THREADS:
        why = "asked for"
    elif options.backend == AUTO and buffered:
        why = buffered
    else:
        rings, why = _rings(options, files[0], kernels)
        if rings:
            known = "registered" if all(ring.registered for ring in rings) else "unregistered"
            known += "" if known == "registered" else " (the limit of locked memory, ulimit -l, is too small)"
            words = f"io_uring with {direct} and {known} buffers"
            return Backend(rings[: options.workers], rings[options.workers :], words)
        if options.backend == IO_URING:
            raise DiskError(f"io_uring was asked for: {why}")
    pools = [
        ThreadTransport(copier(kernels), options.depth // options.workers, options.buffer_bytes, options.seconds)
        for _ in range(2 * options.workers)
    ]
    return Backend(pools[: options.workers], pools[options.workers :], f"threads with {direct} ({why})")


def _rings(options: DiskOptions, file: SwapFile, kernels: Library | None) -> tuple[list[RingTransport], str]:
    """Rings for both lanes, or why there are none. Each reads the header of a file as a trial."""
    if kernels is None:
        return [], "no io_uring: the compiled kernels are missing"
    rings: list[RingTransport] = []
    trial = AlignedBuffers(1, HEADER_BYTES)
    try:
        for _ in range(2 * options.workers):
            depth = options.depth // options.workers
            rings.append(RingTransport(kernels, depth, options.buffer_bytes, options.seconds))
            # A filter of system calls may allow to make a ring and forbid to use it.
            rings[-1].run(False, [Move(file.handle, 0, trial.at(0), HEADER_BYTES, 0, 0)], 1, trial)
    except (Failure, Broken) as error:
        for ring in rings:
            ring.close()
        code = error.code if isinstance(error, Failure) else 0
        return [], f"no io_uring: {REFUSED.get(code, str(error))} (errno {code})"
    finally:
        trial.close()
    return rings, ""
