"""Pieces of model state in swap files. A kill at any instant leaves one whole step: the record of swap files says which
slot of each piece belongs to it, and one atomic rename replaces the record.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megazero.disk.buffers import DirectMemory
from megazero.disk.lanes import DiskLanes, DiskRequest, Need, Work
from megazero.disk.layout import Move, PieceMemory, SwapLayout, moves, padded
from megazero.disk.swap_file import DiskError, SwapDamaged, SwapFile, reason
from megazero.disk.transports import Broken, DiskOptions, Failure, Transport, open_backend
from megazero.system.durable import replace_file
from megazero.system.reading import BOUNDS, raised_as, read_text

VERSION = 1


class Version(NamedTuple):
    """The content of a piece: its slot and its checksum."""

    slot: int
    sum: int


@dataclass(frozen=True)
class WholeStep:
    """A step whose pieces have all been written.

    step      its number
    versions  of the pieces
    about     what the caller keeps with the step, as JSON
    """

    step: int
    versions: Mapping[str, Version]
    about: Mapping[str, Any]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> WholeStep:
        """From JSON."""
        return cls(fields["step"], {name: Version(*pair) for name, pair in fields["versions"].items()}, fields["about"])


@dataclass(frozen=True)
class SwapRecord:
    """What is in swap files.

    ids      of the files, in the order of the paths
    weights  of the paths
    pieces   bytes by name, in the order of the layout
    last     the last whole step
    earlier  the one before it. It is whole until something is written after the last. Of ranks that were killed
             together, some may have flipped and others not: this is the step that all of them have
    """

    ids: tuple[str, ...]
    weights: tuple[float, ...]
    pieces: Mapping[str, int]
    last: WholeStep
    earlier: WholeStep | None = None

    @property
    def steps(self) -> list[int]:
        """The numbers of the whole steps, the last one first."""
        return [whole.step for whole in (self.last, self.earlier) if whole is not None]

    def back_to(self, step: int | None) -> SwapRecord:
        """The record whose last step is this one; None: itself. Raises KeyError if there is no such step."""
        if step is None or step == self.last.step:
            return self
        if self.earlier is None or step != self.earlier.step:
            raise KeyError(step)
        return replace(self, last=self.earlier, earlier=None)

    def write(self, path: Path) -> None:
        """Replace the file durably. Raises DiskError; then the earlier record is still there."""
        text = json.dumps({"version": VERSION, **asdict(self)})
        try:
            replace_file(path, f"{_digest(text)}\n{text}\n".encode(), str(os.getpid()))
        except OSError as error:
            raise DiskError.of(f"{path}: the record of step {self.last.step} cannot be written", error) from error

    @classmethod
    def read(cls, path: Path) -> SwapRecord:
        """Raises SwapDamaged for a record that is missing or was not written by `write`."""
        with raised_as(SwapDamaged):
            digest, _, text = read_text(path, BOUNDS.index).partition("\n")
        if digest != _digest(text.rstrip("\n")):
            raise SwapDamaged(f"{path}: its checksum is not that of its {len(text):,} characters")
        fields = json.loads(text)
        if fields["version"] != VERSION:
            raise SwapDamaged(f"{path}: was written by another version of megazero")
        last, earlier = WholeStep.of(fields["last"]), fields["earlier"] and WholeStep.of(fields["earlier"])
        return cls(tuple(fields["ids"]), tuple(fields["weights"]), fields["pieces"], last, earlier)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class _Written:
    """A version of a piece that this process has written, or is about to: place `index` of a request."""

    slot: int
    request: DiskRequest
    index: int

    @property
    def sum(self) -> int:
        """Once the request is over. Raises its error."""
        self.request.wait()
        return self.request.sums[self.index]


class SwapSpace:
    """The swap files of a rank: pieces that are read, and written into the slot that is not the last whole step's.

    A piece is written at most once a step in the usual case; written again before `flip`, its newest content counts. A
    read gives the newest content, flipped or not. Requests run beside the program. Those on one piece wait for each
    other in the order of submission, and what is written after a flip waits for the flip.

    A piece with a slot more (`disk.layout.SwapLayout.again`) keeps its content of the last flip, or, where steps do not
    become whole, that before the last write: `go_back` takes it up again.

    After a write or a flip has failed, every later one fails too: the last whole step stays.

    backend                    which way of moving bytes runs, and why, in words
    record                     of the last whole step; None before the first
    bytes_read, bytes_written  of the requests so far, as the disk has them: whole pages
    memory_bytes               of the buffers between files and memory
    """

    def __init__(
        self,
        files: Sequence[SwapFile],
        record_path: Path,
        layout: SwapLayout,
        options: DiskOptions,
        record: SwapRecord | None,
    ) -> None:
        """Use `disk.opening.open_swap`."""
        backend = open_backend(options, files)
        self.backend, self.record = backend.words, record
        self.bytes_read = self.bytes_written = 0
        self._files, self._record_path, self._layout = files, record_path, layout
        self._options, self.memory_bytes = options, options.memory_bytes
        self._lanes = DiskLanes(backend.reads, backend.writes)
        self._kept: dict[str, Version | _Written] = {**record.last.versions} if record else {}
        self._newest, self._reading = dict(self._kept), dict[str, list[DiskRequest]]()
        self._changes, self._flips = list[DiskRequest](), list[DiskRequest]()  # under way; the last flip
        self._failed: BaseException | None = None
        self._direct = DirectMemory()

    @property
    def paths(self) -> list[Path]:
        """Of the swap files."""
        return [file.path for file in self._files]

    @property
    def file_bytes(self) -> int:
        """Of all swap files."""
        return sum(self._layout.file_bytes)

    def allocate(self, count: int) -> Tensor:
        """uint8 [count] with zeros, of which pieces are read and written without a copy if they begin at a multiple of
        4096 bytes in it. It belongs to these swap files until they are closed. A child of a fork cannot touch it.
        """
        return self._direct.allocate(count)

    def has(self, name: str) -> bool:
        """Whether a piece has content, or will have once a write is over."""
        return name in self._newest

    def read(self, tensors: Mapping[str, Tensor], needs: Sequence[Need] = ()) -> DiskRequest:
        """Begin to read pieces into tensors: contiguous, on the CPU, of the pieces' bytes. They are in use until
        `wait` of the request returns. needs: waited for before.

        Raises DiskError for a piece that was never written, ValueError for a tensor of another size. The request
        raises DiskError, and SwapDamaged where the bytes are not those that were written.
        """
        memory = self._checked(tensors)
        missing = [name for name in tensors if name not in self._newest]
        if missing:
            raise DiskError(f"{self._files[0].path}: piece {missing[0]!r} has never been written")
        versions = [self._newest[name] for name in tensors]
        plan = self._moves(memory, tensors, [version.slot for version in versions])
        names = list(tensors)

        def work(transport: Transport) -> list[int]:
            # Before the read, which is pointless if the write of a piece has failed.
            wanted = [Version(version.slot, version.sum) for version in versions]
            sums = run_moves(transport, False, plan, memory, names, self._files)
            for name, version, read_sum in zip(names, wanted, sums, strict=True):
                if read_sum != version.sum:
                    raise self._differs(name, version, read_sum)
            return sums

        after = [version.request for version in versions if isinstance(version, _Written)]
        request = self._lanes.submit(False, work, after, needs)
        self.bytes_read += sum(padded(move.bytes) for move in plan)
        for name in names:
            under_way = [earlier for earlier in self._reading.get(name, []) if not earlier.done()]
            self._reading[name] = [*under_way, request]
        return request

    def write(self, tensors: Mapping[str, Tensor], needs: Sequence[Need] = ()) -> DiskRequest:
        """Begin to write tensors as pieces, once `needs` are over. They must not change until `wait` of the request
        returns.

        Errors as for `read`.
        """
        memory, names = self._checked(tensors), list(tensors)
        if self._layout.slots == 1:  # no step becomes whole: what is there before the write is kept, if anything
            self._kept |= {name: self._newest[name] for name in names if name in self._newest}
        slots = [
            (self._kept[name].slot + 1) % self._layout.slots_of(name) if name in self._kept else 0 for name in names
        ]
        plan = self._moves(memory, names, slots)

        def work(transport: Transport) -> list[int]:
            return run_moves(transport, True, plan, memory, names, self._files)

        # Who waits for this write waits for these readers too, so that they can be forgotten.
        after = [reader for name in names for reader in self._reading.pop(name, [])]
        after += [version.request for name in names if isinstance(version := self._newest.get(name), _Written)]
        request = self._submit_change(work, [*after, *self._flips], needs)
        self.bytes_written += sum(padded(move.bytes) for move in plan)
        for index, (name, slot) in enumerate(zip(names, slots, strict=True)):
            self._newest[name] = _Written(slot, request, index)
        return request

    def flip(self, step: int, about: Mapping[str, Any] | None = None) -> DiskRequest:
        """Make all that was written so far the last whole step, durably, behind the writes before it.

        about: JSON values that are kept with the step. The request raises DiskError. With one slot it only waits for
        the writes.
        """
        about = json.loads(json.dumps(about or {}))  # a value that is none of JSON fails here
        # At once: what is written from now on takes the other slots, and waits for this request.
        versions = self._kept = dict(self._newest)

        def work(transport: Transport) -> list[int]:
            if self._layout.slots == 1:
                return []  # the next step is written over this one, so no record could be true
            for file in self._files:
                if not file.path.exists():  # its handle still takes all writes
                    raise SwapDamaged(f"{file.path}: has been removed while step {step} was written")
                file.sync()
            flipped = {name: Version(version.slot, version.sum) for name, version in versions.items()}
            layout, ids = self._layout, tuple(file.id for file in self._files)
            earlier = self.record.last if self.record else None
            record = SwapRecord(ids, layout.weights, layout.pieces, WholeStep(step, flipped, about), earlier)
            record.write(self._record_path)
            self.record = record
            return []

        request = self._submit_change(work, [*self._changes, *self._flips])
        self._flips, self._changes = [request], []
        return request

    def go_back(self, name: str) -> None:
        """Have the content of a piece be again what it was at the last flip, or before the last write. The caller has
        waited for that write.
        """
        assert name in self._layout.again and name in self._kept, f"no earlier content of piece {name!r} is there"
        self._newest[name] = self._kept[name]

    def close(self, *, remove: bool) -> None:
        """End the lanes and close the files. Requests that have not begun fail. remove: delete files and record too.

        In a child of a fork, and the second time, it does nothing.
        """
        if not self._lanes.usable:
            return
        self._lanes.close()
        if remove:
            self._record_path.unlink(missing_ok=True)
        for file in self._files:
            file.close(remove)

    def _checked(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        for name, tensor in tensors.items():
            count = self._layout.pieces.get(name)
            if count is None:
                raise ValueError(f"there is no piece {name!r}")
            if tensor.nbytes != count or tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise ValueError(
                    f"piece {name!r} has {count:,} bytes; the tensor has {tensor.nbytes:,}, on {tensor.device}, "
                    f"{'' if tensor.is_contiguous() else 'not '}contiguous"
                )
        return list(tensors.values())

    def _moves(self, memory: Sequence[Tensor], names: Iterable[str], slots: Sequence[int]) -> list[Move]:
        parts = [
            PieceMemory(self._layout.extents(name, slot), tensor.data_ptr(), self._direct.has(tensor))
            for name, slot, tensor in zip(names, slots, memory, strict=True)
        ]
        return moves(parts, self._options.buffer_bytes, self._options.direct_bytes)

    def _submit_change(self, work: Work, after: Sequence[DiskRequest], needs: Sequence[Need] = ()) -> DiskRequest:
        self._changes = [request for request in self._changes if not request.done()]
        request = self._lanes.submit(True, lambda transport: self._guarded(work, transport), after, needs)
        self._changes.append(request)
        return request

    def _guarded(self, work: Work, transport: Transport) -> list[int]:
        """Work that changes what is on disk. After a failure there is no more of it."""
        if self._failed is not None:
            raise DiskError(f"nothing more is written after an earlier failure: {self._failed}") from self._failed
        try:
            return work(transport)
        except BaseException as error:
            self._failed = error
            raise

    def _differs(self, name: str, version: Version, read_sum: int) -> SwapDamaged:
        extents = self._layout.extents(name, version.slot)
        places = ", ".join(f"{self._files[extent.path].path} at byte {extent.offset:,}" for extent in extents)
        return SwapDamaged(
            f"{places}: piece {name!r} of {self._layout.pieces[name]:,} bytes has the checksum {read_sum:016x}; "
            f"{version.sum:016x} was written"
        )


def run_moves(
    transport: Transport,
    write: bool,
    plan: Sequence[Move],
    memory: object,
    names: Sequence[str],
    files: Sequence[SwapFile],
) -> list[int]:
    """Execute moves, whose files are indices of `files`; return the checksums of the pieces, whose names these are.

    memory: what keeps the moves' addresses valid.

    Raises DiskError, or SwapDamaged for a file that ends early.
    """
    try:
        handed = [move._replace(file=files[move.file].handle) for move in plan]
        return transport.run(write, handed, len(names), memory)
    except Failure as failure:
        move = plan[failure.number]
        raise _explained(failure, write, move, names[move.piece], files[move.file]) from failure.__cause__
    except Broken as error:
        what = "writing" if write else "reading"
        raise DiskError(f"{files[plan[0].file].path}: {what} piece {names[0]!r}: {error}") from error


def _explained(failure: Failure, write: bool, move: Move, name: str, file: SwapFile) -> DiskError:
    what, verb = ("writing", "written") if write else ("reading", "read")
    where = (
        f"{file.path}: {what} piece {name!r}: {failure.done:,} of {padded(move.bytes):,} bytes at byte {move.offset:,}"
    )
    if failure.code:
        return DiskError(f"{where} were {verb}: {reason(failure.code)}", failure.code)
    if failure.__cause__ is not None:
        return DiskError(f"{where} were {verb}: {failure.__cause__!r}")
    size = -1
    with suppress(OSError):
        size = os.fstat(file.handle).st_size
    ends = f"the file has {size:,} bytes, not the {file.size:,} with which it was made"
    return SwapDamaged(f"{where} were {verb}: {ends}")
