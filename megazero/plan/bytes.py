"""Bytes of the model state on the ranks of each stage, computed with the same packing as the run's."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.schema import ParallelConfig, Run
from megazero.mpu.axes import Axes, Coordinates
from megazero.pipeline.stage_specs import chunks_of, stage_specs
from megazero.plan.offloaded import NOTHING, OffloadedBytes, offloaded_bytes
from megazero.plan.shapes import packed, shape_of, specs_of
from megazero.program.shape import RankShape
from megazero.zero.coded import coding_of, frozen_layouts
from megazero.zero.layout import group_sizes, packing_of, shard_sizes
from megazero.zero.sharding import OPTIMIZER, Column, Sharding, run_columns, shardings

KEPT_BYTES = 4
"""Of an element that error feedback keeps."""


@dataclass(frozen=True)
class StageBytes:
    """The model state of one rank of a stage.

    blocks      number of blocks, in `chunks` model chunks
    embedding   whether the rank has the embedding
    head        whether the rank has the head
    parameters  number of parameters, frozen ones included
    weights, gradients, optimizer
                bytes of these columns on the device; the gradients' with error feedback, the optimizer's are the
                master weights and the moments
    feedback    bytes of error feedback alone
    elsewhere   what rests in host memory and on disks
    """

    blocks: int
    chunks: int
    embedding: bool
    head: bool
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    feedback: int = 0
    elsewhere: OffloadedBytes = NOTHING

    @property
    def total(self) -> int:
        """Of what is on the device."""
        return self.weights + self.gradients + self.optimizer


def stage_bytes(run: Run, axes: Axes) -> list[StageBytes]:
    """The bytes of each stage's rank with dp, cp and tp index 0, without buffers of buckets in flight."""
    return [_bytes_of_stage(run, axes, stage) for stage in range(axes.pp)]


def has_nccl(parallel: ParallelConfig, axes: Axes) -> bool:
    """Whether the run says that it will have NCCL: with `auto` for both, the machine decides later, and this is False.

    A bucket's size changes the bytes of a sharded state by its padding only.
    """
    on_card = parallel.backend == "auto" and parallel.device == "cuda"
    return axes.world_size > 1 and (parallel.backend == "nccl" or on_card)


def stage_shape(run: Run, axes: Axes, stage: int) -> RankShape:
    """The shape of the ranks of a stage. Shards of all tp ranks have the same size."""
    return shape_of(run, axes, Coordinates(stage, 0, 0, 0), nccl=has_nccl(run.parallel, axes))


def _bytes_of_stage(run: Run, axes: Axes, stage: int) -> StageBytes:
    at = Coordinates(stage, 0, 0, 0)
    shards = shard_sizes(axes, at)
    row = shardings(run.parallel, run.offload)
    parallel = run.parallel
    dtypes = run_columns(run.optimizer, parallel, run.offload)
    nbytes = dict.fromkeys(Column, 0)
    parameters = feedback = 0
    nccl, sizes = has_nccl(parallel, axes), group_sizes(axes, at)
    packing = packing_of(parallel, run.offload, axes.dp * axes.cp, nccl=nccl)
    layouts, elsewhere = packed(run, axes, at, packing), offloaded_bytes(run, axes, at, nccl=nccl)
    for bucket in layouts:
        parameters += bucket.parameters
        if parallel.zero_gradient_error_feedback:
            inner = shards[bucket.group]
            shard = bucket.numel // inner
            feedback += KEPT_BYTES * (bucket.numel * (inner > 1) + shard * (sizes[bucket.group] > inner))
        for column, dtype in dtypes.items():
            whole = row[column] is Sharding.REPLICATED or (column is Column.PARAMETER and bucket.kept_whole)
            elements = bucket.numel if whole else bucket.numel // shards[bucket.group]
            nbytes[column] += elements * dtype.itemsize
    sharding = row[Column.PARAMETER]
    sharded, still = sharding is Sharding.SHARDED, specs_of(run, stage, 0, trained=False)
    plain, coded = frozen_layouts(still, sizes, sharding, packing, coding_of(run.lora, run.model))
    for codes in coded:
        parameters += codes.numbers.parameters
        nbytes[Column.PARAMETER] += codes.bytes_on_rank(shards[codes.numbers.group], sharding)
    for bucket in plain:
        parameters += bucket.parameters
        elements = bucket.numel // shards[bucket.group] if sharded and not bucket.kept_whole else bucket.numel
        nbytes[Column.PARAMETER] += elements * dtypes[Column.PARAMETER].itemsize
    specs = stage_specs(run)
    of_stage = [specs[number] for number in chunks_of(run).of(stage)]
    embedding, head = any(spec.has_embedding for spec in of_stage), any(spec.has_head for spec in of_stage)
    blocks = sum(len(spec.blocks) for spec in of_stage)
    return StageBytes(
        blocks,
        len(of_stage),
        embedding,
        head,
        parameters,
        weights=nbytes[Column.PARAMETER] - sum(elsewhere.parameters),
        gradients=nbytes[Column.GRADIENT] - sum(elsewhere.gradients) + feedback,
        optimizer=sum(nbytes[column] for column in OPTIMIZER) - sum(elsewhere.optimizer),
        feedback=feedback,
        elsewhere=elsewhere,
    )
