"""A model state without a model: specs as the layers make them, fragments as ZeRO cuts them, random global tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megazero.checkpoint.blocks import BLOCK_BYTES, BlockWriter, Slot
from megazero.checkpoint.format import COLUMNS, Manifest
from megazero.checkpoint.open_files import OpenFiles
from megazero.checkpoint.reader import check_files, check_inventory, read_fragments, read_manifest
from megazero.checkpoint.save_plan import fragments_to_write, stored_to_write, values_to_write
from megazero.checkpoint.writer import write_fragments, write_manifest
from megazero.mpu.axes import Axes, Coordinates
from megazero.mpu.parameter import ParameterKind, ParameterSpec, StateGroup, shard
from megazero.zero.layout import BucketFragment, Fragment, Packing, StoredFragment, owned_fragments

VOCAB, HIDDEN, BLOCKS = 37, 12, 4
EVERY = slice(None)


@dataclass(frozen=True)
class Layout:
    """The layout that determines which rank holds which elements."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    bucket: int = 10**9
    divisor: int = 1
    tied: bool = True
    shard_size: int | None = None

    @property
    def axes(self) -> Axes:
        return Axes(self.pp, self.dp, 1, self.tp, self.shard_size)

    def chunks(self, at: Coordinates) -> list[list[list[ParameterSpec]]]:
        """The specs of a rank: an embedding, blocks with split and replicated tensors, a head that is tied or not."""
        padded = -(-VOCAB // (self.divisor * self.tp)) * self.divisor * self.tp

        def split(
            name: str,
            shape: tuple[int, ...],
            dim: int | None,
            kind: ParameterKind = ParameterKind.MATRIX,
            padded: int | None = None,
            tied: bool = False,
        ) -> ParameterSpec:
            group = StateGroup.TIED if tied else StateGroup.REPLICAS
            return shard(name, shape, kind, dim=dim, rank=at.tp, size=self.tp, padded=padded, state_group=group)

        word = split(
            "embedding.word.weight", (VOCAB, HIDDEN), 0, ParameterKind.EMBEDDING, padded, tied=self.tied and self.pp > 1
        )
        units: list[list[ParameterSpec]] = []
        if at.pp == 0:
            units.append([word, split("embedding.norm.weight", (HIDDEN,), None, ParameterKind.NORM)])
        for i in range(at.pp * BLOCKS // self.pp, (at.pp + 1) * BLOCKS // self.pp):
            units.append(
                [
                    split(f"blocks.{i}.norm.weight", (HIDDEN,), None, ParameterKind.NORM),
                    split(f"blocks.{i}.up.weight", (4 * HIDDEN, HIDDEN), 0),
                    split(f"blocks.{i}.up.bias", (4 * HIDDEN,), 0, ParameterKind.BIAS),
                    split(f"blocks.{i}.down.weight", (HIDDEN, 4 * HIDDEN), 1),
                    split(f"blocks.{i}.down.bias", (HIDDEN,), None, ParameterKind.BIAS),
                ]
            )
        if at.pp == self.pp - 1:
            head = word if self.tied else split("head.weight", (VOCAB, HIDDEN), 0, ParameterKind.MATRIX, padded)
            units.append([split("head.norm.weight", (HIDDEN,), None, ParameterKind.NORM), head])
        return [units]

    def fragments(self, rank: int) -> list[BucketFragment]:
        return _fragments(self, rank)

    def all_fragments(self) -> list[list[BucketFragment]]:
        return [self.fragments(rank) for rank in range(self.axes.world_size)]


@cache
def _fragments(layout: Layout, rank: int) -> list[BucketFragment]:
    at = layout.axes.coordinates(rank)
    return [piece for _, piece in owned_fragments(layout.chunks(at), layout.axes, at, Packing(layout.bucket))]


Values = dict[tuple[str, str], Tensor]
"""Global tensors by (name, column)."""


def global_values(layout: Layout, dtype: torch.dtype, columns: Sequence[str] = COLUMNS, seed: int = 0) -> Values:
    """Global tensors with random numbers."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {piece.spec.name: piece.spec.shape for every in layout.all_fragments() for piece in every}
    return {
        (name, c): torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in sorted(shapes.items())
        for c in columns
    }


def box_of(values: Tensor, spec: ParameterSpec) -> Tensor:
    return values[tuple(slice(start, stop) for start, stop in spec.box)]


def fragments_of(
    layout: Layout, rank: int, values: Values | None, dtype: torch.dtype, columns: Sequence[str] = COLUMNS
) -> list[Fragment]:
    """A rank's fragments with these values; None: all NaN, to be filled."""

    def column(piece: BucketFragment, name: str) -> Tensor:
        if values is None:
            return torch.full((piece.numel,), math.nan, dtype=dtype)
        return box_of(values[piece.spec.name, name], piece.spec).reshape(-1)[piece.start : piece.stop].to(dtype).clone()

    return [
        Fragment(piece.spec, piece.start, piece.stop, {name: column(piece, name) for name in columns})
        for piece in layout.fragments(rank)
    ]


def told(fragments: Sequence[Fragment]) -> list[StoredFragment]:
    """The same fragments without values."""
    return [
        StoredFragment(one.spec, one.start, one.stop, {name: values.dtype for name, values in one.columns.items()})
        for one in fragments
    ]


def write_rank(
    folder: Path, rank: int, world: int, mine: Sequence[Fragment], block_bytes: int, tp: tuple[int, int] = (0, 1)
) -> None:
    """Write the file of a rank that holds these fragments. tp: its index and the size."""
    written = stored_to_write([told(mine)], *tp)
    write_fragments(folder, rank, world, written, values_to_write([mine], written), block_bytes)


def write_tensors(path: Path, tensors: Sequence[tuple[str, Tensor]], block_bytes: int = BLOCK_BYTES) -> None:
    """Write a file of whole tensors."""
    slots = [Slot(key, values.dtype, values.numel()) for key, values in tensors]
    with BlockWriter(path, slots, block_bytes) as file:
        for key, values in tensors:
            file.write(key, 0, values)


def save(
    folder: Path,
    layout: Layout,
    values: Values,
    dtype: torch.dtype,
    columns: Sequence[str] = COLUMNS,
    block_bytes: int = 64,
    progress: Mapping[str, object] | None = None,
) -> None:
    """Write the files of all ranks, one after the other, directly into `folder`."""
    folder.mkdir(parents=True)
    world = layout.axes.world_size
    for rank in range(world):
        tp = layout.axes.coordinates(rank).tp, layout.tp
        write_rank(folder, rank, world, fragments_of(layout, rank, values, dtype, columns), block_bytes, tp)
    writers = [
        fragments_to_write(pieces, layout.axes.coordinates(rank).tp, layout.tp)
        for rank, pieces in enumerate(layout.all_fragments())
    ]
    axes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "cp": 1}
    write_manifest(folder, writers, run={}, progress=dict(progress or {}), layout=axes)


def load(
    folder: Path, layout: Layout, dtype: torch.dtype, columns: Sequence[str] = COLUMNS
) -> Iterator[list[Fragment]]:
    """Yield the fragments that each rank of the layout reads, one rank after the other."""
    manifest: Manifest = read_manifest(folder)
    check_files(folder, manifest)
    check_inventory(manifest, [piece for pieces in layout.all_fragments() for piece in pieces], columns)
    for rank in range(layout.axes.world_size):
        targets = fragments_of(layout, rank, None, dtype)
        read_fragments(OpenFiles(folder, manifest), targets, columns)
        yield targets


def expect(folder: Path, layout: Layout, values: Values, dtype: torch.dtype, columns: Sequence[str] = COLUMNS) -> None:
    """Assert that every rank of the layout reads exactly these values, converted to its dtype."""
    for rank, found in enumerate(load(folder, layout, dtype, columns)):
        for got, wanted in zip(found, fragments_of(layout, rank, values, dtype, COLUMNS), strict=True):
            for column in columns:
                assert torch.equal(got.columns[column], wanted.columns[column]), (
                    layout,
                    rank,
                    got.spec.name,
                    column,
                )
