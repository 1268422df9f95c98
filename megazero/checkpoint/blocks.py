"""A safetensors file of 1-D tensors whose payload is hashed in blocks.

The format is that of the safetensors library, which opens these files. The metadata entry "sha256 KEY" lists one digest
for each block of a tensor. The library itself does not write them: it takes the whole state as bytes at once, while
this module streams one block at a time in both directions. Digests have a fixed length, so the header is first written
with zeros for digests, then the payload, then the final header over the first one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from megazero.checkpoint.format import CheckpointError, Damaged
from megazero.system.reading import BOUNDS, Unreadable, open_file, parse_json, shown

BLOCK_BYTES = 8 * 1024 * 1024
"""Size of a block. A writer holds one block in memory; a reader that needs part of a block reads all of it."""
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}
_LENGTH = 8


class Slot(NamedTuple):
    """A 1-D tensor of a file, without its values."""

    key: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def _header(slots: Sequence[Slot], digests: Mapping[str, Sequence[str]], block_bytes: int) -> bytes:
    """The length (8 bytes, little-endian) and the JSON, padded with spaces to a multiple of eight."""
    metadata = {"format": "pt", "block_bytes": str(block_bytes)} | {
        f"sha256 {slot.key}": " ".join(digests[slot.key]) for slot in slots
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for slot in slots:
        header[slot.key] = {
            "dtype": _CODES[slot.dtype],
            "shape": [slot.numel],
            "data_offsets": [offset, offset + slot.nbytes],
        }
        offset += slot.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH, "little") + text


class BlockWriter:
    """A fragment file that is being written, and a context manager at whose end it is complete and synced to disk.

    slots: its tensors. The values of a tensor come in order, those of different tensors in any order. Memory: one
    block. Raises OSError that names the file; FileExistsError if it exists already.
    """

    def __init__(self, path: Path, slots: Sequence[Slot], block_bytes: int = BLOCK_BYTES) -> None:
        assert block_bytes % 8 == 0 and len({slot.key for slot in slots}) == len(slots)
        self.path, self._slots, self._block_bytes = path, slots, block_bytes
        blank = _header(slots, {slot.key: ["0" * 64] * -(-slot.nbytes // block_bytes) for slot in slots}, block_bytes)
        starts = accumulate((slot.nbytes for slot in slots), initial=len(blank))
        self._payloads = {slot.key: _Payload(slot, at, block_bytes) for slot, at in zip(slots, starts, strict=False)}
        with _naming(path):
            self._file = open(path, "xb")  # noqa: SIM115 - __exit__ closes it
            try:
                self._file.write(blank)
            except BaseException:
                self._file.close()
                raise

    def write(self, key: str, start: int, values: Tensor) -> None:
        """Write elements of a tensor from `start` on: contiguous, 1-D, in its dtype, of any device."""
        with _naming(self.path):
            self._payloads[key].write(self._file, start, values)

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _naming(self.path), self._file:
            if kind is None:
                self._finish()

    def _finish(self) -> None:
        """Write the header with the digests and sync the file. Raises CheckpointError if values are missing."""
        for key, payload in self._payloads.items():
            if payload.done < payload.slot.numel:
                raise CheckpointError(f"{self.path.name}: {key} got {payload.done} of {payload.slot.numel} elements")
        digests = {key: payload.digests for key, payload in self._payloads.items()}
        self._file.seek(0)
        self._file.write(_header(self._slots, digests, self._block_bytes))
        self._file.flush()
        os.fsync(self._file.fileno())


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An error of a write or a close (a full disk) does not name the file, unlike one of an open: name it."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # OSError picks its subclass by errno


class _Payload:
    """The payload of one tensor as far as it is written.

    offset   of its first byte in the file
    done     number of elements that are written
    digests  of the blocks that are complete
    """

    def __init__(self, slot: Slot, offset: int, block_bytes: int) -> None:
        self.slot, self.offset, self.done, self.digests = slot, offset, 0, list[str]()
        self._step, self._begun = block_bytes // slot.dtype.itemsize, hashlib.sha256()

    def write(self, file: BinaryIO, start: int, values: Tensor) -> None:
        slot, stop = self.slot, start + values.numel()
        assert values.dim() == 1 and values.is_contiguous() and values.dtype == slot.dtype
        assert start == self.done and stop <= slot.numel, (slot, self.done, start, stop)
        file.seek(self.offset + start * slot.dtype.itemsize)
        while self.done < stop:
            end = min(stop, self.done - self.done % self._step + self._step)
            block = values.detach()[self.done - start : end - start].cpu().view(torch.uint8).numpy().data
            self._begun.update(block)
            file.write(block)
            self.done = end
            if end % self._step == 0 or end == slot.numel:
                self.digests.append(self._begun.hexdigest())
                self._begun = hashlib.sha256()


class BlockFile:
    """A fragment file open for reading, and a context manager that closes it.

    Opening checks the header, and `read` checks each block's sha256. Both raise Damaged with the file's name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_file(path)
        except Unreadable as error:
            raise Damaged(str(error).replace(str(path), path.name)) from error
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> None:
        self.size = os.fstat(self._file.fileno()).st_size
        length = self._file.read(_LENGTH)
        count = int.from_bytes(length, "little")
        if len(length) < _LENGTH or count > min(self.size - _LENGTH, BOUNDS.header):
            raise Damaged(f"{self.path.name} is truncated or not a safetensors file")
        text = self._file.read(count)
        self.header_sha256 = hashlib.sha256(length + text).hexdigest()
        self._payload = _LENGTH + count
        try:
            self._entries: dict[str, Any] = parse_json(text.decode(), self.path.name, BOUNDS.manifest_values)
            self._metadata: dict[str, str] = self._entries.pop("__metadata__")
            self._block_bytes = int(self._metadata["block_bytes"])
            if not 8 <= self._block_bytes <= BOUNDS.block or self._block_bytes % 8:
                raise ValueError(f"blocks of {shown(self._block_bytes)} bytes")
            for key in self._entries:
                self._check_claims(key)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{self.path.name} has no readable header ({error})") from error

    def _check_claims(self, key: str) -> None:
        """Raise ValueError unless a tensor's header entry is consistent: dtype, size, one digest for each block."""
        entry = self._entries[key]
        (start, stop), (count,), code = entry["data_offsets"], entry["shape"], entry["dtype"]
        if code not in DTYPES or not all(type(n) is int for n in (start, stop, count)):
            raise ValueError(f"{shown(key)} is {shown(entry)}")
        if not 0 <= start <= stop or count * DTYPES[code].itemsize != stop - start:
            raise ValueError(f"{shown(key)} has {count} elements of {code} in bytes {start} to {stop}")
        if len(self._metadata[f"sha256 {key}"].split()) != -(-(stop - start) // self._block_bytes):
            raise ValueError(f"{shown(key)} does not have one digest for each block")

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def keys(self) -> list[str]:
        return list(self._entries)

    def dtype(self, key: str) -> str:
        """The safetensors code of a tensor's dtype: "F32"."""
        return self._entries[key]["dtype"]

    def block_ranges(self, key: str) -> list[tuple[int, int]]:
        """The blocks of a tensor as half-open ranges of its elements."""
        start, stop = self._entries[key]["data_offsets"]
        item = DTYPES[self.dtype(key)].itemsize
        step = self._block_bytes // item
        count = (stop - start) // item
        return [(i, min(i + step, count)) for i in range(0, count, step)]

    def read(self, key: str, block: int) -> Tensor:
        """Return block `block` of a tensor, 1-D on the CPU in the stored dtype, after checking its digest.

        Several threads may read at once. Raises Damaged.
        """
        start, stop = self._entries[key]["data_offsets"]
        first = start + block * self._block_bytes
        if self._payload + stop > self.size:  # checked before allocating what a short file's header may claim
            raise Damaged(f"{self.path.name} is truncated: it has {self.size} bytes")
        payload = bytearray(min(self._block_bytes, stop - first))
        try:
            count = self._read_at(self._payload + first, payload)
        except OSError as error:
            raise Damaged(f"{self.path.name} cannot be read: {error}") from error
        if count != len(payload):
            raise Damaged(f"{self.path.name} is truncated: it has {self.size} bytes")
        if hashlib.sha256(payload).hexdigest() != self._metadata[f"sha256 {key}"].split()[block]:
            raise Damaged(f"{self.path.name} is altered: the sha256 of block {block} of {key} is not the recorded one")
        return torch.frombuffer(payload, dtype=DTYPES[self.dtype(key)])

    def _read_at(self, offset: int, into: bytearray) -> int:
        """Fill a buffer from an offset, without moving the file's position; return the number of bytes read."""
        view, count = memoryview(into), 0
        while count < len(view) and (got := os.preadv(self._file.fileno(), [view[count:]], offset + count)):
            count += got
        return count
