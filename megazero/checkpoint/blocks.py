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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megazero.checkpoint.format import Damaged
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


@dataclass(frozen=True)
class DeferredTensor:
    """A 1-D tensor that `make` creates just before it is written, so that no two of them are in memory at once."""

    elements: int
    dtype: torch.dtype
    make: Callable[[], Tensor]

    def numel(self) -> int:
        return self.elements

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


Values = Tensor | DeferredTensor


def dtype_code(tensor: Values) -> str:
    """The safetensors code of a tensor's dtype: "F32"."""
    return _CODES[tensor.dtype]


def _header(tensors: Sequence[tuple[str, Values]], digests: Mapping[str, Sequence[str]], block_bytes: int) -> bytes:
    """The length (8 bytes, little-endian) and the JSON, padded with spaces to a multiple of eight."""
    metadata = {"format": "pt", "block_bytes": str(block_bytes)} | {
        f"sha256 {key}": " ".join(digests[key]) for key, _ in tensors
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for key, tensor in tensors:
        header[key] = {
            "dtype": dtype_code(tensor),
            "shape": [tensor.numel()],
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH, "little") + text


def write_file(path: Path, tensors: Sequence[tuple[str, Values]], block_bytes: int = BLOCK_BYTES) -> None:
    """Write contiguous 1-D tensors of any device under their keys, and sync the file to disk.

    Memory: one block. Raises OSError; FileExistsError if the file exists already.
    """
    try:
        with open(path, "xb") as file:
            _fill(file, tensors, block_bytes)
    except OSError as error:
        # An error of a write or a close (a full disk) does not name the file, unlike one of an open.
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # OSError picks its subclass by errno


def _fill(file: BinaryIO, tensors: Sequence[tuple[str, Values]], block_bytes: int) -> None:
    assert block_bytes % 8 == 0 and len({key for key, _ in tensors}) == len(tensors)
    blank = {key: ["0" * 64] * -(-tensor.nbytes // block_bytes) for key, tensor in tensors}
    digests: dict[str, list[str]] = {key: [] for key, _ in tensors}
    file.write(_header(tensors, blank, block_bytes))
    for key, tensor in tensors:
        for block in _blocks(tensor, block_bytes):
            payload = block.cpu().view(torch.uint8).numpy().data
            if len(payload):
                digests[key].append(hashlib.sha256(payload).hexdigest())
                file.write(payload)
    file.seek(0)
    file.write(_header(tensors, digests, block_bytes))
    file.flush()
    os.fsync(file.fileno())


def _blocks(values: Values, block_bytes: int) -> Iterator[Tensor]:
    tensor = values.make() if isinstance(values, DeferredTensor) else values
    assert (
        tensor.dim() == 1
        and tensor.is_contiguous()
        and (tensor.numel(), tensor.dtype) == (values.numel(), values.dtype)
    )
    yield from tensor.detach().split(block_bytes // tensor.element_size())


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
