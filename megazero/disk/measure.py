"""What a folder reads and writes in a second: its share among several folders, the rates of `--placement auto`, and a
step's own pattern for `megazero bench-nvme`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, cycle
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.config.tiers import SLOTS
from megazero.disk.checksum import BLOCK
from megazero.disk.lanes import Need
from megazero.disk.layout import HEADER_BYTES, SwapLayout, padded
from megazero.disk.swap import SwapSpace
from megazero.disk.swap_file import SwapFile, stem_of
from megazero.disk.transports import DiskOptions

TRIAL = "trial-"
"""What the name of its job begins with."""
TRIAL_BYTES = 16 << 20, 128 << 20
"""The least and the most of the file by which a folder is measured."""
TRIAL_SECONDS = 0.3
"""For which the largest such file is read, and written; a smaller one for as much less."""
AREAS = 2
"""Parts of the file: one is written while the other is read."""


class UpdatedPieces(NamedTuple):
    """What a step reaches. rate: bytes read in a second, and as many written. updating: the share of the time in which
    the processor updated them.
    """

    rate: float
    updating: float


class DiskTrial:
    """A swap file of its own in a folder, whose pieces are read and written to measure. It is removed at the end.

    backend      which way of moving bytes runs, in words
    piece_bytes  of a piece: as given, but no more than half of `total`

    Pieces are floats as those of a training, and pass through as many slots of memory: a disk may compress zeros, and
    memory that is used again and again stays in a cache. Raises DiskError.
    """

    def __init__(self, folder: Path, options: DiskOptions, total: int, piece_bytes: int = 64 << 20) -> None:
        area_bytes = max(total // AREAS, options.buffer_bytes)
        self.piece_bytes = min(piece_bytes, padded(area_bytes))
        count = area_bytes // self.piece_bytes or 1
        stem = stem_of(f"{TRIAL}{os.getpid()}", 0)
        # Before the layout, which has an entry for each piece: a size that the disk does not have is an error at once.
        self._file = SwapFile(folder / f"{stem}.bin", HEADER_BYTES + AREAS * count * padded(self.piece_bytes))
        try:
            self._areas = [[f"{area}.{number}" for number in range(count)] for area in range(AREAS)]
            layout = SwapLayout(dict.fromkeys(chain(*self._areas), self.piece_bytes), slots=1)
            self._space = SwapSpace([self._file], folder / f"{stem}.json", layout, options, None)
        except BaseException:
            self._file.close(remove=True)
            raise
        self.backend = self._space.backend
        self._memory = [self._space.allocate(self.piece_bytes) for _ in range(SLOTS)]
        for memory in self._memory:
            memory.view(torch.float32).uniform_()

    def __enter__(self) -> DiskTrial:
        return self

    def __exit__(self, *error: object) -> None:
        self._space.close(remove=True)

    def fill(self) -> None:
        """Write all pieces once, so that every one can be read."""
        for name in chain(*self._areas):
            self._space.write({name: self._memory[0]}).wait()
        self._file.sync()

    def rates(self, *lanes: bool, seconds: float) -> list[float]:
        """Bytes per second of each lane (True: writes, False: reads) while all of them run side by side.

        Writes count when they are durable: the time that this takes is included.
        """

        def rate(write: bool) -> float:
            # Half of the slots for each lane, of which two are moved: the lane's threads never wait for this one.
            names, slots = cycle(self._areas[write]), cycle(self._memory[write::2])
            begin = self._space.write if write else self._space.read
            return self._rate(lambda: begin({next(names): next(slots)}).wait, SLOTS // 2, seconds, changes=write)

        with ThreadPoolExecutor(len(lanes)) as pool:
            return list(pool.map(rate, lanes))

    def step(self, update: Callable[[Tensor], object], seconds: float) -> UpdatedPieces:
        """Read, update and write piece after piece for so many seconds, as a step does with the parts of its state.

        update: changes the bytes of a piece, on a thread of its own.
        """
        names, slots, updates = cycle(chain(*self._areas)), cycle(self._memory), list[float]()

        def updated(arrived: Need, memory: Tensor) -> None:
            arrived()
            begin = time.perf_counter()
            update(memory)
            updates.append(time.perf_counter() - begin)

        def submitted() -> Need:
            """As in `zero.mover`: a piece gets its slot once the piece before it in the slot is written."""
            name, memory = next(names), next(slots)
            arrived = self._space.read({name: memory}).wait
            return self._space.write({name: memory}, needs=[host.submit(updated, arrived, memory).result]).wait

        with ThreadPoolExecutor(1) as host:
            rate = self._rate(submitted, SLOTS, seconds, changes=True)
        return UpdatedPieces(rate, sum(updates) * rate / (len(updates) * self.piece_bytes))

    def _rate(self, submitted: Callable[[], Need], count: int, seconds: float, *, changes: bool) -> float:
        """Bytes per second of pieces of which `count` are under way at any time. submitted: begins the next."""
        start, moved = time.perf_counter(), 0
        under_way = deque(submitted() for _ in range(count))
        while under_way:
            under_way.popleft()()
            moved += self.piece_bytes
            if time.perf_counter() - start < seconds:
                under_way.append(submitted())
        if changes:
            self._file.sync()
        return moved / (time.perf_counter() - start)


class FolderRates(NamedTuple):
    """Bytes that a folder reads in a second, and that it writes: one lane after the other."""

    read: float
    write: float


def folder_rates(folder: Path, options: DiskOptions, held_bytes: int | None = None) -> FolderRates:
    """The rates of a folder. held_bytes: what it will hold, if that is known: little is not worth a long trial.

    Raises DiskError.
    """
    least, most = TRIAL_BYTES
    total = most if held_bytes is None else min(max(held_bytes, least), most)
    seconds = TRIAL_SECONDS * total / most
    with DiskTrial(folder, options, total, padded(total // 8, BLOCK)) as trial:
        trial.fill()
        (writes,), (reads,) = trial.rates(True, seconds=seconds), trial.rates(False, seconds=seconds)
    return FolderRates(reads, writes)


def weights_of(folders: Sequence[Path], options: DiskOptions, held_bytes: int) -> tuple[float, ...]:
    """The shares of several paths, which add up to 1, in proportion to what each reads and writes in a second. A path
    alone is not measured. held_bytes: of all that the paths will hold together. Raises DiskError.
    """
    if len(folders) == 1:
        return (1.0,)
    measured = [folder_rates(folder, options, held_bytes) for folder in folders]
    rates = [1 / (1 / folder.read + 1 / folder.write) for folder in measured]
    return tuple(rate / sum(rates) for rate in rates)
