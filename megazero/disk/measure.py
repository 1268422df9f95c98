"""What a path reads and writes in a second: its share among several paths, and the figures of `megazero bench-nvme`."""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

from megazero.disk.backend import DiskOptions, open_backend
from megazero.disk.buffers import AlignedBuffers, DirectMemory
from megazero.disk.checksum import BLOCK
from megazero.disk.lanes import DiskLanes, DiskRequest
from megazero.disk.layout import Extent, PieceMemory, SwapLayout, moves, padded
from megazero.disk.requests import run_moves
from megazero.disk.swap_file import SwapFile, stem_of
from megazero.disk.transport import Transport

TRIAL = "trial-"
"""What the name of its job begins with."""
TRIAL_BYTES = 16 << 20, 128 << 20
"""The least and the most of the file by which a path is weighed. It is no larger than what the paths will hold."""
TRIAL_SECONDS = 0.3
"""For which the largest such file is read, and written; a smaller one for as much less."""
AREAS = 2
"""Parts of the file: one is written while the other is read."""


class DiskTrial:
    """A file of its own in a folder, which is written and read to measure. It is removed at the end.

    words  which way of moving bytes runs
    bytes  of one of the two areas

    Reads and writes take their turns within an area, `piece_bytes` in a call, from memory that differs in every block:
    a disk may compress zeros. Raises DiskError.
    """

    def __init__(self, folder: Path, options: DiskOptions, total: int, piece_bytes: int = 64 << 20) -> None:
        self.bytes = max(total // AREAS, options.buffer_bytes)
        self._lanes: DiskLanes | None = None
        self._piece, self._options = min(piece_bytes, self.bytes), options
        direct = DirectMemory()
        self._memory = [direct.allocate(self._piece).random_(256) for _ in range(AREAS)]
        layout = SwapLayout({"trial": self.bytes}, (1.0,))
        self._extents = [layout.extents("trial", area)[0] for area in range(AREAS)]
        self._file = SwapFile(folder / f"{stem_of(f'{TRIAL}{os.getpid()}', 0)}.bin", layout.file_bytes[0])
        try:
            self.use(options)
        except BaseException:
            self._file.close(remove=True)
            raise

    def use(self, options: DiskOptions) -> None:
        """Go on with these options."""
        if self._lanes is not None:
            self._lanes.close()
        backend = open_backend(options, [self._file])
        self.words, self._options = backend.words, options
        self._lanes = DiskLanes(backend.reads, backend.writes)

    def __enter__(self) -> DiskTrial:
        return self

    def __exit__(self, *error: object) -> None:
        if self._lanes is not None:
            self._lanes.close()
        self._file.close(remove=True)

    def fill(self) -> None:
        """Write both areas once, so that every byte can be read."""
        for area in range(AREAS):
            for at in range(0, self.bytes - self._piece + 1, self._piece):
                self._submit(True, area, at).wait()
        self._file.sync()

    def plain_rate(self, write: bool, request_bytes: int, seconds: float) -> float:
        """Bytes per second of a loop with one request at a time, from one buffer and without checksums."""
        start, moved, buffers = time.perf_counter(), 0, AlignedBuffers(1, request_bytes)
        ctypes.memmove(buffers.at(0), self._memory[0].data_ptr(), min(request_bytes, self._piece))
        first, last = self._extents[int(write)].offset, self.bytes // request_bytes * request_bytes
        with buffers.view(0) as view:
            while time.perf_counter() - start < seconds:
                offset = first + moved % last
                moved += (
                    os.pwrite(self._file.handle, view, offset)
                    if write
                    else os.preadv(self._file.handle, [view], offset)
                )
        buffers.close()
        if write:
            self._file.sync()
        return moved / (time.perf_counter() - start)

    def rates(self, *lanes: bool, seconds: float) -> list[float]:
        """Bytes per second of each lane (True: writes, False: reads) while all of them run side by side.

        Writes count when they are durable: the time that this takes is included.
        """
        with ThreadPoolExecutor(len(lanes)) as pool:
            return list(pool.map(lambda lane: self._drive(lane, seconds), lanes))

    def _drive(self, write: bool, seconds: float) -> float:
        """Three requests stand on the lane at any time, so that its threads never wait for this one."""
        start, moved, turns = time.perf_counter(), 0, cycle(range(0, self.bytes - self._piece + 1, self._piece))
        under_way = deque(self._submit(write, int(write), next(turns)) for _ in range(3))
        while under_way:
            under_way.popleft().wait()
            moved += self._piece
            if time.perf_counter() - start < seconds:
                under_way.append(self._submit(write, int(write), next(turns)))
        if write:
            self._file.sync()
        return moved / (time.perf_counter() - start)

    def _submit(self, write: bool, area: int, at: int) -> DiskRequest:
        part = Extent(0, self._extents[area].offset + at, 0, self._piece)
        memory = PieceMemory([part], self._memory[area].data_ptr(), direct=True)
        plan = moves([memory], self._options.buffer_bytes, self._options.direct_bytes)

        def work(transport: Transport) -> list[int]:
            return run_moves(transport, write, plan, self._memory, [self._file.path.name], [self._file])

        assert self._lanes is not None
        return self._lanes.submit(write, work)


def weights_of(folders: Sequence[Path], options: DiskOptions, held_bytes: int) -> tuple[float, ...]:
    """The shares of several paths, which add up to 1, in proportion to what each reads and writes in a second.

    held_bytes  of all that the paths will hold together: little of that is not worth a long trial

    A path alone is not measured. Raises DiskError.
    """
    if len(folders) == 1:
        return (1.0,)
    least, most = TRIAL_BYTES
    total = min(max(held_bytes, least), most)
    piece_bytes, seconds = padded(total // 8, BLOCK), TRIAL_SECONDS * total / most
    rates = []
    for folder in folders:
        with DiskTrial(folder, options, total, piece_bytes) as trial:
            trial.fill()
            (writes,), (reads,) = trial.rates(True, seconds=seconds), trial.rates(False, seconds=seconds)
        rates.append(1 / (1 / reads + 1 / writes))
    return tuple(rate / sum(rates) for rate in rates)
