"""Activations of graphs in swap files, between their copy to host memory and the copy back.

A graph takes the first piece that is free when it leaves, and gives it back when its read is submitted: swap files put
requests on one piece behind each other. So there are as many pieces as graphs are away at a time, and not one for each.
A step of a ramp may want one more, since its order is another one; that graph stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.disk.lanes import DiskRequest
from megazero.disk.store import Store
from megazero.disk.swap_file import DiskError
from megazero.system.streams import reached

FLAG = "--offload-activations"


def piece_names(count: int) -> list[str]:
    """The names of a swap file's pieces for activations."""
    return [f"activations {number}" for number in range(count)]


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
