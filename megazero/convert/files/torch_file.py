"""Reading files of torch.save. Tensors are views of the mapped file; `unpickle` reads the pickle inside.

A file is an uncompressed zip archive: `<any>/data.pkl`, `<any>/byteorder`, and storage N in `<any>/data/N`. torch's
distributed checkpoints have such archives inside larger files.
"""

from __future__ import annotations

import io
import mmap
import reprlib
import struct
import zipfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.convert.files.mapping import is_refusal, not_mapped
from megazero.convert.files.torch_globals import Storage, StorageKind, torch_table
from megazero.convert.files.unpickle import unpickle
from megazero.convert.source import ConversionError, DamagedCheckpoint
from megazero.system.reading import BOUNDS, open_file, raised_as

_LEGACY = (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", b"\x80\x02\x8a\nl\xfc")
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of name and extra field
_AGAIN = "open it with torch.load where it was written and torch.save it again"


def read_torch_file(path: Path, known: Iterable[str] = (), offset: int = 0, length: int | None = None) -> Any:
    """What torch.save wrote: dictionaries, lists, numbers, tensors. Objects of known classes become `unpickle.Record`s.

    Tensors are views of a private mapping of the file. They take no memory until they are read, and share a storage
    where they do so in the file. Nobody may write into them. The mapping lives as long as one of them.

    known           dotted names of classes that become records, as patterns ("megatron.*")
    offset, length  where the archive lies in the file, if the file holds more

    Raises ConversionError for a global that is not known, for legacy, compressed, big-endian and TorchScript files, and
    for a file that is cut off.
    """
    archive = _Archive(path, offset, length)
    return unpickle(archive.pickle, str(path), torch_table(), known, partial(_storage, archive, {}))


def read_torch_rows(path: Path, start: int, stop: int, offset: int = 0, length: int | None = None) -> Tensor:
    """Indices start .. stop of the first axis of the only tensor in an archive: [stop - start, ...].

    If the tensor is contiguous in the file, nothing else of it is read. Raises ConversionError as `read_torch_file`.
    """
    archive = _Archive(path, offset, length)
    keys: list[str] = []
    hollow = unpickle(archive.pickle, str(path), torch_table(), (), partial(_hollow, archive, keys))
    if (
        not isinstance(hollow, Tensor)
        or len(keys) != 1
        or not hollow.dim()
        or not 0 <= start <= stop <= hollow.shape[0]
    ):
        raise ConversionError(f"{path} holds no one tensor with indices {start} to {stop} at {offset}")
    if not hollow.is_contiguous():
        whole: Tensor = read_torch_file(path, (), offset, length)
        return whole[start:stop]
    row, size = hollow[0].numel() if hollow.shape[0] else 0, hollow.dtype.itemsize
    first = hollow.storage_offset()
    data = archive.data(f"data/{keys[0]}")[(first + start * row) * size : (first + stop * row) * size]
    if len(data) != (stop - start) * row * size:
        raise ConversionError(f"{path}: storage {keys[0]} has too few bytes for a tensor of {list(hollow.shape)}")
    return _flat(data, hollow.dtype).view(stop - start, *hollow.shape[1:])


def _hollow(archive: _Archive, keys: list[str], pid: Any) -> Storage:
    """A storage on the device "meta", to find out a tensor's shape. Its key is appended to `keys`."""
    kind, key, numel = _described(archive, pid)
    keys.append(key)
    return Storage(torch.empty(numel, dtype=kind.dtype or torch.uint8, device="meta"), kind)


class _Archive:
    """A zip archive in a mapped file. Entries go by their names without the archive's top folder."""

    def __init__(self, path: Path, offset: int, length: int | None) -> None:
        self.path = path
        self.memory = _mapped(path)
        whole = memoryview(self.memory)
        stop = len(whole) if length is None else offset + length
        if not 0 <= offset <= stop <= len(whole):
            raise DamagedCheckpoint(f"{path} has {len(whole)} bytes, which do not reach to {stop}")
        self.region = whole[offset:stop]
        self.entries = self._entries()
        if "data.pkl" not in self.entries or "constants.pkl" in self.entries:
            raise ConversionError(
                f"{path} is a zip file, but not one of torch.save (a TorchScript archive, perhaps): {_AGAIN}"
            )
        if "byteorder" in self.entries and bytes(self.data("byteorder")).strip() != b"little":
            raise ConversionError(f"{path} was written on a big-endian machine: {_AGAIN} on a little-endian one")

    def _entries(self) -> dict[str, zipfile.ZipInfo]:
        if any(bytes(self.region[: len(magic)]) == magic for magic in _LEGACY):
            raise ConversionError(f"{self.path} is in torch's format from before 1.6, which cannot be mapped: {_AGAIN}")
        try:
            with zipfile.ZipFile(io.BufferedReader(_Region(self.region))) as opened:
                infos = opened.infolist()
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
            raise DamagedCheckpoint(
                f"{self.path} is no whole file of torch.save ({error}): {len(self.region)} bytes"
            ) from error
        return {info.filename.partition("/")[2] or info.filename: info for info in infos}

    def data(self, name: str) -> memoryview:
        """An entry's bytes in the mapping."""
        info = self.entries.get(name)
        if info is None:
            raise ConversionError(f"{self.path} has no entry {name!r}")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise ConversionError(f"{self.path} is compressed or encrypted, and cannot be mapped: {_AGAIN}")
        header = self.region[info.header_offset : info.header_offset + _LOCAL_HEADER.size]
        if len(header) == _LOCAL_HEADER.size and bytes(header[:4]) == b"PK\3\4":
            _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
            start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
            if start + info.file_size <= len(self.region) and info.file_size == info.compress_size:
                return self.region[start : start + info.file_size]
        raise DamagedCheckpoint(f"{self.path} is damaged: entry {name!r} does not lie inside the file")

    @property
    def pickle(self) -> bytes:
        data = self.data("data.pkl")
        if len(data) > BOUNDS.manifest:
            raise ConversionError(
                f"{self.path}: the pickle inside has {len(data):,} bytes, more than {BOUNDS.manifest:,}"
            )
        return bytes(data)


def _mapped(path: Path) -> mmap.mmap:
    """A private mapping of a file. torch treats it as writable memory; a page is copied only if it is written to."""
    with raised_as(ConversionError):
        file = open_file(path)
    with file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError as error:
            raise ConversionError(f"{path} is empty") from error
        except OSError as error:
            if is_refusal(error):
                raise not_mapped(path, error) from error
            raise ConversionError(f"{path} cannot be read: {error}") from error


def _described(archive: _Archive, pid: Any) -> tuple[StorageKind, str, int]:
    """torch's persistent id: ("storage", type, key, location, number of elements)."""
    if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], StorageKind)):
        raise ConversionError(f"{archive.path}: a storage is described as {reprlib.repr(pid)}")
    _, kind, key, _, numel = pid
    if not isinstance(key, str) or type(numel) is not int or numel < 0:
        raise ConversionError(f"{archive.path}: a storage is described as {reprlib.repr(pid)}")
    return kind, key, numel


def _storage(archive: _Archive, done: dict[tuple[str, StorageKind], Storage], pid: Any) -> Storage:
    kind, key, numel = _described(archive, pid)
    if (key, kind) not in done:
        dtype = kind.dtype or torch.uint8
        data = archive.data(f"data/{key}")
        if numel * dtype.itemsize > len(data):
            raise ConversionError(
                f"{archive.path}: storage {key} has {len(data)} bytes, too few for {numel} elements of {dtype}"
            )
        done[key, kind] = Storage(_flat(data[: numel * dtype.itemsize], dtype), kind)
    return done[key, kind]


def _flat(data: memoryview, dtype: torch.dtype) -> Tensor:
    """A 1-D tensor over bytes. It is a copy where the bytes are not aligned for the dtype, as in archives inside other
    files.
    """
    if len(data) == 0:
        return torch.empty(0, dtype=dtype)
    raw = torch.frombuffer(data, dtype=torch.uint8)
    return (raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()).view(dtype)


class _Region(io.RawIOBase):
    """Bytes of a mapping as a file, for zipfile."""

    def __init__(self, region: memoryview) -> None:
        self._region, self._at = region, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._region)}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning of the archive")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        found = self._region[self._at : self._at + len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)
