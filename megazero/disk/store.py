"""What every tier in files is to the program: pieces that are read and written beside the computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from megazero.disk.lanes import DiskRequest, Need


class Store(Protocol):
    """The files of a rank on one tier. `disk.swap.SwapSpace` is one; the words of its methods hold for all.

    bytes_read, bytes_written  of the requests so far
    """

    bytes_read: int
    bytes_written: int

    @property
    def backend(self) -> str:
        """Which way of moving bytes runs, and why, in words."""

    @property
    def memory_bytes(self) -> int:
        """Of the buffers between files and memory."""

    def allocate(self, count: int) -> Tensor:
        """uint8 [count] with zeros, of which pieces are read and written in the fastest way."""

    def has(self, name: str) -> bool:
        """Whether a piece has content, or will have once a write is over."""

    def read(self, tensors: Mapping[str, Tensor], needs: Sequence[Need] = ()) -> DiskRequest:
        """Begin to read pieces into tensors, behind the writes of these pieces. needs: waited for before."""

    def write(self, tensors: Mapping[str, Tensor], needs: Sequence[Need] = ()) -> DiskRequest:
        """Begin to write tensors as pieces, behind all requests on these pieces. needs: waited for before."""

    def close(self, *, remove: bool) -> None:
        """End the requests and close the files. remove: delete them too."""
