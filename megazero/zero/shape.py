"""The shape of a rank's model state (`program.shape`): which units read which buckets, by arithmetic on specs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megazero.mpu.parameter import ParameterKind, ParameterSpec, StateGroup
from megazero.program.shape import BucketShape, RankShape, UnitShape
from megazero.zero.layout import BucketLayout, SharedBy
from megazero.zero.placement import Column, Placement

Specs = Sequence[Sequence[Sequence[ParameterSpec]]]
"""By chunk and unit."""


@dataclass(frozen=True)
class StateWidths:
    """Bytes of an element of the whole parameter and gradient columns."""

    parameter: int
    gradient: int


def rank_shape(
    specs: Specs,
    layouts: Sequence[BucketLayout],
    frozen: Sequence[BucketLayout],
    row: Mapping[Column, Placement],
    widths: StateWidths,
    groups: Mapping[StateGroup, SharedBy],
) -> RankShape:
    """The shape of a rank that holds these parameters.

    specs    all parameters of each unit, trained and frozen
    layouts  the buckets of trained parameters
    frozen   the buckets of frozen parameters, which are numbered after them
    row      the placements of the columns
    groups   by group, the ranks that hold a parameter

    An embedding's and a head's table are not read in backward: the gradient of a lookup needs the ids alone, and the
    head makes its gradients in forward (`mpu.head_loss`).
    """
    holder = {entry.spec.name: n for n, layout in enumerate((*layouts, *frozen)) for entry in layout.entries}
    buckets = [_bucket(layout, row, widths, groups[layout.group], trained=True) for layout in layouts]
    buckets += [_bucket(layout, row, widths, groups[layout.group], trained=False) for layout in frozen]

    def unit(parameters: Sequence[ParameterSpec]) -> UnitShape:
        def held(some: Iterable[ParameterSpec]) -> tuple[int, ...]:
            return tuple(sorted({holder[spec.name] for spec in some}))

        everything = held(parameters)
        backward = held(spec for spec in parameters if spec.kind is not ParameterKind.EMBEDDING)
        return UnitShape(everything, backward, tuple(n for n in everything if buckets[n].trained))

    units = tuple(tuple(unit(parameters) for parameters in chunk) for chunk in specs)
    partial = any(entry.spec.tp_partial for layout in layouts for entry in layout.entries)
    return RankShape(units, tuple(buckets), partial)


def _bucket(
    layout: BucketLayout,
    row: Mapping[Column, Placement],
    widths: StateWidths,
    group: SharedBy,
    *,
    trained: bool,
) -> BucketShape:
    shards, across, local = group
    sharded = {column for column, placement in row.items() if placement is Placement.SHARDED}
    return BucketShape(
        layout.chunk,
        layout.numel * widths.parameter,
        layout.numel * widths.gradient if trained else 0,
        trained,
        gathered=Column.PARAMETER in sharded and not layout.kept_whole and shards > 1,
        sharded_gradient=trained and Column.GRADIENT in sharded,
        sharded_state=trained and Column.EXP_AVG in sharded,
        shards=shards,
        across=across,
        spans_stages=layout.group.spans_stages,
        shards_span=layout.group.spans_stages and not local,
    )
