"""Frozen matrices that are stored as codes of 4 or 8 bits (--lora-base-bits; `fused_ops.coded`).

They are the matrices of linear layers. A bucket of them is a row of bytes: the codes of each matrix with its scales,
one behind the other. Where parameters are sharded (ZeRO-3), so is this row. A gather gives the parameters memory and
decodes into it what this rank has, or what all ranks have sent; a release frees it. So only codes rest, and only codes
travel.

A matrix is encoded as a whole before it is split over tp: so its numbers are the same on every layout. Query, key and
value are one matrix here, and three in many models of other programs. Such a base is encoded as those programs encode
it, as three matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from fused_ops.coded import CodedBox, decode, encode, pack
from megazero.config.derive import head_dim, query_groups
from megazero.config.inventory import QKV
from megazero.config.schema import LoraConfig, ModelConfig
from megazero.mpu import collectives
from megazero.mpu.collectives import CommunicationHandle
from megazero.mpu.parameter import ParameterKind, ParameterSpec, StateGroup, spec_of
from megazero.zero.gatherer import GATHERED, WholeParameters, make_views
from megazero.zero.layout import UNSHARED, BucketLayout, Packing, frozen_sizes
from megazero.zero.layout import pack as pack_buckets
from megazero.zero.memories import Tiers
from megazero.zero.parts import Resting
from megazero.zero.sharding import Sharding
from megazero.zero.storage import Bucket, StoredColumn, parameter_column

ALIGNMENT = 16
"""Each rank's part of a row of bytes begins at a multiple of this."""


class Coding(NamedTuple):
    """How matrices are encoded.

    bits  of a code
    qkv   None: query, key and value as one matrix. Else as three: their rows in each group of heads
    """

    bits: int
    qkv: tuple[int, ...] | None = None


def coding_of(lora: LoraConfig, model: ModelConfig) -> Coding | None:
    """How a run's frozen matrices are encoded; None where they are stored as they are."""
    if lora.lora_base_bits is None:
        return None
    size, groups = head_dim(model), query_groups(model)
    apart = (model.num_attention_heads // groups * size, size, size) if lora.lora_base_qkv == "three" else None
    return Coding(lora.lora_base_bits, apart)


@dataclass(frozen=True)
class CodedPart:
    """A matrix that is encoded as a whole: a parameter, or some of its rows.

    place   of the parameter in its bucket
    box     of the matrix on this rank
    cycle   rows of the parameter after which the matrix has rows again; 0: it has all rows
    start   the first of these rows in a cycle
    stop    the row behind them
    at      its first byte in the bucket's row
    """

    place: int
    box: CodedBox
    cycle: int
    start: int
    stop: int
    at: int

    def of(self, parameter: Tensor) -> Tensor:
        """The matrix of the whole parameter."""
        if not self.cycle:
            return parameter
        rows = parameter.unflatten(0, (-1, self.cycle))[:, self.start : self.stop]
        return rows.reshape(-1, parameter.shape[1])

    def runs_of(self, parameter: Tensor) -> Tensor:
        """The runs of this rank's box, as a view of what the rank has of the parameter: [runs, length]."""
        if not self.cycle:
            return parameter.view(self.box.runs, self.box.length)
        columns = parameter.shape[1]
        return parameter.view(self.box.runs, -1)[:, self.start * columns : self.stop * columns]

    def bytes_in(self, packed: Tensor) -> Tensor:
        """Its bytes in a bucket's row, as a view."""
        return packed[self.at : self.at + self.box.nbytes]


@dataclass(frozen=True)
class CodedLayout:
    """A bucket of matrices, and where their codes lie.

    numbers  the bucket of what they are decoded to
    parts    the matrices
    nbytes   bytes of all ranks' codes, up to a multiple of 16 times the ranks that share them out
    """

    numbers: BucketLayout
    parts: tuple[CodedPart, ...]
    nbytes: int


class FrozenLayouts(NamedTuple):
    """The buckets of frozen parameters: those that are stored as they are, and those that are stored as codes."""

    plain: tuple[BucketLayout, ...]
    coded: tuple[CodedLayout, ...]


def frozen_layouts(
    chunks: Sequence[Sequence[Sequence[ParameterSpec]]],
    sizes: Mapping[StateGroup, int],
    sharding: Sharding,
    packing: Packing,
    coding: Coding | None,
) -> FrozenLayouts:
    """The buckets of a rank's frozen parameters.

    chunks, sizes, packing  as in `layout.pack`
    sharding  of the parameter column
    coding     of matrices; None: all are stored as they are

    Tables, norms and biases are never stored as codes. Matrices of different units have different buckets, since each
    unit is decoded by itself.
    """
    sharing = frozen_sizes(sizes, sharding)
    if coding is None:
        return FrozenLayouts(pack_buckets(chunks, sharing, packing), ())
    plain = [[[spec for spec in unit if not _is_matrix(spec)] for unit in units] for units in chunks]
    matrices = [[[spec for spec in unit if _is_matrix(spec)] for unit in units] for units in chunks]
    numbers = pack_buckets(matrices, UNSHARED, Packing(packing.bucket_size, by_unit=True))
    coded = tuple(_coded(layout, coding, sharing[layout.group]) for layout in numbers)
    return FrozenLayouts(pack_buckets(plain, sharing, packing), coded)


def _is_matrix(spec: ParameterSpec) -> bool:
    return spec.kind is ParameterKind.MATRIX


def _coded(numbers: BucketLayout, coding: Coding, ranks: int) -> CodedLayout:
    parts, end = list[CodedPart](), 0
    for place, entry in enumerate(numbers.entries):
        for box, cycle, start, stop in _boxes(entry.spec, coding):
            parts.append(CodedPart(place, box, cycle, start, stop, end))
            end += box.nbytes
    row = ALIGNMENT * ranks
    return CodedLayout(numbers, tuple(parts), -(-end // row) * row)


def _boxes(spec: ParameterSpec, coding: Coding) -> Iterator[tuple[CodedBox, int, int, int]]:
    """(box, cycle, start, stop) of each matrix of a parameter."""
    if coding.qkv is None or not spec.name.endswith(f"{QKV}.weight"):
        yield CodedBox.of(spec.shape, spec.box, coding.bits), 0, 0, 0
        return
    (top, bottom), cycle, start = spec.box[0], sum(coding.qkv), 0
    for rows in coding.qkv:
        length = rows * spec.shape[1]  # of one group of heads, which no tp splits
        yield (
            CodedBox(coding.bits, (bottom - top) // cycle, length, top // cycle * length, length),
            cycle,
            start,
            start + rows,
        )
        start += rows


def coded_column(
    layouts: Sequence[CodedLayout],
    buckets: Sequence[Bucket],
    sharding: Sharding,
    tiers: Tiers,
    resting: Sequence[Resting],
    first: int,
) -> StoredColumn:
    """The rows of bytes of these buckets on this rank, zeros. resting, first: as in `storage.parameter_column`."""
    rows = [
        Bucket(replace(layout.numbers, entries=(), numel=layout.nbytes), (), bucket.groups)
        for layout, bucket in zip(layouts, buckets, strict=True)
    ]
    return parameter_column(sharding, torch.uint8, rows, tiers, "codes", resting, first)


@dataclass(frozen=True)
class CodedParameters(WholeParameters):
    """The parameters of a bucket that is stored as codes. column: of `coded_column`."""

    codes: CodedLayout

    @classmethod
    def made(
        cls, column: StoredColumn, index: int, bucket: Bucket, codes: CodedLayout, dtype: torch.dtype
    ) -> CodedParameters:
        """Make the bucket's parameters views of a flat tensor of `dtype`, which has no memory at first."""
        what = f"the decoded parameters of bucket {index}"
        whole = column.memory.allocate(bucket.layout.numel, dtype, GATHERED, what)
        make_views(bucket, whole)
        found = cls(bucket, column, index, whole, gathered=True, codes=codes)
        found.free()
        return found

    @property
    def loaded_in_place(self) -> bool:
        """What is loaded are codes."""
        return False

    def gather(self, masters: StoredColumn | None, own: Tensor | None = None) -> CommunicationHandle:
        """Start to gather. Communicates an all-gather of codes where they are sharded. masters: not read. own: as in
        `WholeParameters.gather`.
        """
        self.allocate()
        own = self.column.held(self.index) if own is None else own
        if not self.column.is_sharded_in(self.index):
            self._decode(own)
            return CommunicationHandle()
        packed = own.new_empty(self.codes.nbytes)
        arriving = collectives.all_gather(packed, own, self.bucket.groups.inner)
        return CommunicationHandle(arriving, lambda: self._decode(packed))

    def fill(self, read: Callable[[ParameterSpec], Tensor]) -> None:
        """Encode the global matrices that `read` returns, and keep what this rank stores of their boxes."""
        row = torch.zeros(self.codes.nbytes, dtype=torch.uint8)
        for place, parts in groupby(self.codes.parts, key=lambda part: part.place):
            whole = read(spec_of(self.bucket.parameters[place]))
            for part in parts:
                pack(encode(part.of(whole), part.box.bits), part.box, part.bytes_in(row))
        self.column.keep(self.index, row[slice(*self.column.range_of(self.index))])

    def _decode(self, packed: Tensor) -> None:
        for part in self.codes.parts:
            decode(part.bytes_in(packed), part.box, part.runs_of(self.bucket.parameters[part.place].data))
