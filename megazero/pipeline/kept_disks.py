"""Activations of graphs in swap files, between their copy to host memory and the copy back.

A graph takes the first piece that is free when it leaves, and gives it back when its read is submitted: swap files put
requests on one piece behind each other. So there are as many pieces as graphs are away at a time, and not one for each.
A step of a ramp may want one more, since its order is another one; that graph stays on the device.

Of a user's modules nobody knows what a graph keeps before it has computed. Their files (`GrowingDisks`) are made when
the first graph leaves, and made anew, with larger pieces, when one leaves that keeps more. Those that are away by then
come back from where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.disk.lanes import DiskRequest
from megazero.disk.store import Store
from megazero.disk.swap_file import DiskError
from megazero.program.passes.leaving import LEAST_BUFFERS, buffer_bytes
from megazero.system.streams import reached

FLAG = "--offload-activations"


def piece_names(count: int) -> list[str]:
    """The names of a swap file's pieces for activations."""
    return [f"activations {number}" for number in range(count)]


def too_small(room: int, size: int) -> str:
    """What is wrong with so many bytes for buffers of a size."""
    return (
        f"--nvme-buffer-bytes {room} does not hold {LEAST_BUFFERS} times that; nearest: --nvme-buffer-bytes "
        f"{LEAST_BUFFERS * size}"
    )


@dataclass(frozen=True)
class ActivationDisks:
    """Swap files for activations. buffer_bytes: of each host buffer, and of each piece. free: pieces that nobody has"""

    store: Store
    buffer_bytes: int
    free: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, store: Store, buffer_bytes: int, pieces: Iterable[str]) -> ActivationDisks:
        """With all pieces free."""
        return cls(store, buffer_bytes, sorted(pieces, reverse=True))

    def expect(self, pieces: int, device: torch.device) -> None:
        """See `GrowingDisks.expect`: these have as many pieces as were planned."""

    def holding(self, nbytes: int, summed: int, name: str) -> ActivationDisks:
        """See `GrowingDisks.holding`: what is larger than a piece stays on the device."""
        return self

    def close(self) -> None:
        """End the requests and remove the files."""
        self.store.close(remove=True)


class GrowingDisks:
    """Swap files for activations of which nobody knows the bytes before. At any time between two passes there are those
    with the largest pieces alone.

    open   makes files with pieces, by name their bytes, in files of names that no others have
    room   bytes of host memory through which activations pass
    """

    def __init__(self, open_files: Callable[[Mapping[str, int]], Store], room: int) -> None:
        self._open, self._room = open_files, room
        self._now: ActivationDisks | None = None
        self._before = list[ActivationDisks]()
        self._size = self._expected = self._count = self._written = 0

    @property
    def store(self) -> Store | None:
        """The files of now; None: nothing has left."""
        return None if self._now is None else self._now.store

    @property
    def bytes_written(self) -> int:
        """Of all files so far."""
        return self._written + sum(each.store.bytes_written for each in (*self._before, self._now) if each is not None)

    def expect(self, pieces: int, device: torch.device) -> None:
        """Called before a pass, when no graph is away. pieces: the most graphs that are away in it at a time. Where
        files end, so does the memory through which they pass: what the device was given before has used it first.
        """
        self._expected = pieces
        if self._now is not None and pieces > self._count:
            self._before.append(self._now)
            self._now = None
        if self._before:
            reached(device)()
            self._end(self._before)

    def holding(self, nbytes: int, summed: int, name: str) -> ActivationDisks:
        """Files with pieces of so many bytes. summed: without what aligns the parts of a piece. name: of the graph.

        Raises DiskError where they cannot be made, and where four of them are more than `room`.
        """
        size = max(buffer_bytes(summed), buffer_bytes(nbytes) if buffer_bytes(summed) < nbytes else 0)
        if LEAST_BUFFERS * size > self._room:
            raise DiskError(f"{FLAG}: {name} keeps {summed:,} bytes of a micro-batch: {too_small(self._room, size)}")
        if self._now is None or size > self._size:
            self._before += [] if self._now is None else [self._now]
            self._now, self._size, self._count = None, max(size, self._size), self._expected
            names = piece_names(self._count)
            try:
                store = self._open(dict.fromkeys(names, self._size))
            except DiskError as error:
                raise type(error)(f"{FLAG}: activations of {name}: {error}") from error
            self._now = ActivationDisks.of(store, self._size, names)
        return self._now

    def close(self) -> None:
        """End the requests and remove all files. Called once or more."""
        self._end(self._before)
        self._end([] if self._now is None else [self._now])
        self._now = None

    def _end(self, disks: list[ActivationDisks]) -> None:
        while disks:
            ended = disks.pop()
            self._written += ended.store.bytes_written
            ended.close()


class WrittenGraph:
    """One graph's way to disks and back. name: in words, for errors."""

    def __init__(self, disks: ActivationDisks, device: torch.device, name: str) -> None:
        self.disks, self._device, self._name = disks, device, name
        self._piece: str | None = None
        self._request: DiskRequest | None = None

    def reserve(self) -> bool:
        """Take a piece; whether there is one."""
        if self.disks.free:
            self._piece = self.disks.free.pop()
        return self._piece is not None

    def write(self, buffer: Tensor) -> None:
        """Start to write a buffer, once the device has done what the current stream was given."""
        assert self._piece is not None, "activations are written for which there is no piece"
        with self._told():
            self._request = self.disks.store.write({self._piece: buffer}, needs=[reached(self._device)])

    def read(self, buffer: Tensor) -> None:
        """Start to read into a buffer, once the device does not use it any more."""
        assert self._piece is not None, "activations are read that were never written"
        with self._told():
            self._request = self.disks.store.read({self._piece: buffer}, needs=[reached(self._device)])
        self.disks.free.append(self._piece)
        self._piece = None

    @contextmanager
    def _told(self) -> Iterator[None]:
        """A context whose errors say what they are about."""
        try:
            yield
        except DiskError as error:
            raise type(error)(f"{FLAG}: activations of {self._name}: {error}") from error

    def wait(self) -> None:
        """Return once what is under way has ended. Raises DiskError, and SwapDamaged where other bytes are read than
        were written.
        """
        request, self._request = self._request, None
        if request is not None:
            with self._told():
                request.wait()
