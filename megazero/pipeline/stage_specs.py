"""Which layers of a run's model each pipeline rank holds. Arithmetic without processes."""

from __future__ import annotations

from functools import lru_cache

from megazero.config.derive import padded_vocab, pipeline_schedule
from megazero.config.inventory import parameters_per_layer
from megazero.config.layers.kinds import layers
from megazero.config.schema import Run
from megazero.model.stage import StageSpec
from megazero.mpu.chunks import ChunkMap
from megazero.pipeline.partition import partition
from megazero.pipeline.schedule import chunk_map


def chunk_layers(run: Run) -> tuple[int, ...]:
    """Number of blocks in every model chunk, in model order: pp x virtual stages numbers."""
    if run.parallel.partition is not None:
        return run.parallel.partition
    embedding, blocks, head = layer_costs(run)
    return _partition(blocks, embedding, head, run.parallel.pp * run.parallel.virtual_stages)


# A search over layouts asks for the same partition with every micro-batch size and every ZeRO stage.
_partition = lru_cache(maxsize=512)(partition)


def layer_costs(run: Run) -> tuple[float, tuple[float, ...], float]:
    """The costs of embedding, each block and head that the partition balances (--partition-by).

    parameters: the number that a rank holds; a tied head counts as much as the embedding. time: multiplications per
    token; an embedding lookup has none, the head multiplies with its whole weight.
    """
    counts = parameters_per_layer(run.model)
    table = padded_vocab(run.model, run.parallel.tp) * run.model.hidden_size
    head = max(counts.head, table)
    if run.parallel.partition_by == "parameters":
        return max(counts.embedding, table), counts.blocks, head
    mixers = [layer.mixer for layer in layers(run.model)]
    attention = [2 * mixer.keys(run.model.seq_length) * mixer.heads * mixer.size for mixer in mixers]
    return 0.0, tuple(map(sum, zip(counts.blocks, attention, strict=True))), head


def chunks_of(run: Run) -> ChunkMap:
    """Which pipeline rank holds which model chunk."""
    return chunk_map(pipeline_schedule(run.parallel), run.parallel.pp, run.parallel.virtual_stages)


@lru_cache(maxsize=64)
def stage_specs(run: Run) -> tuple[StageSpec, ...]:
    """The layers of every model chunk, in model order. `chunks_of` gives the rank of each chunk."""
    sizes = chunk_layers(run)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    last = len(sizes) - 1
    return tuple(
        StageSpec(range(start, start + size), i == 0, i == last)
        for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
    )


@lru_cache(maxsize=64)
def specs_by_stage(run: Run) -> tuple[tuple[StageSpec, ...], ...]:
    """The layers of each model chunk of every stage, by the stage's own number of a chunk."""
    specs, chunks = stage_specs(run), chunks_of(run)
    return tuple(tuple(specs[number] for number in chunks.of(stage)) for stage in range(run.parallel.pp))


def specs_of_stage(run: Run, stage: int) -> tuple[StageSpec, ...]:
    """The same of one stage."""
    return specs_by_stage(run)[stage]


def unit_names(spec: StageSpec) -> list[str]:
    """What the units of a chunk are, in forward order."""
    blocks = [f"block {block}" for block in spec.blocks]
    return ["the embedding"] * spec.has_embedding + blocks + ["the head"] * spec.has_head
