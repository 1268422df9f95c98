"""Moves through io_uring: one thread, `depth` buffers in flight, by the compiled kernels."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import torch

from fused_ops.native.binding import Library
from megazero.disk.buffers import AlignedBuffers
from megazero.disk.checksum import MASK
from megazero.disk.errors import reason
from megazero.disk.layout import Move
from megazero.disk.transport import ENDED, Broken, Failure

NO_ANSWER = -2
REFUSED = {
    errno.EPERM: "the kernel or the container's seccomp filter forbids it",
    errno.EACCES: "the kernel or a security module forbids it",
    errno.ENOSYS: "this kernel or container has none",
    errno.ENOMEM: "the limit of locked memory (ulimit -l) is too small",
    errno.EINVAL: "this kernel has an older one",
}
"""Why there may be no ring."""


class RingTransport:
    """A ring with its buffers. Raises Failure where the system has none for this process.

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
        self._held: object = None

    def run(self, write: bool, moves: Sequence[Move], pieces: int, memory: object) -> list[int]:
        """As `Transport.run`."""
        if self._broken:
            raise Broken("its ring has failed before")
        table, sums = torch.tensor(moves, dtype=torch.int64), torch.zeros(pieces, dtype=torch.int64)
        answer = torch.zeros(4, dtype=torch.int64)
        self._kernels.call("disk_ring_move", self._ring, int(write), table, len(moves), self._seconds, sums, answer)
        code, number, done, in_flight = map(int, answer)
        if in_flight:
            self._broken, self._held = True, memory
            said = f"no answer for {self._seconds} s" if code == NO_ANSWER else reason(code)
            raise Broken(f"{said}, with {in_flight} requests under way")
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
