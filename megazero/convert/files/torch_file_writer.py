"""Writing files that torch.load opens, as a stream: first the structure, then the elements of its tensors.

A tensor is announced as a `TensorPlaceholder`, and its elements follow in pieces of any size. So several files can be
filled from one tensor, and no file is ever in memory. The pickle is written here instruction by instruction, so that it
can name classes that are not installed.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megazero.convert.files.torch_globals import STORAGES
from megazero.convert.files.unpickle import Record

_ALIGNED = 64
_PIECE = 16 << 20
_PADDING_ID = 0x4246  # the extra field that torch itself pads with
_ZIP64_FROM, _ZIP64_BYTES = (1 << 31) - 1, 20


@dataclass(frozen=True)
class TensorPlaceholder:
    """The shape and dtype of a tensor whose elements come later."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


class TorchFileWriter:
    """Writes a file of torch.save; a context manager. Leaving it before all tensors are full is an error.

    structure: dictionaries, lists, tuples, numbers, strings, torch dtypes and sizes, `Record`s (written as objects of
    the classes that they name), tensors and `TensorPlaceholder`s. `feed` takes the elements of the placeholders in
    the structure's order. Every tensor has a storage of its own.
    """

    def __init__(self, path: Path, structure: Any) -> None:
        with ExitStack() as opened:
            self._zip = opened.enter_context(zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True))
            pickled = _Pickle()
            pickled.value(structure)
            self._small("data.pkl", b"\x80\x02" + b"".join(pickled.parts) + b".")
            self._small("byteorder", b"little")
            self._small("version", b"3\n")
            self._tensors: Iterator[tuple[int, TensorPlaceholder | Tensor]] = iter(enumerate(pickled.tensors))
            self._entry: IO[bytes] | None = None
            self._missing = 0
            self._path = path
            self._next()
            opened.pop_all()

    def feed(self, piece: Tensor) -> None:
        """Add the next elements of the current tensor, [any], in its dtype.

        A piece holds elements of one tensor only.
        """
        assert self._entry is not None, f"{self._path}: all tensors are full"
        assert piece.numel() <= self._missing, (
            f"{self._path}: {piece.numel()} elements where {self._missing} are missing"
        )
        assert piece.dtype == self._hollow.dtype, f"{self._path}: {piece.dtype} where {self._hollow.dtype} is announced"
        _pour(piece, self._entry)
        self._missing -= piece.numel()
        if not self._missing:
            self._next()

    def __enter__(self) -> TorchFileWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        whole = self._entry is None
        if self._entry is not None:
            self._entry.close()
        self._zip.close()
        assert kind is not None or whole, f"{self._path}: {self._missing} elements of a tensor are missing"

    def _next(self) -> None:
        """Go on to the next tensor that waits for elements. Tensors that are complete in the structure are written on
        the way.
        """
        if self._entry is not None:
            self._entry.close()
            self._entry = None
        for number, tensor in self._tensors:
            numel = tensor.numel() if isinstance(tensor, Tensor) else tensor.numel
            entry = self._open(f"data/{number}", numel * tensor.dtype.itemsize)
            if isinstance(tensor, TensorPlaceholder) and numel:
                self._entry, self._hollow, self._missing = entry, tensor, numel
                return
            with entry:
                if isinstance(tensor, Tensor):
                    _pour(tensor.detach().cpu(), entry)

    def _open(self, name: str, size: int) -> IO[bytes]:
        """Begin an entry whose bytes start at a multiple of 64, as in torch's own files."""
        assert self._zip.fp is not None
        info = zipfile.ZipInfo(f"archive/{name}")
        info.file_size = size
        zip64 = size >= _ZIP64_FROM
        begin = self._zip.fp.tell() + 30 + len(info.filename) + 4 + (_ZIP64_BYTES if zip64 else 0)
        fill = -begin % _ALIGNED
        info.extra = struct.pack("<HH", _PADDING_ID, fill) + b"Z" * fill
        return self._zip.open(info, "w", force_zip64=zip64)

    def _small(self, name: str, data: bytes) -> None:
        with self._open(name, len(data)) as entry:
            entry.write(data)


def write_torch_file(path: Path, structure: Any) -> None:
    """Write a file whose tensors are all in memory."""
    with TorchFileWriter(path, structure):
        pass


def _pour(tensor: Tensor, entry: IO[bytes]) -> None:
    """Write a tensor's elements, a few MiB at a time. A tensor that is not contiguous is never copied as a whole."""
    parts = tensor.reshape(-1) if tensor.is_contiguous() or tensor.dim() < 2 else tensor
    step = max(1, _PIECE // max(1, parts[:1].numel() * tensor.dtype.itemsize))
    for start in range(0, parts.shape[0], step):
        entry.write(parts[start : start + step].contiguous().view(-1).view(torch.uint8).numpy().data)


class _Pickle:
    """The parts of a pickle of protocol 2, and the tensors that it refers to by number."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.tensors: list[TensorPlaceholder | Tensor] = []

    def value(self, value: Any) -> None:
        """Append the instructions that make a value."""
        simple = {type(None): b"N", bool: b"\x88" if value is True else b"\x89"}.get(type(value))
        if simple is not None:
            self.parts.append(simple)
        elif isinstance(value, Tensor | TensorPlaceholder):
            self._tensor(value)
        elif isinstance(value, Record):
            self._record(value)
        elif isinstance(value, torch.dtype):
            self._name(str(value))
        elif isinstance(value, torch.Size):
            self._call("torch.Size", (tuple(value),))
        elif isinstance(value, dict):
            self.parts.append(b"}(")
            for key, item in value.items():
                self.value(key)
                self.value(item)
            self.parts.append(b"u")
        elif isinstance(value, list | tuple):
            self.parts.append(b"](" if isinstance(value, list) else b"(")
            for item in value:
                self.value(item)
            self.parts.append(b"e" if isinstance(value, list) else b"t")
        else:
            self.parts.append(_scalar(value))

    def _name(self, dotted: str) -> None:
        module, _, name = dotted.rpartition(".")
        self.parts.append(f"c{module}\n{name}\n".encode())

    def _call(self, dotted: str, args: tuple[Any, ...]) -> None:
        self._name(dotted)
        self.value(args)
        self.parts.append(b"R")

    def _record(self, record: Record) -> None:
        """A record with arguments becomes a call of its class, one without an empty object. Its attributes follow."""
        self._name(record.name)
        self.value(record.args)
        self.parts.append(b"R" if record.args else b"\x81")
        if record.state:
            self.value(record.state)
            self.parts.append(b"b")

    def _tensor(self, tensor: Tensor | TensorPlaceholder) -> None:
        shape = tuple(tensor.shape)
        kind = next(name for name, dtype in STORAGES.items() if dtype == tensor.dtype)
        number = len(self.tensors)
        self.tensors.append(tensor)
        self._name("torch._utils._rebuild_tensor_v2")
        self.parts.append(b"((")
        self.value("storage")
        self._name(f"torch.{kind}")
        for part in (str(number), "cpu", torch.Size(shape).numel()):
            self.value(part)
        self.parts.append(b"tQ")
        for item in (0, shape, torch.empty(shape, device="meta").stride(), False):
            self.value(item)
        self._call("collections.OrderedDict", ())
        self.parts.append(b"tR")


def _scalar(value: Any) -> bytes:
    """An int of any size, a float, a string."""
    if isinstance(value, int):
        if -(1 << 31) <= value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + struct.pack("<B", len(data)) + data
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(data)) + data
    raise TypeError(f"{type(value).__name__} is not written into a checkpoint")
