"""Aligned memory that disks read and write directly. A child of a fork has none of it: the kernel may write there."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import torch
from torch import Tensor


def own_pages(count: int) -> mmap.mmap:
    """Pages of this process alone with so many bytes, large ones where the kernel has them."""
    # Not shared, as mmap's are by default: few kernels give large pages to shared memory, whatever the advice.
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if hasattr(mmap, advice):
            with suppress(OSError):  # a kernel without large pages
                memory.madvise(getattr(mmap, advice))
    return memory


class DirectMemory:
    """Memory that a disk reads and writes itself, without a buffer in between. It is kept as long as this object, or a
    tensor in it.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def allocate(self, count: int) -> Tensor:
        """uint8 [count] with zeros, at the start of a page."""
        memory = torch.frombuffer(own_pages(max(count, 1)), dtype=torch.uint8)[:count]
        self._kept.append(memory)
        return memory

    def has(self, tensor: Tensor) -> bool:
        """Whether all of a tensor's bytes are in it; the tensor is contiguous."""
        start = tensor.data_ptr()
        return any(0 <= start - memory.data_ptr() <= memory.nbytes - tensor.nbytes for memory in self._kept)


class AlignedBuffers:
    """`count` buffers of `size` bytes each. All pages exist from the start."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._memory = own_pages(count * size)
        view = (ctypes.c_uint8 * len(self._memory)).from_buffer(self._memory)
        self.address = ctypes.addressof(view)
        ctypes.memset(self.address, 0, len(self._memory))
        del view  # it would keep `close` from returning the pages

    def view(self, number: int) -> memoryview:
        """The bytes of a buffer."""
        return memoryview(self._memory)[number * self.size : (number + 1) * self.size]

    def at(self, number: int) -> int:
        """The address of a buffer."""
        return self.address + number * self.size

    def close(self) -> None:
        self._memory.close()
