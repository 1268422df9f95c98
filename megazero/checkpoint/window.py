"""A checkpoint's tensors read in flat windows, so that neither a model nor a whole tensor has to fit in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megazero.checkpoint.blocks import DTYPES
from megazero.checkpoint.format import Damaged, Manifest, key_of
from megazero.checkpoint.open_files import OpenFiles
from megazero.checkpoint.reshard import FlatRange, overlaps


@dataclass(frozen=True)
class TensorInfo:
    """The metadata of a global tensor: its shape, without vocabulary padding, and the stored dtype of each column
    ("weight", "exp_avg" and others).
    """

    shape: tuple[int, ...]
    columns: Mapping[str, torch.dtype]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def nbytes(self, column: str = "weight") -> int:
        """Bytes of a column."""
        return self.numel * self.columns[column].itemsize

    @property
    def total_bytes(self) -> int:
        """Bytes of all columns."""
        return sum(map(self.nbytes, self.columns))


class WindowedTensors(Protocol):
    """Global tensors by name, from a checkpoint or another source."""

    @property
    def shapes(self) -> Mapping[str, TensorInfo]: ...

    def window(self, name: str, column: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a tensor in row-major order: 1-D on the CPU in the stored dtype, read-only by
        convention.
        """


class StoredTensors:
    """`WindowedTensors` of a megazero checkpoint. A context manager that closes its files.

    `window` checks each block that it reads and raises Damaged. Memory: a window and a block. The last block is kept,
    so that consecutive windows do not read the block between them twice.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest, self.files = manifest, OpenFiles(folder, manifest)
        self.shapes = {
            name: TensorInfo(stored.shape, {column: DTYPES[code] for column, code in stored.columns.items()})
            for name, stored in manifest.tensors.items()
        }
        self._kept: tuple[tuple[int, str, int], Tensor] | None = None

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(self, *error: object) -> None:
        self.files.__exit__(*error)

    def window(self, name: str, column: str, start: int, stop: int) -> Tensor:
        shape = self.shapes[name]
        wanted = FlatRange(tuple((0, extent) for extent in shape.shape), start, stop)
        values = torch.empty(stop - start, dtype=shape.columns[column])
        found = 0
        for number, flat in self.manifest.tensors[name].fragments:
            if not overlaps(flat, wanted):
                continue
            key = key_of(name, column, flat)
            for block, (first, last) in enumerate(self.files[number].block_ranges(key)):
                piece = FlatRange(flat.box, flat.start + first, flat.start + last)
                shared = overlaps(piece, wanted)
                if shared:
                    source = self._block(number, key, block)
                    for overlap in shared:
                        overlap.copy(source, values)
                        found += overlap.numel
        if found != stop - start:
            raise Damaged(f"the manifest lists {found} of the {stop - start} elements {start}:{stop} of {name}")
        return values

    def _block(self, number: int, key: str, block: int) -> Tensor:
        asked = number, key, block
        if self._kept is None or self._kept[0] != asked:
            self._kept = asked, self.files[number].read(key, block)
        return self._kept[1]


def windows(numel: int, elements: int) -> Iterator[tuple[int, int]]:
    """Divide [0, numel) into consecutive ranges of at most `elements`."""
    for start in range(0, numel, elements):
        yield start, min(start + elements, numel)
