"""Moves by a pool of threads, each with pread or pwrite and a buffer of its own: where there is no io_uring."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from megazero.disk.buffers import AlignedBuffers
from megazero.disk.checksum import MASK, Copier
from megazero.disk.layout import ALIGNMENT, Move, padded
from megazero.disk.transport import ENDED, Broken, Failure


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
    """`depth` threads. They hold no reference to this object, and end at `close` or with the process."""

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
        left = call.left + 1
        while not call.ended.wait(self._seconds):
            if call.left == left:
                self._broken = True
                raise Broken(
                    f"no answer for {self._seconds} s, with {min(left, self._buffers.count)} requests under way"
                )
            left = call.left
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


def _work(jobs: SimpleQueue[_Job | None], copier: Copier, buffers: AlignedBuffers, own: int) -> None:
    while (job := jobs.get()) is not None:
        call, number, move = job
        total, failure = 0, None
        if call.failure is None:  # else the rest of the call is only counted
            try:
                total = _moved(call.write, move, copier, buffers, own)
            except Failure as error:
                failure = Failure(error.code, number, error.done)
            except BaseException as error:  # whoever waits must be told
                failure = Failure(ENDED, number)
                failure.__cause__ = error
        call.take(move.piece, total, failure)


def _moved(write: bool, move: Move, copier: Copier, buffers: AlignedBuffers, own: int) -> int:
    """Execute a move through buffer number `own`; return its checksum."""
    whole, total = padded(move.bytes), 0
    buffer = 0 if move.direct else buffers.at(own)
    with _memory_at(move.address, move.bytes) if move.direct else buffers.view(own) as view:
        if write:
            total = copier(buffer, move.address, move.bytes, move.block)
            view[move.bytes : whole] = bytes(whole - move.bytes)
        done, needed = 0, whole if write else move.bytes
        while done < needed:
            with view[done:whole] as rest:
                try:
                    moved = (os.pwrite if write else _read)(move.file, rest, move.offset + done)
                except OSError as error:
                    raise Failure(error.errno or ENDED, 0, done) from error
            if done + moved >= needed:
                break
            kept = (done + moved) // ALIGNMENT * ALIGNMENT  # O_DIRECT goes on at an aligned byte only
            if kept == done:
                raise Failure(ENDED, 0, done + moved)
            done = kept
        if not write:
            to, source = (move.address, buffer) if buffer else (0, move.address)
            total = copier(to, source, move.bytes, move.block)
    return total


def _memory_at(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * count).from_address(address)).cast("B")


def _read(file: int, into: memoryview, offset: int) -> int:
    return os.preadv(file, [into], offset)
