"""How parameters are packed into flat buckets: arithmetic on parameters' specs, for this rank and for any other.

A bucket is one flat buffer per column (parameter, gradient, master weight, moments). A collective sends one bucket.
Checkpoints and the planner call these functions for other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fused_ops.quantise import BLOCK
from megazero.config.derive import brings_parameters, bucket_size, names_units
from megazero.config.inventory import unit_of
from megazero.config.schema import OffloadConfig, ParallelConfig
from megazero.mpu.axes import Axes, Coordinates
from megazero.mpu.parameter import ParameterKind, ParameterSpec, StateGroup
from megazero.zero.sharding import Sharding

UNSHARED = dict.fromkeys(StateGroup, 1)
"""Group sizes for memory that is never sharded: frozen parameters."""


@dataclass(frozen=True)
class Entry:
    """A parameter and its offset in the bucket, in elements."""

    spec: ParameterSpec
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.spec.local_numel


@dataclass(frozen=True)
class FragmentSpec:
    """A fragment without its values: elements [start, stop), in row-major order, of the box of `spec`.

    Layout arithmetic computes these for any rank.
    """

    spec: ParameterSpec
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class StoredFragment(FragmentSpec):
    """A fragment of which some place has the values.

    dtypes: of the columns that exist, by their names in checkpoints.
    """

    dtypes: Mapping[str, torch.dtype]


@dataclass(frozen=True)
class Fragment(FragmentSpec):
    """A fragment with one contiguous 1-D tensor of `numel` elements for each column that exists.

    A model state gives its fragments in portions, whose tensors may exist only while they are looked at.

    columns  by their names in checkpoints (`zero.sharding.SAVED`)
    """

    columns: Mapping[str, Tensor]

    @property
    def weight(self) -> Tensor:
        """The master weight, or the parameter where it is its own master."""
        return self.columns["weight"]


@dataclass(frozen=True)
class BucketFragment(FragmentSpec):
    """A fragment and its offset in its bucket, in elements."""

    offset: int


@dataclass(frozen=True)
class BucketLayout:
    """The parameters of a bucket: those with weight decay, then the others, then unused elements.

    chunk    the rank's own number of the model chunk to which they belong
    entries  the parameters; between them are gaps only where each begins at a block of `Packing.block` elements
    decayed  elements [0, decayed) have weight decay
    used     the end of the last parameter
    numel    `used` rounded up to a multiple of the group's size N; where that adds little, of 8 N (see `_padded`)
    group    the ranks that hold these parameters, reduce their gradients and shard their state
    kept_whole  whether the parameters stay whole on every rank where parameters are sharded (--zero3-persist-below, and
                parameters of a user's module that are used outside of its units)
    dtype       of the parameters, where those of one run have several; None: that of the run's precision

    A shard is a K-th of the bucket, where K neighbours share out the state (`Axes.inner_ranks`). The N / K ranks that
    store the same shard (`Axes.across_ranks`) each own an equal part of it, so that each element has one owner.
    """

    chunk: int
    entries: tuple[Entry, ...]
    decayed: int
    used: int
    numel: int
    group: StateGroup
    kept_whole: bool = False
    dtype: torch.dtype | None = None

    def parameter_bytes(self, of_run: int) -> int:
        """Bytes of one element of a parameter. of_run: where the run's precision says the dtype."""
        return of_run if self.dtype is None else self.dtype.itemsize

    def shard(self, index: int, size: int) -> tuple[int, int]:
        """Range (start, stop) of the bucket that neighbour `index` of `size` stores of a sharded column."""
        assert self.numel % size == 0, (self.numel, size)
        part = self.numel // size
        return index * part, (index + 1) * part

    def owned(self, inner: tuple[int, int], across: tuple[int, int]) -> tuple[int, int]:
        """Range (start, stop) of the bucket that a rank owns: a part of its shard.

        inner   its index among the neighbours that share out the state, and their number
        across  its index among the ranks that store the same shard, and their number
        """
        (index, size), (part, parts) = inner, across
        return self.shard(index * parts + part, size * parts)

    @property
    def parameters(self) -> int:
        """Number of elements that belong to parameters."""
        return sum(entry.spec.local_numel for entry in self.entries)

    @property
    def units(self) -> frozenset[str]:
        """The units of the model to which its parameters belong, by name."""
        return frozenset(unit_of(entry.spec.name) for entry in self.entries)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """The ranges (start, stop) that belong to no parameter: between parameters, and the tail."""
        end = 0
        for entry in self.entries:
            if end < entry.offset:
                yield end, entry.offset
            end = entry.stop
        if end < self.numel:
            yield end, self.numel

    def fragments(self, start: int, stop: int) -> Iterator[BucketFragment]:
        """The fragments in [start, stop) of the bucket, without vocabulary padding and the unused tail."""
        for entry in self.entries:
            first, last = max(start, entry.offset), min(stop, entry.offset + entry.spec.stored_numel)
            if first < last:
                yield BucketFragment(entry.spec, first - entry.offset, last - entry.offset, first)


@dataclass(frozen=True)
class Packing:
    """How parameters are packed.

    bucket_size  elements that a bucket holds at most. A parameter is never split, so a larger one makes a larger bucket
    by_unit      no bucket spans two units, and tables (embeddings, a head) have buckets of their own, since backward
                 does not read them. For parameters that are brought for each use (ZeRO-3, --offload-params), and for
                 state that leaves the device unit by unit
    keep_below   with `by_unit`: parameters of fewer elements stay whole on every rank, in buckets of their own that
                 may span units
    block        each parameter and each rank's part begins at a multiple of so many elements. For messages in blocks
                 with one scale each: a norm's weights near 1 in the block of a matrix's near 0.02 would leave the
                 matrix few codes
    """

    bucket_size: int
    by_unit: bool = False
    keep_below: int = 0
    block: int = 1

    def numel(self, specs: Iterable[ParameterSpec]) -> int:
        """Elements of a bucket that these parameters take, one behind the other."""
        return sum(_up(spec.local_numel, self.block) for spec in specs)


def packing_of(parallel: ParallelConfig, offload: OffloadConfig, replicas: int, *, nccl: bool) -> Packing:
    """How a run's parameters are packed. replicas, nccl: as in `config.derive.bucket_size`."""
    most = bucket_size(parallel, replicas, nccl=nccl)
    quantised = parallel.zero_quantized_weights or parallel.zero_quantized_gradients != "none"
    block = BLOCK if quantised else 1
    if brings_parameters(parallel, offload):
        return Packing(most, by_unit=True, keep_below=parallel.zero3_persist_below, block=block)
    return Packing(most, names_units(offload), block=block)


def pack(
    chunks: Sequence[Sequence[Sequence[ParameterSpec]]], sizes: Mapping[StateGroup, int], packing: Packing
) -> tuple[BucketLayout, ...]:
    """Buckets of one rank, in forward order.

    chunks  specs by model chunk and unit (embedding, blocks, head), in forward order. A name that comes again is the
            same parameter and is packed where it came first
    sizes   number of ranks in each group that some spec names

    No bucket spans two chunks, two groups or two dtypes of parameters. Matrices of equal shape that follow each other
    in a unit (gate and up) are adjacent in one bucket, with `Packing.block` if they are whole blocks. What spans stages
    is one bucket of a chunk for each dtype, in the order of names: the ranks of all these stages reduce the same ones.
    """
    buckets: list[BucketLayout] = []
    seen: set[str] = set()
    for number, units in enumerate(chunks):
        filling, whole = _Filling(number, sizes, packing), _Filling(number, sizes, packing, kept_whole=True)
        for unit in _with_tied_together(units, seen):
            fresh = [spec for spec in unit if spec.name not in seen]
            seen.update(spec.name for spec in fresh)
            small = _small(fresh, packing)
            whole.add(_inseparable(small))
            for part in _parts([spec for spec in fresh if spec not in small], packing):
                filling.add(_inseparable(part))
                if packing.by_unit:
                    filling.close()
        filling.close()
        whole.close()
        buckets += filling.closed + whole.closed
    return tuple(buckets)


def _with_tied_together(units: Sequence[Sequence[ParameterSpec]], seen: Collection[str]) -> list[list[ParameterSpec]]:
    """The units of a chunk, of which the first with a parameter that spans stages has all of these, by dtype and
    name.
    """
    tied = {spec.name: spec for unit in units for spec in unit if spec.state_group.spans_stages}
    fresh = [tied[name] for name in sorted(tied.keys() - set(seen))]
    together = sorted(fresh, key=lambda spec: str(spec.dtype))
    moved, placed = list[list[ParameterSpec]](), False
    for unit in units:
        of_unit = list[ParameterSpec]()
        for spec in unit:
            if not spec.state_group.spans_stages:
                of_unit.append(spec)
            elif not placed:
                of_unit += together
                placed = True
        moved.append(of_unit)
    return moved


def _small(specs: Sequence[ParameterSpec], packing: Packing) -> list[ParameterSpec]:
    """Those of a unit that stay whole with ZeRO-3. What spans stages is small as a whole, or not."""
    if not packing.by_unit:
        return []
    tied = sum(spec.local_numel for spec in specs if spec.state_group.spans_stages)
    sizes = {spec: tied if spec.state_group.spans_stages else spec.local_numel for spec in specs}
    return [spec for spec, numel in sizes.items() if spec.keep_whole or numel < packing.keep_below]


def _parts(unit: list[ParameterSpec], packing: Packing) -> list[list[ParameterSpec]]:
    """The parameters of a unit that may share buckets."""
    if not packing.by_unit:
        return [unit]
    tables = [spec for spec in unit if spec.kind is ParameterKind.EMBEDDING]
    return [tables, [spec for spec in unit if spec.kind is not ParameterKind.EMBEDDING]]


@dataclass
class _Filling:
    """Buckets of one chunk: for each dtype the one that is being filled, and those that are closed. The rest is of
    `BucketLayout`.
    """

    chunk: int
    sizes: Mapping[StateGroup, int]
    packing: Packing
    kept_whole: bool = False
    filling: dict[torch.dtype | None, list[ParameterSpec]] = field(default_factory=dict)
    closed: list[BucketLayout] = field(default_factory=list)

    def add(self, runs: Iterable[list[ParameterSpec]]) -> None:
        """Add runs of parameters that share a bucket."""
        for together in runs:
            if any(filling[0].state_group is not together[0].state_group for filling in self.filling.values()):
                self.close()  # so that what spans stages is in the same order on all of them
            dtype = together[0].dtype
            filling = self.filling.get(dtype, [])
            if filling and self.packing.numel([*filling, *together]) > self.packing.bucket_size:
                self.closed.append(self._bucket(filling))
                filling = []
            self.filling[dtype] = [*filling, *together]

    def close(self) -> None:
        """End the buckets that are being filled."""
        self.closed += map(self._bucket, self.filling.values())
        self.filling = {}

    def _bucket(self, specs: Sequence[ParameterSpec]) -> BucketLayout:
        ordered = sorted(specs, key=lambda spec: not spec.kind.decays)  # stable: order is kept within both parts
        entries, stop, decayed = list[Entry](), 0, 0
        for spec in ordered:
            entries.append(Entry(spec, _up(stop, self.packing.block)))
            stop = entries[-1].stop
            if spec.kind.decays:
                decayed = stop
        group = ordered[0].state_group
        numel = _padded(stop, self.sizes[group], self.packing.block)
        return BucketLayout(self.chunk, tuple(entries), decayed, stop, numel, group, self.kept_whole, ordered[0].dtype)


def _inseparable(specs: Iterable[ParameterSpec]) -> list[list[ParameterSpec]]:
    """Runs of parameters that share a bucket: a matrix with its bias, consecutive matrices of equal shape, and what
    spans stages, of one dtype each.
    """
    runs: list[list[ParameterSpec]] = []
    matrix: ParameterSpec | None = None
    for spec in specs:
        apart = not runs or (runs[-1][0].state_group, runs[-1][0].dtype) != (spec.state_group, spec.dtype)
        follows = (
            not spec.kind.decays
            or spec.state_group.spans_stages
            or (spec.kind is ParameterKind.MATRIX and matrix is not None and matrix.shape == spec.shape)
        )
        if follows and not apart:
            runs[-1].append(spec)
        else:
            runs.append([spec])
        if spec.kind.decays:
            matrix = spec
    return runs


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _padded(used: int, size: int, block: int) -> int:
    """`used` rounded up so that `size` members own equal shards, each of whole blocks.

    Shards are multiples of 8 elements, so that they begin at multiples of 16 bytes in 16-bit and wider columns: kernels
    read and write 16 bytes at once, and messages are aligned. Buckets that this would lengthen by more than 1/64 are
    only rounded up to a multiple of `size`.
    """
    if block > 1:
        return _up(used, math.lcm(block, 8) * size)
    return _up(used, 8 * size if used >= 512 * size else size)


def group_sizes(axes: Axes, at: Coordinates) -> dict[StateGroup, int]:
    """Number of ranks that hold the same parameters as the rank at `at`, by group."""
    return {group: len(axes.state_ranks(group, at)) for group in StateGroup}


class SharedBy(NamedTuple):
    """The ranks that hold the same parameters.

    shards  number of neighbours that share out the state
    across  number of ranks that store the same shard
    local   whether the neighbours are on one stage
    """

    shards: int
    across: int
    local: bool


def frozen_sizes(sizes: Mapping[StateGroup, int], sharding: Sharding) -> Mapping[StateGroup, int]:
    """The sizes for which frozen parameters are packed: `sizes`, or 1 where the parameter column is not sharded."""
    return sizes if sharding is Sharding.SHARDED else UNSHARED


def state_groups(axes: Axes, at: Coordinates) -> dict[StateGroup, SharedBy]:
    """The ranks that hold the same parameters as the rank at `at`, by group."""

    def shared(group: StateGroup) -> SharedBy:
        inner = axes.inner_ranks(group, at)
        stages = {axes.coordinates(rank).pp for rank in inner}
        return SharedBy(len(inner), len(axes.across_ranks(group, at)), len(stages) == 1)

    return {group: shared(group) for group in StateGroup}


def owned_fragments(
    chunks: Sequence[Sequence[Sequence[ParameterSpec]]], axes: Axes, at: Coordinates, packing: Packing
) -> Iterator[tuple[int, BucketFragment]]:
    """(bucket number, fragment) for all fragments that the rank at `at` owns, at any ZeRO stage.

    On that rank `zero.portions` gives the same fragments with values. Over all ranks they cover every element once;
    parameters replicated over tp are owned once by each tp rank.
    """
    for number, layout in enumerate(pack(chunks, group_sizes(axes, at), packing)):
        members = axes.inner_ranks(layout.group, at), axes.across_ranks(layout.group, at)
        inner, across = ((ranks.index(axes.rank(at)), len(ranks)) for ranks in members)
        for fragment in layout.fragments(*layout.owned(inner, across)):
            yield number, fragment
