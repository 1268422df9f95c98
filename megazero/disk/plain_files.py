"""Model state as plain files in a folder that another host may own, mounted by NFS or the like: a file for each piece,
read and written by the calls that every file system has.

The files are of one run, which knows the checksums of their pieces, and are removed at its end. Such a folder may have
no locks. So a run removes what another one has left there only where this kernel says that the other one has ended.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fused_ops.native import library
from megazero.disk.checksum import MASK, Copier, copier
from megazero.disk.lanes import DiskLanes, DiskRequest, Need
from megazero.disk.layout import Move
from megazero.disk.swap_file import DiskError, SwapDamaged
from megazero.disk.transports import ENDED, Failure, Transport, memory_at, read_at

PREFIX = "megazero-files-"
NAME = re.compile(rf"\.?{PREFIX}([\w-]+)-\d{{5,}}")
"""What a folder may hold of ours; the dot: it is being made. Group: the job."""
OWNER = "owner.json"
WORKERS = 2
"""Threads of a lane: while one asks for bytes, the other computes a checksum."""


def folder_of(folder: Path, job: str, rank: int) -> Path:
    """The folder of a rank's files."""
    return folder / f"{PREFIX}{job}-{rank:05d}"


class PlainTransport:
    """Moves bytes between files and the caller's memory, without buffers of its own. What is written is not padded."""

    def __init__(self, checksum: Copier) -> None:
        self._checksum = checksum

    def run(self, write: bool, moves: Sequence[Move], pieces: int, memory: object) -> list[int]:
        """As `disk.transports.Transport.run`."""
        sums, call = [0] * pieces, os.pwrite if write else read_at
        for number, move in enumerate(moves):
            view, done = memory_at(move.address, move.bytes), 0
            while done < move.bytes:
                try:
                    passed = call(move.file, view[done:], move.offset + done)
                except OSError as error:
                    raise Failure(error.errno or ENDED, number, done) from error
                if not passed:
                    raise Failure(ENDED, number, done)
                done += passed
            added = self._checksum(0, move.address, move.bytes, move.block)
            sums[move.piece] = (sums[move.piece] + added) & MASK
        return sums

    def close(self) -> None:
        """There is nothing to free."""


class _Written(NamedTuple):
    """The newest content of a piece: place `number` of a request."""

    request: DiskRequest
    number: int

    @property
    def sum(self) -> int:
        """Once the request is over. Raises its error."""
        self.request.wait()
        return self.request.sums[self.number]


class PlainFiles:
    """The plain files of a rank, as a `disk.store.Store`. Requests on one piece wait for each other in the order of
    submission.

    path       of the folder that holds them, which is this rank's own
    backend    which way of moving bytes runs, and what others have left beside the folder, in words
    file_bytes of all files, once each is written
    """

    memory_bytes = 0

    def __init__(self, path: Path, pieces: Mapping[str, int], beside: str = "") -> None:
        """Make the folder, in which there is nothing yet. Raises DiskError."""
        self.path, self.backend = path, f"plain files in {path.parent}, by threads{beside}"
        self.bytes_read = self.bytes_written = 0
        self.file_bytes = sum(pieces.values())
        self._pieces = pieces
        self._files = {name: path / f"piece-{number:06d}" for number, name in enumerate(pieces)}
        made = path.with_name(f".{path.name}")
        try:
            made.mkdir(mode=0o700)
            (made / OWNER).write_text(json.dumps(_Owner.this()._asdict()))
            made.rename(path)  # so that nobody sees it without an owner
        except OSError as error:
            raise DiskError.of(f"{path}: the folder for plain files cannot be made", error) from error
        checksum = copier(library.kernels_on(torch.device("cpu")))
        reads, writes = ([PlainTransport(checksum) for _ in range(WORKERS)] for _ in range(2))
        self._lanes = DiskLanes(reads, writes)
        self._written = dict[str, _Written]()
        self._reading = dict[str, list[DiskRequest]]()

    def allocate(self, count: int) -> Tensor:
        """See `disk.store.Store`."""
        return torch.zeros(count, dtype=torch.uint8)

    def has(self, name: str) -> bool:
        """See `disk.store.Store`."""
        return name in self._written

    def read(self, tensors: Mapping[str, Tensor], needs: Sequence[Need] = ()) -> DiskRequest:
        """See `disk.swap.SwapSpace.read`. A tensor of another size is an error of the request."""
        missing = [name for name in tensors if name not in self._written]
        if missing:
            raise DiskError(f"{self.path}: piece {missing[0]!r} has never been written")
        writes = {name: self._written[name] for name in tensors}

        def work(transport: Transport) -> list[int]:
            sums = []
            for name, tensor in tensors.items():
                wanted = writes[name].sum
                sums.append(self._moved(transport, name, tensor, write=False))
                if sums[-1] != wanted:
                    raise SwapDamaged(
                        f"{self._files[name]}: piece {name!r} of {self._pieces[name]:,} bytes has the checksum "
                        f"{sums[-1]:016x}; {wanted:016x} was written"
                    )
            return sums

        request = self._lanes.submit(False, work, [written.request for written in writes.values()], needs)
        self.bytes_read += sum(tensor.nbytes for tensor in tensors.values())
        for name in tensors:
            under_way = [earlier for earlier in self._reading.get(name, []) if not earlier.done()]
            self._reading[name] = [*under_way, request]
        return request

    def write(self, tensors: Mapping[str, Tensor], needs: Sequence[Need] = ()) -> DiskRequest:
        """See `disk.swap.SwapSpace.write`. A tensor of another size is an error of the request."""
        after = [reader for name in tensors for reader in self._reading.pop(name, [])]
        after += [self._written[name].request for name in tensors if name in self._written]

        def work(transport: Transport) -> list[int]:
            return [self._moved(transport, name, tensor, write=True) for name, tensor in tensors.items()]

        request = self._lanes.submit(True, work, after, needs)
        self.bytes_written += sum(tensor.nbytes for tensor in tensors.values())
        self._written |= {name: _Written(request, number) for number, name in enumerate(tensors)}
        return request

    def close(self, *, remove: bool) -> None:
        """End the requests, once, and in no child of a fork. remove: delete the folder too."""
        if not self._lanes.usable:
            return
        self._lanes.close()
        if remove:
            shutil.rmtree(self.path, ignore_errors=True)

    def _moved(self, transport: Transport, name: str, tensor: Tensor, *, write: bool) -> int:
        """Read or write a piece, on a thread of a lane; its checksum."""
        path, size = self._files[name], self._pieces[name]
        assert tensor.nbytes == size and tensor.is_contiguous(), f"piece {name!r} has {size:,} bytes"
        what, verb = ("writing", "written") if write else ("reading", "read")
        flags = os.O_WRONLY | os.O_CREAT if write else os.O_RDONLY
        try:
            handle = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                (added,) = transport.run(write, [Move(handle, 0, tensor.data_ptr(), size, 0, 0)], 1, tensor)
            finally:
                os.close(handle)  # a file system of another host may say here that it has no room
            return added
        except Failure as failure:
            error = failure.__cause__
            progress = f"{path}: {what} piece {name!r}: {failure.done:,} of {size:,} bytes were {verb}"
            if isinstance(error, OSError):
                raise DiskError.of(progress, error) from error
            raise SwapDamaged(f"{progress}: the file ends there") from failure
        except OSError as error:
            raise DiskError.of(f"{path}: {what} piece {name!r} of {size:,} bytes", error) from error


def open_files(folders: Sequence[Path], pieces: Mapping[str, int], *, job: str, rank: int) -> PlainFiles:
    """The plain files of a rank in the one folder, each piece one of them. pieces: bytes by name. job: a word for the
    names, the same for all ranks, that no other run has.

    What runs of this host have left that are known to have ended is removed. Raises DiskError.
    """
    (folder,) = folders
    return PlainFiles(folder_of(folder, job, rank), pieces, _beside(remove_leftovers(folder, job)))


def remove_unused(folders: Sequence[Path], job: str, rank: int) -> None:
    """Remove a rank's files, where the run ends before its first step."""
    for folder in folders:
        shutil.rmtree(folder_of(folder, job, rank), ignore_errors=True)


class _Owner(NamedTuple):
    """A process, so that no other one is the same: what the kernel calls its boot, the namespace of its number, the
    number, and when it began.
    """

    boot: str
    namespace: str
    process: int
    began: str

    @classmethod
    def of(cls, process: int) -> _Owner:
        """A living process of this kernel. Raises OSError if there is none."""
        began = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(boot, os.readlink("/proc/self/ns/pid"), process, began)

    @classmethod
    def this(cls) -> _Owner:
        try:
            return cls.of(os.getpid())
        except OSError:  # a system without these files, where nobody is known to have ended
            return cls("", "", os.getpid(), "")

    def has_ended(self) -> bool | None:
        """Whether this kernel says so; None: it is of another host or container, of which this kernel knows nothing."""
        here = self.this()
        if not here.boot or (self.boot, self.namespace) != (here.boot, here.namespace):
            return None
        with suppress(OSError):
            return self.of(self.process) != self
        return True


def remove_leftovers(folder: Path, job: str) -> list[Path]:
    """Remove the folders of processes that are known to have ended without doing so; return those of which nothing is
    known. job: this run's, whose ranks make their folders now.
    """
    unknown = list[Path]()
    for path, has_ended in _folders_of_others(folder):
        match = NAME.fullmatch(path.name)
        if has_ended:
            shutil.rmtree(path, ignore_errors=True)
        elif has_ended is None and match is not None and match[1] != job:
            unknown.append(path)
    return unknown


def leftover_bytes(folder: Path) -> int:
    """Bytes that `remove_leftovers` would free."""
    total = 0
    for path in (path for path, has_ended in _folders_of_others(folder) if has_ended):
        with suppress(OSError):  # another process removes it
            total += sum(file.stat().st_blocks * 512 for file in path.iterdir())
    return total


def _folders_of_others(folder: Path) -> list[tuple[Path, bool | None]]:
    """The folders of ours in a folder, and whether the process of each has ended; None: nobody knows."""
    with suppress(OSError):
        return [(path, _owner_has_ended(path)) for path in sorted(folder.iterdir()) if NAME.fullmatch(path.name)]
    return []


def _owner_has_ended(path: Path) -> bool | None:
    with suppress(OSError, ValueError, TypeError):
        return _Owner(**json.loads((path / OWNER).read_text())).has_ended()
    return None


def _beside(others: Sequence[Path]) -> str:
    """What a user may have to delete."""
    if not others:
        return ""
    count = f"{len(others)} folders are" if len(others) > 1 else "a folder is"
    named = f"{others[0].parent}/{PREFIX}*"
    return f"; {count} there of other runs ({named}): if they have ended, delete what they have left"
