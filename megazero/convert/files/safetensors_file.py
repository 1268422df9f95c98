"""Writing a safetensors file as a stream. The header comes first, so that one tensor at a time is in memory.

The safetensors library can only write all tensors of a file at once. It opens what is written here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.checkpoint.narrowing import narrowed

CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES: Mapping[str, torch.dtype] = {code: dtype for dtype, code in CODES.items()}
BLOCK = 1 << 24
"""Elements that are converted and written at once."""


class TensorHeader(NamedTuple):
    """A tensor in the header."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def divided(slots: Sequence[TensorHeader], most: int, single: str) -> dict[str, list[TensorHeader]]:
    """File name -> its tensors, in order, of files of at most so many bytes of tensors, or of one tensor. single: the
    name where one file has all; of several each has its number and theirs in it, as transformers has.
    """
    groups: list[list[TensorHeader]] = [[]]
    size = 0
    for slot in slots:
        if groups[-1] and size + slot.nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(slot)
        size += slot.nbytes
    if len(groups) == 1:
        return {single: groups[0]}
    stem, _, ending = single.rpartition(".")
    return {f"{stem}-{number:05d}-of-{len(groups):05d}.{ending}": group for number, group in enumerate(groups, 1)}


def write_safetensors(
    path: Path, slots: Sequence[TensorHeader], tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors to a new file and sync it to the disk.

    Slots and tensors are in the same order and have the same shapes. Each tensor is converted to its slot's dtype.
    Tensors are taken from the iterator one at a time. Raises OSError, FileExistsError among them.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for slot in slots:
        header[slot.key] = {
            "dtype": CODES[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [offset, offset + slot.nbytes],
        }
        offset += slot.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        try:
            file.write(len(text).to_bytes(8, "little") + text)
            for slot, tensor in zip(slots, tensors, strict=True):
                assert tuple(tensor.shape) == slot.shape, f"{slot.key}: {tuple(tensor.shape)} instead of {slot.shape}"
                for piece in flat_pieces(tensor, slot.dtype, slot.key):
                    file.write(piece.view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            os.unlink(path)  # nobody takes a part for the whole, and the next try finds no file
            raise


def flat_pieces(tensor: Tensor, dtype: torch.dtype, name: str) -> Iterable[Tensor]:
    """The values in row-major order, as contiguous 1-D pieces of this dtype of at most `BLOCK` elements. A strided view
    is never copied as a whole.

    name: of the tensor, for the message of OutOfRange, which is raised for a finite value that the dtype cannot hold.
    """
    if tensor.is_contiguous():
        for piece in tensor.detach().reshape(-1).split(BLOCK):
            yield narrowed(piece, dtype, name)
        return
    row = max(tensor[0].numel(), 1)
    for rows in tensor.detach().split(max(BLOCK // row, 1)):
        yield narrowed(rows, dtype, name).contiguous().reshape(-1)
