"""Bytes of the model state on the ranks of each stage, by the arithmetic that packs it."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.dtypes import compute_dtype, state_dtype
from megazero.config.schema import Run
from megazero.mpu.grid import Axes
from megazero.pipeline.division import chunks_of, stage_specs
from megazero.plan.places import places_of
from megazero.zero.layout import pack
from megazero.zero.placement import Column, Spread, columns, placements


@dataclass(frozen=True)
class StageBytes:
    """What one rank of a stage holds: layers, in so many model chunks; parameters; bytes by column of
    the model state.
    """

    blocks: int
    chunks: int
    embedding: bool
    head: bool
    parameters: int
    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def stage_bytes(run: Run, axes: Axes) -> list[StageBytes]:
    """What the first data-parallel rank of each stage holds, by the arithmetic that packs it (buckets
    in flight apart).
    """
    return [_bytes_of_stage(run, axes, stage) for stage in range(axes.pp)]


def _bytes_of_stage(run: Run, axes: Axes, stage: int) -> StageBytes:
    size, ends = axes.dp * axes.cp, len({0, axes.pp - 1})
    row = placements(run.parallel.zero_stage)
    dtypes = columns(
        compute_dtype(run.optimizer.precision), state_dtype(run.optimizer.precision), run.optimizer.optimizer
    )
    held = dict.fromkeys(Column, 0)
    parameters = 0
    for bucket in pack(places_of(run, stage, 0), size, run.parallel.bucket_size, size * ends):
        parameters += bucket.used
        sharers = size * ends if bucket.tied else size
        for column, dtype in dtypes.items():
            elements = bucket.numel // sharers if row[column].spread is Spread.SHARDED else bucket.numel
            held[column] += elements * dtype.itemsize
    frozen = pack(places_of(run, stage, 0, trained=False), 1, run.parallel.bucket_size, 1)
    parameters += sum(bucket.used for bucket in frozen)
    held[Column.PARAMETER] += sum(bucket.numel for bucket in frozen) * dtypes[Column.PARAMETER].itemsize
    specs = stage_specs(run)
    own = [specs[number] for number in chunks_of(run).of(stage)]
    embedding, head = any(spec.has_embedding for spec in own), any(spec.has_head for spec in own)
    blocks = sum(len(spec.blocks) for spec in own)
    optimizer = held[Column.MASTER] + held[Column.EXP_AVG] + held[Column.EXP_AVG_SQ]
    return StageBytes(
        blocks, len(own), embedding, head, parameters, held[Column.PARAMETER], held[Column.GRADIENT], optimizer
    )
