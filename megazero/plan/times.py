"""Relative times of the model chunks in a step, by counting multiplications."""

from __future__ import annotations

from dataclasses import replace

from megazero.config.schema import Run
from megazero.pipeline.stage_specs import chunk_layers, layer_costs
from megazero.program.times import ChunkTimes


def chunk_times(run: Run) -> ChunkTimes:
    """Relative times of the model chunks: the multiplications of their layers; a backward takes twice its forward."""
    embedding, block, head = layer_costs(replace(run, parallel=replace(run.parallel, partition_by="time")))
    sizes = chunk_layers(run)
    last = len(sizes) - 1
    forward = tuple(
        max(n * block + (embedding if i == 0 else 0) + (head if i == last else 0), 1.0) for i, n in enumerate(sizes)
    )
    return ChunkTimes(forward, tuple(2 * seconds for seconds in forward))
