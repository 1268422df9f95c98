"""Which of the two ways moves bytes here, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fused_ops.native import library
from fused_ops.native.binding import Library
from megazero.disk.buffers import AlignedBuffers
from megazero.disk.checksum import BLOCK, copier
from megazero.disk.errors import Broken, DiskError, Failure
from megazero.disk.layout import HEADER_BYTES, Move
from megazero.disk.swap_file import SwapFile
from megazero.disk.transports import REFUSED, RingTransport, ThreadTransport, Transport

AUTO, IO_URING, THREADS = CHOICES = "auto", "io_uring", "threads"


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
