"""The shape of a rank's model state (`program.shape`): which units read which buckets, by arithmetic on specs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megazero.config.dtypes import compute_dtype, grad_reduce_dtype, state_dtype
from megazero.config.inventory import FINAL_NORM
from megazero.config.schema import OffloadConfig, OptimizerConfig, ParallelConfig
from megazero.config.tiers import Tier
from megazero.mpu.parameter import ParameterKind, ParameterSpec, StateGroup
from megazero.mpu.quantized import gathered_bytes, scattered_bytes
from megazero.program.shape import BucketShape, MessageBytes, PartShape, RankShape, UnitShape
from megazero.zero.coded import CodedLayout, FrozenLayouts
from megazero.zero.layout import BucketLayout, SharedBy
from megazero.zero.messages import BITS
from megazero.zero.parts import Part, Resting
from megazero.zero.sharding import OPTIMIZER, Column, Sharding, run_columns

Specs = Sequence[Sequence[Sequence[ParameterSpec]]]
"""By chunk and unit."""


@dataclass(frozen=True)
class StateWidths:
    """Bytes of an element, in memory and on its way.

    parameter  of the whole parameter column; where parameters have several dtypes (`BucketLayout.dtype`), of the widest
    gradient   of the whole gradient column
    reduced    of a gradient that is reduced as it is
    blocks     whether parameters are gathered in blocks of int8
    bits       of an element of a gradient that is reduced in blocks; None: it is reduced as it is
    state      of the optimizer's columns together
    """

    parameter: int
    gradient: int
    reduced: int
    blocks: bool = False
    bits: int | None = None
    state: int = 0


def state_widths(optimizer: OptimizerConfig, parallel: ParallelConfig, offload: OffloadConfig) -> StateWidths:
    """The widths of a run's model state."""
    dtypes = run_columns(optimizer, parallel, offload)
    precision = optimizer.precision
    widest = state_dtype(precision) if optimizer.has_several_dtypes else compute_dtype(precision)
    return StateWidths(
        widest.itemsize,
        state_dtype(precision).itemsize,
        grad_reduce_dtype(precision, parallel.grad_reduce_dtype).itemsize,
        parallel.zero_quantized_weights,
        BITS[parallel.zero_quantized_gradients],
        sum(dtypes[column].itemsize for column in OPTIMIZER if column in dtypes),
    )


def update_ranges(
    layouts: Sequence[BucketLayout], row: Mapping[Column, Sharding], groups: Mapping[StateGroup, SharedBy]
) -> list[tuple[int, int]]:
    """What a rank updates of each bucket, as if it were the first of those that share it out: all have as much."""
    sharded = row[Column.EXP_AVG] is Sharding.SHARDED
    return [(0, layout.numel // (groups[layout.group].shards if sharded else 1)) for layout in layouts]


def rank_shape(
    specs: Specs,
    layouts: Sequence[BucketLayout],
    frozen: FrozenLayouts,
    row: Mapping[Column, Sharding],
    widths: StateWidths,
    groups: Mapping[StateGroup, SharedBy],
    resting: Sequence[Resting],
) -> RankShape:
    """The shape of a rank that holds these parameters.

    specs    all parameters of each unit, trained and frozen
    layouts  the buckets of trained parameters
    frozen   the buckets of frozen parameters, which are numbered after them: those of codes come last
    row      the shardings of the columns
    groups   by group, the ranks that hold a parameter
    resting  where each bucket rests, in the order of their numbers (`zero.parts`)

    An embedding's and a head's table are not read in backward: the gradient of a lookup needs the ids alone, and the
    head makes its gradients in forward (`mpu.head_loss`).
    """
    every = (*layouts, *frozen.plain, *(layout.numbers for layout in frozen.coded))
    holder = {entry.spec.name: n for n, layout in enumerate(every) for entry in layout.entries}
    plain = [(layout, True) for layout in layouts] + [(layout, False) for layout in frozen.plain]
    buckets = [
        _bucket(layout, row, widths, groups[layout.group], own, trained=trained)
        for (layout, trained), own in zip(plain, resting[: len(plain)], strict=True)
    ]
    buckets += [
        _coded(layout, row[Column.PARAMETER], widths, groups[layout.numbers.group], own)
        for layout, own in zip(frozen.coded, resting[len(plain) :], strict=True)
    ]

    def unit(parameters: Sequence[ParameterSpec]) -> UnitShape:
        def held(some: Iterable[ParameterSpec]) -> tuple[int, ...]:
            return tuple(sorted({holder[spec.name] for spec in some}))

        everything, tables = held(parameters), held(spec for spec in parameters if spec.kind is ParameterKind.EMBEDDING)
        backward = held(spec for spec in parameters if spec.kind is not ParameterKind.EMBEDDING)
        early = tuple(n for n in tables if buckets[n].trained)
        is_head = any(spec.name.startswith(FINAL_NORM) for spec in parameters)
        at_once, in_forward = ((), early) if is_head else (early, ())
        return UnitShape(everything, backward, tuple(n for n in everything if buckets[n].trained), at_once, in_forward)

    units = tuple(tuple(unit(parameters) for parameters in chunk) for chunk in specs)
    partial = any(_is_partial(layout) for layout, own in zip(layouts, resting, strict=False) if own.sums is Tier.DEVICE)
    return RankShape(units, tuple(buckets), partial)


def _bucket(
    layout: BucketLayout,
    row: Mapping[Column, Sharding],
    widths: StateWidths,
    group: SharedBy,
    resting: Resting,
    *,
    trained: bool,
) -> BucketShape:
    shards, across, local = group
    sharded = {column for column, sharding in row.items() if sharding is Sharding.SHARDED}
    shared_out = Column.PARAMETER in sharded and not layout.kept_whole and shards > 1
    loaded = resting.rests is not Tier.DEVICE
    return BucketShape(
        layout.chunk,
        layout.numel * layout.parameter_bytes(widths.parameter),
        layout.numel * widths.gradient if trained else 0,
        trained,
        gathered=shared_out or loaded,
        sharded_gradient=trained and Column.GRADIENT in sharded,
        sharded_state=trained and Column.EXP_AVG in sharded,
        shards=shards,
        across=across,
        spans_stages=layout.group.spans_stages,
        shards_span=layout.group.spans_stages and not local,
        sent=_messages(layout, widths, shards, across, sharded),
        parts=tuple(_part(part, widths, layout.parameter_bytes(widths.parameter)) for part in resting.parts),
        rests=resting.rests,
        rests_whole=loaded and not shared_out,
        sums=resting.sums,
        partial=trained and _is_partial(layout),
    )


def _is_partial(layout: BucketLayout) -> bool:
    return any(entry.spec.tp_partial for entry in layout.entries)


def _part(part: Part, widths: StateWidths, parameter: int) -> PartShape:
    """parameter: bytes of one."""
    numel = part.stop - part.start
    return PartShape(part.tier, numel * widths.gradient, numel * widths.state, numel * parameter)


def _coded(
    layout: CodedLayout, sharding: Sharding, widths: StateWidths, group: SharedBy, resting: Resting
) -> BucketShape:
    """A bucket of codes. Where they are not sharded nothing travels, and one rank alone has what it decodes."""
    sharded = sharding is Sharding.SHARDED and group.shards > 1
    shards = group.shards if sharded else 1
    return BucketShape(
        layout.numbers.chunk,
        layout.numbers.numel * widths.parameter,
        0,
        trained=False,
        gathered=True,
        shards=shards,
        across=group.shards * group.across // shards,
        sent=MessageBytes(layout.nbytes * sharded, 0, 0, 0, 0, parameters_in_blocks=sharded),
        code_bytes=layout.nbytes // shards,
        parts=tuple(PartShape(part.tier, 0, 0, part.stop - part.start) for part in resting.parts),
        rests=resting.rests,
    )


def _messages(
    layout: BucketLayout, widths: StateWidths, shards: int, across: int, sharded: set[Column]
) -> MessageBytes:
    """The bytes of a bucket's messages. Beside sharded parameters, those that are kept whole are gathered exactly."""
    numel, shard = layout.numel, layout.numel // shards
    exact = Column.PARAMETER in sharded and layout.kept_whole
    blocks = widths.blocks and shards > 1 and not exact
    parameters = gathered_bytes(numel, shards) if blocks else numel * layout.parameter_bytes(widths.parameter)
    if widths.bits is None:
        whole, part = numel * widths.reduced, shard * widths.reduced
        return MessageBytes(parameters, whole, whole, part, part, blocks)
    return MessageBytes(
        parameters,
        scattered_bytes(numel, shards, widths.bits),
        gathered_bytes(numel, shards),
        scattered_bytes(shard, across, widths.bits),
        gathered_bytes(shard, across),
        blocks,
        gradients_in_blocks=True,
    )
