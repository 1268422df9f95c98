"""How parameters lie in flat buckets: arithmetic on parameters' specs, the same for this rank and for any other.

A bucket is one flat buffer per column (parameter, gradient, master weight, moments) and one message per collective.
Checkpoints and the planner call these functions for ranks whose memory they never see.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megazero.mpu.grid import Axes, Coordinates
from megazero.mpu.parameter import ParameterKind, ParameterSpec, StateGroup
from megazero.zero.fragment import FragmentSpec

UNSHARED = dict.fromkeys(StateGroup, 1)
"""Group sizes of memory that every rank holds whole: frozen parameters."""


@dataclass(frozen=True)
class Entry:
    """A parameter and the element of the bucket at which it begins."""

    spec: ParameterSpec
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.spec.local_numel


@dataclass(frozen=True)
class BucketFragment(FragmentSpec):
    """A fragment that lies at `offset` of its bucket."""

    offset: int


@dataclass(frozen=True)
class BucketLayout:
    """Parameters of one model chunk side by side: the decayed ones, then the others, then unused elements.

    chunk    model chunk of the rank, in the order of its stages
    entries  parameters, without gaps
    decayed  elements [0, decayed) have weight decay
    used     elements [0, used) belong to parameters
    numel    `used` rounded up to a multiple of the group's size N; where that adds little, of 8 N (see `_padded`)
    group    the ranks that hold all of its parameters, reduce their gradients and share out their state
    """

    chunk: int
    entries: tuple[Entry, ...]
    decayed: int
    used: int
    numel: int
    group: StateGroup

    def shard(self, index: int, size: int) -> tuple[int, int]:
        """Range of the bucket that member `index` of a group of `size` owns."""
        assert self.numel % size == 0, (self.numel, size)
        part = self.numel // size
        return index * part, (index + 1) * part

    def fragments(self, start: int, stop: int) -> Iterator[BucketFragment]:
        """What of each parameter lies in [start, stop) of the bucket, without vocabulary padding and
        the unused tail.
        """
        for entry in self.entries:
            first, last = max(start, entry.offset), min(stop, entry.offset + entry.spec.stored_numel)
            if first < last:
                yield BucketFragment(entry.spec, first - entry.offset, last - entry.offset, first)


def pack(
    chunks: Sequence[Sequence[Sequence[ParameterSpec]]], sizes: Mapping[StateGroup, int], bucket_size: int
) -> tuple[BucketLayout, ...]:
    """Buckets of one rank, in forward order.

    chunks       specs by model chunk and unit (embedding, blocks, head), in forward order; a name that comes again
                 is the same parameter, which belongs to where it came first
    sizes        ranks in each group that some spec names
    bucket_size  elements after which a bucket is closed. No bucket spans two chunks or two groups; one parameter is
                 never cut, so a larger one makes a larger bucket

    Matrices of equal shape that follow each other in a unit (gate and up) stay in one bucket, side by side.
    """
    buckets: list[BucketLayout] = []
    seen: set[str] = set()
    for number, units in enumerate(chunks):
        filling: list[ParameterSpec] = []

        def close(number: int = number, filling: list[ParameterSpec] = filling) -> None:
            if filling:
                buckets.append(_bucket(number, filling, sizes))
                filling.clear()

        for unit in units:
            fresh = [spec for spec in unit if spec.name not in seen]
            seen.update(spec.name for spec in fresh)
            for together in _inseparable(fresh):
                others = filling and filling[0].state_group is not together[0].state_group
                if others or _numel(filling) + _numel(together) > bucket_size:
                    close()
                filling.extend(together)
        close()
    return tuple(buckets)


def _numel(specs: Iterable[ParameterSpec]) -> int:
    return sum(spec.local_numel for spec in specs)


def _inseparable(specs: Iterable[ParameterSpec]) -> list[list[ParameterSpec]]:
    """Runs that share a bucket: a matrix with the bias after it, and matrices of equal shape that follow each other."""
    runs: list[list[ParameterSpec]] = []
    matrix: ParameterSpec | None = None
    for spec in specs:
        apart = not runs or runs[-1][0].state_group is not spec.state_group
        follows = not spec.kind.decays or (
            spec.kind is ParameterKind.MATRIX and matrix is not None and matrix.shape == spec.shape
        )
        if follows and not apart:
            runs[-1].append(spec)
        else:
            runs.append([spec])
        if spec.kind.decays:
            matrix = spec
    return runs


def _bucket(chunk: int, specs: Sequence[ParameterSpec], sizes: Mapping[StateGroup, int]) -> BucketLayout:
    ordered = sorted(specs, key=lambda spec: not spec.kind.decays)  # stable: order is kept within both parts
    entries, offset, decayed = [], 0, 0
    for spec in ordered:
        entries.append(Entry(spec, offset))
        offset += spec.local_numel
        if spec.kind.decays:
            decayed = offset
    group = specs[0].state_group
    return BucketLayout(chunk, tuple(entries), decayed, offset, _padded(offset, sizes[group]), group)


def _padded(used: int, size: int) -> int:
    """Elements of a bucket that `size` members share equally.

    Shards of whole groups of 8 begin where 16 bytes do, of 16-bit and of wider columns: kernels read and write so much
    at once, and messages are aligned. Buckets that this would lengthen by more than a 64th do without.
    """
    unit = 8 * size if used >= 512 * size else size
    return math.ceil(used / unit) * unit


def group_sizes(axes: Axes, at: Coordinates) -> dict[StateGroup, int]:
    """Ranks in each group, of those that a rank at `at` may be in."""
    return {group: len(axes.state_ranks(group, at)) for group in StateGroup}


def owned_fragments(
    chunks: Sequence[Sequence[Sequence[ParameterSpec]]], axes: Axes, at: Coordinates, bucket_size: int
) -> Iterator[tuple[int, BucketFragment]]:
    """(bucket number, fragment) for all that the rank at `at` owns, whatever the ZeRO stage: what
    `ShardedOptimizer.fragments` covers there.

    Over all ranks that is every element once, but for parameters replicated over tp, which every tp rank owns.
    """
    for number, layout in enumerate(pack(chunks, group_sizes(axes, at), bucket_size)):
        members = axes.state_ranks(layout.group, at)
        for fragment in layout.fragments(*layout.shard(members.index(axes.rank(at)), len(members))):
            yield number, fragment
