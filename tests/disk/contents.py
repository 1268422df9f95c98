"""Bytes of pieces that differ everywhere, and swap files on the side that the program does not use."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megazero.disk.opening import open_swap
from megazero.disk.swap import SwapSpace
from megazero.disk.transports import DiskOptions


def content(name: str, count: int, step: int = 0) -> Tensor:
    """uint8 [count], another one for every name and step."""
    return torch.frombuffer(bytearray(random.Random(f"{name} {step}").randbytes(count)), dtype=torch.uint8)


def contents(pieces: Mapping[str, int], step: int = 0) -> dict[str, Tensor]:
    return {name: content(name, count, step) for name, count in pieces.items()}


def empty(pieces: Mapping[str, int], names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Memory in which nothing is yet what was written."""
    return {name: torch.full((pieces[name],), 0x5A, dtype=torch.uint8) for name in names or pieces}


def read_all(space: SwapSpace, pieces: Mapping[str, int]) -> dict[str, Tensor]:
    memory = empty(pieces)
    space.read(memory).wait()
    return memory


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


def opened(folder: Path, pieces: Mapping[str, int], options: DiskOptions, **more: object) -> SwapSpace:
    return open_swap([folder], pieces, options, job="test", **more)  # type: ignore[arg-type]


def place(space: SwapSpace, piece: str, slot: int) -> tuple[Path, int]:
    """The file and the byte at which a slot of a piece begins; the layout of one path."""
    (extent,) = space._layout.extents(piece, slot)
    return space.paths[0], extent.offset
