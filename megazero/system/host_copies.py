"""Copies between a device and host memory beside the program, and the host memory that they use.

A lane makes its copies one behind the other: on a CUDA device on a stream of its own, so that the host never waits,
else on a thread. On a CPU both ends are memory of the host, and the copies are real all the same.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megazero.system.streams import SideStream, pin


class CopyError(RuntimeError):
    """A copy has failed."""


def _plain(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


class HostBuffers:
    """Host memory for copies, in buffers that are taken and given back; they are kept for the next ones.

    For a CUDA device it is pinned. flag: what needs it, for the error where it cannot be. allocate: from bytes to
    memory, uint8
    """

    def __init__(self, device: torch.device, flag: str, allocate: Callable[[int], Tensor] = _plain) -> None:
        self._device, self._flag, self._allocate = device, flag, allocate
        self.free: list[Tensor] = []
        self._every: list[Tensor] = []
        """Those that are taken too: a step that fails may drop them while they are copied."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._every)

    def take(self, nbytes: int) -> Tensor:
        """A buffer of at least so many bytes, uint8: the smallest spare one that is large enough, else a new one.

        Raises RuntimeError where there is no memory for it.
        """
        fitting = [i for i, buffer in enumerate(self.free) if buffer.nbytes >= nbytes]
        if fitting:
            return self.free.pop(min(fitting, key=lambda i: self.free[i].nbytes))
        buffer = self._allocate(nbytes)
        if self._device.type == "cuda":
            pin(buffer.zero_(), self._flag)  # pages first
        self._every.append(buffer)
        return buffer

    def clear(self) -> None:
        """Forget all buffers. Nothing may use one."""
        self.free.clear()
        self._every.clear()

    def give(self, buffer: Tensor) -> None:
        """Return a buffer. What has used it must be over for the current stream."""
        self.free.append(buffer)


class PairCopier(Protocol):
    """Copies one behind the other, as a `CopyLane` makes them."""

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """See `CopyLane.start`."""
        ...

    def close(self) -> object: ...


class CopyLane:
    """Copies to or from a device, one behind the other. name: in words, for errors, such as "to host memory"."""

    def __init__(self, device: torch.device, name: str) -> None:
        self._name = name
        self._stream = SideStream(device) if device.type == "cuda" else None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        if self._stream is None:
            threading.Thread(target=_execute, args=(self._jobs,), name=f"copies {name}", daemon=True).start()
        self.close = weakref.finalize(self, self._jobs.put, None)
        """Ends the lane, once; what was begun is finished. A lane that nobody refers to any more is ended too."""

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Begin copies, each (to, from) of contiguous tensors of one size in bytes, once what the current stream was
        given before is done. Returns a function, to be called once, after which this thread (for CUDA: the current
        stream) finds them made. Neither end may be changed or freed before. It raises CopyError.
        """
        if self._stream is not None:
            return self._stream.copy(pairs)
        job, held = _Job(pairs), list(pairs)  # held here too, so that the caller's thread frees what it has waited for
        self._jobs.put(job)

        def wait() -> None:
            job.over.wait()
            held.clear()
            for error in job.errors:
                raise CopyError(f"a copy of {job.nbytes:,} bytes {self._name} has failed: {error}") from error

        return wait


class _Move(NamedTuple):
    to: int
    source: int
    nbytes: int


class _Job:
    """Copies by address. errors: what went wrong, once they are over. It holds the tensors until then: a step that
    fails may drop them earlier.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.moves = [_Move(to.data_ptr(), source.data_ptr(), source.nbytes) for to, source in pairs]
        self.nbytes, self.held = sum(move.nbytes for move in self.moves), list(pairs)
        self.over, self.errors = threading.Event(), list[BaseException]()


def _execute(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            for move in job.moves:
                copy_bytes(move.to, move.source, move.nbytes)
        except BaseException as error:  # whoever waits must be told, and the thread goes on
            job.errors.append(error)
        job.held.clear()
        job.over.set()


def copy_bytes(to: int, source: int, nbytes: int) -> None:
    """Copy memory of the host by address. Other threads go on meanwhile: a call of ctypes lets Python's lock go."""
    ctypes.memmove(to, source, nbytes)
