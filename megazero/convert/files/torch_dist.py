"""Reading checkpoints of torch.distributed.checkpoint.

The pickle `.metadata` lists each tensor's pieces and where they lie. A piece is a torch.save archive at an offset of a
`.distcp` file. Only the pieces that hold a part of what is asked for are read. Facts:
torch/distributed/checkpoint/{metadata,filesystem}.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.checkpoint.reshard import intersection
from megazero.convert.files.torch_file import read_torch_file, read_torch_rows
from megazero.convert.files.torch_globals import torch_table
from megazero.convert.files.unpickle import Record, unpickle
from megazero.convert.source import ConversionError
from megazero.mpu.parameter import Box
from megazero.system.names import is_plain_file_name
from megazero.system.reading import BOUNDS, raised_as, read_bytes, shown

METADATA = ".metadata"
KNOWN = ("torch.distributed.*", "megatron.*", "pathlib.*")
"""Classes in `.metadata`; they are read as records."""


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor, and the bytes of a file that hold it."""

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor that has not been read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[StoredChunk, ...]


class DistributedCheckpoint:
    """A checkpoint, of which only `.metadata` has been read.

    tensors  name -> shape, dtype and pieces
    objects  names of values that are not tensors

    Raises ConversionError that names every tensor with missing pieces.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with raised_as(ConversionError):
            data = read_bytes(folder / METADATA, BOUNDS.manifest)
        metadata = unpickle(data, str(folder / METADATA), torch_table(), KNOWN)
        described = metadata.get("state_dict_metadata") if isinstance(metadata, Record) else None
        places = metadata.get("storage_data") if isinstance(metadata, Record) else None
        if not isinstance(described, dict) or not isinstance(places, dict):
            raise ConversionError(f"{folder / METADATA} does not describe a checkpoint of torch.distributed")
        infos = {
            (key.get("fqn"), tuple(key.get("offset") or ())): info
            for key, info in places.items()
            if isinstance(key, Record)
        }
        self.tensors: dict[str, ChunkedTensor] = {}
        self.objects: list[str] = []
        problems: list[str] = []
        for name, record in described.items():
            if not isinstance(name, str) or not isinstance(record, Record):
                problems.append(f"{shown(name)} is described as {type(record).__name__}")
            elif record.name.endswith(".TensorStorageMetadata"):
                try:
                    self.tensors[name] = _stored(name, record, infos)
                except ConversionError as error:
                    problems.append(str(error))
            else:
                self.objects.append(name)
        files = sorted({piece.file for stored in self.tensors.values() for piece in stored.pieces})
        sizes = {file: (folder / file).stat().st_size if (folder / file).is_file() else None for file in files}
        problems += [f"{file} is missing" for file, size in sizes.items() if size is None]
        problems += [
            f"{piece.file} has {size} bytes, a piece of {name} is said to end at {piece.offset + piece.length}"
            for name, stored in self.tensors.items()
            for piece in stored.pieces
            if (size := sizes[piece.file]) is not None and piece.offset + piece.length > size
        ]
        if problems:
            more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
            raise ConversionError(f"{folder} is not whole: " + "; ".join(problems[:20] + more))

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """One box of a tensor, or the whole tensor: [shape of the box]. Raises ConversionError where the pieces do not
        cover the box.
        """
        stored = self.tensors[name]
        wanted = box or tuple((0, n) for n in stored.shape)
        touched = [
            (piece, common) for piece in stored.pieces if (common := intersection(piece.box, wanted)) is not None
        ]
        if sum(_numel(common) for _, common in touched) != _numel(wanted):
            raise ConversionError(
                f"{self.folder}: the pieces of {name} do not cover {_words(wanted)} of {list(stored.shape)} just once"
            )
        if len(touched) == 1:
            return self._part(name, *touched[0], stored.dtype)
        whole = torch.empty([stop - start for start, stop in wanted], dtype=stored.dtype)
        for piece, common in touched:
            whole[_within(common, wanted)] = self._part(name, piece, common, stored.dtype)
        return whole

    def _part(self, name: str, piece: StoredChunk, common: Box, dtype: torch.dtype) -> Tensor:
        """The part of a piece that lies in the box `common`. Of the piece's first axis only the indices of that part
        are read.
        """
        sizes = [stop - start for start, stop in piece.box]
        inside = _within(common, piece.box)
        where = self.folder / piece.file
        if not sizes:
            value = read_torch_file(where, offset=piece.offset, length=piece.length)
        else:
            value = read_torch_rows(where, inside[0].start, inside[0].stop, piece.offset, piece.length)
            sizes, inside = [inside[0].stop - inside[0].start, *sizes[1:]], (slice(None), *inside[1:])
        if not isinstance(value, Tensor) or list(value.shape) != sizes or value.dtype != dtype:
            found = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ConversionError(f"{where}: the piece of {name} at {piece.offset} is {found}, not {dtype} {sizes}")
        return value[inside]


def _stored(name: str, record: Record, infos: Mapping[tuple[str, tuple[int, ...]], Record]) -> ChunkedTensor:
    shape, dtype = tuple(record.get("size")), _dtype(record.get("properties"))
    if dtype is None:
        raise ConversionError(f"{name} has no dtype")
    if not _are_sizes(shape):
        raise ConversionError(f"{name} is said to have the shape {shown(shape)}")
    pieces = []
    for chunk in record.get("chunks"):
        offsets, sizes = tuple(chunk.get("offsets")), tuple(chunk.get("sizes"))
        info = infos.get((name, offsets))
        if info is None:
            raise ConversionError(f"the piece of {name} at {list(offsets)} is in no file")
        if info.get("transform_descriptors"):
            raise ConversionError(
                f"{name} is stored through {', '.join(map(str, info.get('transform_descriptors')))}, which is not read"
            )
        file = str(info.get("relative_path"))
        if not is_plain_file_name(file):
            raise ConversionError(f"{name} is said to be in {file[:80]!r}, which is no file of the checkpoint's folder")
        box = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
        if (
            not _are_sizes(offsets)
            or not _are_sizes(sizes)
            or any(stop > n for (_, stop), n in zip(box, shape, strict=True))
        ):
            raise ConversionError(f"a piece of {name} reaches beyond its shape {list(shape)}")
        offset, length = info.get("offset"), info.get("length")
        if not (_are_sizes((offset,)) and _are_sizes((length,))) or _numel(box) * dtype.itemsize > length:
            raise ConversionError(
                f"the piece of {name} at {list(offsets)} is said to lie in {shown(length)} bytes at {shown(offset)} of "
                f"{file}"
            )
        pieces.append(StoredChunk(box, file, offset, length))
    return ChunkedTensor(shape, dtype, tuple(pieces))


def _are_sizes(numbers: tuple[Any, ...]) -> bool:
    whole = len(numbers) <= BOUNDS.dimensions and all(type(n) is int and n >= 0 for n in numbers)
    return whole and math.prod(max(n, 1) for n in numbers) < BOUNDS.elements


def _dtype(properties: Any) -> torch.dtype | None:
    """The first entry of a pickled TensorProperties, which versions of torch store by position or by name."""
    state = properties.get("", properties.get("dtype")) if isinstance(properties, Record) else None
    found = state[0] if isinstance(state, tuple) and state else state
    return found if isinstance(found, torch.dtype) else None


def _numel(box: Sequence[tuple[int, int]]) -> int:
    return math.prod(stop - start for start, stop in box)


def _within(inner: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(start - begin, stop - begin) for (start, stop), (begin, _) in zip(inner, outer, strict=True))


def _words(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def fragments(stored: tuple[int, ...], shape: Sequence[int]) -> tuple[int, ...] | None:
    """Into how many parts Megatron-core cut each axis of a tensor whose shards it stores flat. None where `stored` is
    not the shape of such a tensor.

    A tensor [X, Y] in shards [x, y] is stored as [X/x, Y/y, x y].
    """
    cuts = stored[:-1]
    if len(stored) != len(shape) + 1 or any(not cut or n % cut for n, cut in zip(shape, cuts, strict=True)):
        return None
    return cuts if stored[-1] == math.prod(n // cut for n, cut in zip(shape, cuts, strict=True)) else None


def unflattened(value: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor from its flat shards: [parts of each axis, elements of a shard] -> [shape]."""
    cuts = value.shape[:-1]
    inside = [n // cut for n, cut in zip(shape, cuts, strict=True)]
    axes = len(inside)
    order = [axis for pair in zip(range(axes), range(axes, 2 * axes), strict=True) for axis in pair]
    return value.reshape(*cuts, *inside).permute(order).reshape(*shape)


def rows_of(shape: Sequence[int], start: int, stop: int) -> Box:
    """The box of some rows of a tensor."""
    return ((start, stop), *((0, n) for n in shape[1:]))
