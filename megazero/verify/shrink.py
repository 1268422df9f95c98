"""A run of small sizes with the structure of another one: what differs from layer to layer, from stage to stage, and
between ranks stays; widths, lengths and numbers of equal things become small.

`shrunk` is arithmetic. What it cannot keep it says, by flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megazero.config.checks_layout import least_buffer
from megazero.config.derive import ffn_width, gathers_parameters, head_dim, pipeline_schedule, query_groups
from megazero.config.inventory import parameters_per_layer
from megazero.config.layers.kinds import pattern_items, rotary_sets
from megazero.config.layers.pattern import LayerPattern, PatternItem
from megazero.config.lengths import Length, Measure
from megazero.config.rotary import RotarySettings
from megazero.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    ParallelConfig,
    Run,
    ScheduleConfig,
    TrainerConfig,
)
from megazero.config.tiers import Tier, TierShare, plain_unit
from megazero.mpu.axes import Axes, axes_of
from megazero.pipeline.stage_specs import chunk_layers
from megazero.plan.traffic import largest_unit
from megazero.verify.data import EOD
from megazero.verify.left_out import notes

MOST_LAYERS, MOST_REPLICAS, FEW_RANKS = 2, 3, 64
"""Equal blocks of a chunk that are kept; replicas that are kept, and ranks up to which there are so many: else two."""
STEPS = 3
"""Steps of a proof."""
VOCABULARY = 50_000
"""Where the run's tokenizer would say it. Only its remainder matters."""


@dataclass(frozen=True)
class Shrunk:
    """A small run.

    run       it, for `axes.world_size` ranks
    axes      of the small run
    real      of the run that it stands for
    packed    whether its samples are packed, as conversations are
    notes     flags of the run that take no part in the proof, with the reason (`left_out.notes`)
    """

    run: Run
    axes: Axes
    real: Axes
    packed: bool
    notes: tuple[str, ...]


def shrunk(run: Run, world_size: int) -> Shrunk:
    """The small run of a run on so many ranks. Raises ValueError for what has no small form."""
    real = axes_of(run, world_size)
    parallel, pp, tp = run.parallel, run.parallel.pp, run.parallel.tp
    known = run if run.model.vocab_size else replace(run, model=replace(run.model, vocab_size=VOCABULARY))
    dp, shard = _replicas(real)
    kept = kept_layers(known.model, chunk_layers(known))
    model = _model(known.model, tp, [number for chunk in kept for number in chunk], parallel.sequence_parallel)
    batch, micro = min(2, run.schedule.micro_batch_size), _micro_batches(run, real.dp)
    schedule = _schedule(run.schedule, batch, batch * micro * dp)
    numbers = {number: new for new, number in enumerate(number for chunk in kept for number in chunk)}
    small = replace(
        known,
        model=model,
        parallel=_parallel(parallel, [len(chunk) for chunk in kept], shard, micro),
        optimizer=_optimizer(run.optimizer),
        schedule=schedule,
        data=DataConfig(eod_id=EOD, eod_mask_loss=True, num_workers=0, seed=run.data.seed),
        checkpoint=CheckpointConfig(),
        trainer=TrainerConfig(eval_iters=1, exit_duration_in_mins=None, sample_prompt=None),
        offload=_offload(run, numbers),
    )
    small = replace(small, parallel=replace(small.parallel, bucket_size=_bucket_size(known, small)))
    small = replace(small, offload=replace(small.offload, nvme_buffer_bytes=_buffer_bytes(small)))
    axes = axes_of(small, tp * pp * dp)
    if parallel.zero3_gathered_bytes is not None and gathers_parameters(run):
        small = replace(
            small, parallel=replace(small.parallel, zero3_gathered_bytes=_gathered(known, real, small, axes))
        )
    return Shrunk(small, axes, real, bool(run.data.instruction_data), notes(run))


def _replicas(real: Axes) -> tuple[int, int | None]:
    """(replicas, shard size) that keep what there is of each: one, or several."""
    few = MOST_REPLICAS if real.pp * real.tp * MOST_REPLICAS <= FEW_RANKS else 2
    if real.shard_size is None or real.shard_size == real.dp:
        dp = min(real.dp, few)
        return dp, None if real.shard_size is None else dp
    size = min(real.shard_size, 2)
    return size * min(real.dp // real.shard_size, 2), size


def kept_layers(model: ModelConfig, chunks: Sequence[int]) -> list[list[int]]:
    """The numbers of the blocks that are kept of each chunk: as many fewer as the fullest chunk loses, but one of each
    kind, and none only where there is none.
    """
    items, start, kept = pattern_items(model), 0, list[list[int]]()
    lost = max(0, max(chunks) - MOST_LAYERS)
    for count in chunks:
        numbers, number_kept = range(start, start + count), max(min(count, 1), count - lost)
        firsts = [next(n for n in numbers if items[n] == item) for item in dict.fromkeys(items[n] for n in numbers)]
        others = [n for n in numbers if n not in firsts]
        kept.append(sorted([*firsts, *others[: max(0, number_kept - len(firsts))]]))
        start += count
    return kept


def _model(model: ModelConfig, tp: int, kept: Sequence[int], sequence_parallel: bool) -> ModelConfig:
    groups, heads, size = _heads(model, tp)
    length = -(-8 // tp) * tp if tp > 1 else 8
    length = max(length, 2 * tp if sequence_parallel else 0)
    items = pattern_items(model)
    widths = {width: tp * (3 + n) for n, width in enumerate(dict.fromkeys([ffn_width(model), *_widths(items)]))}
    reaches = _reaches(items, model.seq_length, length)
    small = [
        replace(
            items[n],
            window=reaches.get(items[n].window or 0),
            chunk=reaches.get(items[n].chunk or 0),
            width=None if items[n].width is None else widths[items[n].width or 0],
        )
        for n in kept
    ]
    multiple = min(model.make_vocab_size_divisible_by, 2)
    rows = model.vocab_size or VOCABULARY
    whole = rows % (model.make_vocab_size_divisible_by * tp) == 0
    vocabulary = -(-_vocabulary_rows(model, len(kept)) // (multiple * tp)) * multiple * tp
    positions = model.max_position_embeddings
    return replace(
        model,
        num_layers=len(kept),
        hidden_size=_hidden(model, heads * size),
        num_attention_heads=heads,
        num_query_groups=None if model.num_query_groups is None else groups,
        kv_channels=None if model.kv_channels is None else size,
        layer_pattern=LayerPattern.shortest(tuple(small)),
        ffn_hidden_size=widths[ffn_width(model)],
        vocab_size=vocabulary if whole else vocabulary - 1,
        make_vocab_size_divisible_by=multiple,
        seq_length=length,
        max_position_embeddings=None
        if positions is None
        else length + min(2, positions - model.seq_length)
        if positions >= model.seq_length
        else length,
        init_method_std=0.2,
    )


def _vocabulary_rows(model: ModelConfig, layers: int) -> int:
    """Rows of the embedding, about: 40, or so many that it is larger than a block if the run's is. A gather of the
    largest unit starts earlier than others.
    """
    sizes = parameters_per_layer(model)
    block = max(sizes.blocks, default=0)
    return 400 if layers and sizes.embedding > block else 40


def _heads(model: ModelConfig, tp: int) -> tuple[int, int, int]:
    """(key-value heads, query heads, width of a head): one or two groups on a rank, one or two heads of a group, and an
    odd number of heads on a rank where their number is no power of two, which ALiBi's slopes depend on.
    """
    real_groups, real_heads, width = query_groups(model), model.num_attention_heads, head_dim(model)
    grouped = real_groups < real_heads
    uneven = real_heads & (real_heads - 1) != 0
    per_rank = min(2, real_groups // tp)
    if uneven and not grouped and real_heads // tp > 2:
        per_rank = 3
    groups = tp * per_rank
    of_group = min(3 if uneven else 2, real_heads // real_groups)
    sizes = [
        size
        for size in range(4, width + 1, 2)
        if all(_turns(settings, size) for settings in rotary_sets(model).values())
    ]
    scaled = any(s.scaling is not None and s.scaling.kind == "longrope" for s in rotary_sets(model).values())
    return groups, groups * of_group, width if scaled or not sizes else sizes[0]


def _turns(settings: RotarySettings, size: int) -> bool:
    """Whether rotary positions can turn their share of heads of this size."""
    try:
        settings.turned(size)
    except ValueError:
        return False
    return True


def _hidden(model: ModelConfig, heads: int) -> int:
    """The width of the residual stream: that of all heads, or clearly less or more where a head's width is given."""
    if model.kv_channels is None:
        return heads
    real = model.num_attention_heads * model.kv_channels
    return heads if real == model.hidden_size else heads + 4 if real < model.hidden_size else max(4, heads - 4)


def _widths(items: Sequence[PatternItem]) -> list[int]:
    return [item.width for item in items if item.width is not None]


def _reaches(items: Sequence[PatternItem], real: int, length: int) -> dict[int, int]:
    """Windows and chunks -> small ones: different ones stay different, and one beyond the sample stays so."""
    sizes = sorted({size for item in items for size in (item.window, item.chunk) if size})
    inside = [size for size in sizes if size < real]
    small = {size: min(length - 1, 1 if size == 1 else 3 + 2 * n) for n, size in enumerate(inside)}
    return small | {size: length + 1 for size in sizes if size >= real}


def _micro_batches(run: Run, dp: int) -> int:
    """Micro-batches of a replica in a step: as many as there are, or as few as keep a steady state of the schedule
    between its begin and its end.
    """
    real = run.schedule.global_batch_size // (run.schedule.micro_batch_size * dp)
    pp, name = run.parallel.pp, pipeline_schedule(run.parallel)
    if pp == 1 and name != "interleaved":
        return min(real, 3)
    if name == "interleaved":
        least = 2 * pp  # whole rounds of pp, and the same remainder behind them
        return real if real <= least else least + real % pp
    return min(real, pp + 2 if name in ("1f1b", "gpipe") else 2 * pp)


def _schedule(schedule: ScheduleConfig, batch: int, whole: int) -> ScheduleConfig:
    def few(length: Length | None, number: int) -> Length | None:
        return None if length is None else Length(number, Measure.ITERATIONS, by_name=True)

    return replace(
        schedule,
        micro_batch_size=batch,
        global_batch_size=whole,
        rampup_batch_size=None,
        train_length=Length(STEPS + 2, Measure.ITERATIONS, by_name=True),
        lr=3e-3,
        min_lr=min(schedule.min_lr, 1e-3),
        lr_warmup=None,  # its first step has the rate 0, which would hide what an update does
        lr_decay=None,
        lr_wsd_decay=few(schedule.lr_wsd_decay, 2),
    )


def _parallel(parallel: ParallelConfig, layers: Sequence[int], shard: int | None, micro: int) -> ParallelConfig:
    given = parallel.zero_shard_size is not None
    group = parallel.vertical_group_size
    budget = parallel.activation_memory_budget is not None
    return replace(
        parallel,
        zero_shard_size=shard if given else None,
        partition=tuple(layers),
        partition_by="parameters",
        recompute_granularity="full" if budget else parallel.recompute_granularity,
        recompute_num_layers=2 if budget else min(2, parallel.recompute_num_layers),
        activation_memory_budget=None,
        vertical_group_size=None if group is None else max(1, min(group, micro - 1)),
        zero3_gathered_bytes=None,
        zero3_persist_below=min(parallel.zero3_persist_below, 20),
        zero_quantized_weights=False,
        zero_quantized_gradients="none",
        zero_gradient_error_feedback=False,
        compile=False,
        attention="auto" if parallel.attention in ("flash-attn", "flex") else parallel.attention,
        cuda_graphs=False,
        grad_reduce_dtype="auto",
        device="cpu",
        backend="auto",
        shared_memory=True,
        distributed_timeout_minutes=10.0,
    )


def _bucket_size(real: Run, small: Run) -> int:
    """Elements of a bucket, so that a layer takes several buckets, or a bucket several layers, or all is one bucket, as
    in the real run.
    """
    size = real.parallel.bucket_size or 8_388_608
    blocks = [count / real.parallel.tp for count in parameters_per_layer(real.model).blocks]
    of_layer = max(1, round(max(parameters_per_layer(small.model).blocks, default=64) / small.parallel.tp))
    largest = max(blocks, default=1.0)
    if largest > size:
        return max(16, of_layer // 2)
    return of_layer * 3 // 2 if sum(blocks) / real.parallel.pp > size else 8_388_608


def _gathered(run: Run, real: Axes, small: Run, axes: Axes) -> int:
    """Bytes of gathered parameters, which hold as many of the largest units as in the real run."""
    assert run.parallel.zero3_gathered_bytes is not None
    largest, small_largest = largest_unit(run, real)[0], largest_unit(small, axes)[0]
    return max(1, small_largest * run.parallel.zero3_gathered_bytes // max(1, largest))


def _optimizer(optimizer: OptimizerConfig) -> OptimizerConfig:
    return replace(
        optimizer,
        precision="fp64",
        fp8="off",
        optimizer_impl="megazero",
        adam_eps=1e-3,  # what is rounded of a gradient that is nothing else would become a whole step with less
        loss_scale=None,
        clip_grad=0.0,
    )


MASTERS_APART = TierShare(Tier.HOST, 1e-9)
"""A share of the optimizer state of which nothing leaves. Master weights are a column of their own then, which with 16
bits they are, and float64 has no other reason for."""


def _offload(run: Run, numbers: dict[int, int]) -> OffloadConfig:
    offload = run.offload
    apart = run.optimizer.precision in ("bf16", "fp16") and not (offload.offload_optimizer or offload.offload_params)

    def small(share: TierShare) -> TierShare:
        words = [word for old in share.units for word in _unit(old, numbers)]
        return replace(share, units=tuple(dict.fromkeys(words))) if share.units else share

    return replace(
        offload,
        offload_optimizer=MASTERS_APART if apart else small(offload.offload_optimizer),
        offload_params=small(offload.offload_params),
        offload_gradients=small(offload.offload_gradients),
        offload_activations=small(offload.offload_activations),
        nvme_checkpoint=False,
        device_memory_budget=None,
        host_memory_budget=None,
        placement="flags",
        placement_rates=None,
    )


def _buffer_bytes(small: Run) -> int:
    """Bytes through which parts pass: the least, so that many parts take turns in few slots, as large ones do. What is
    kept of a micro-batch has to fit into them too.
    """
    return 1 << 20 if small.offload.offload_activations.in_files else least_buffer(small)


def _unit(word: str, numbers: dict[int, int]) -> list[str]:
    """The units of the small model for a word such as "blocks 0-5"."""
    share = TierShare(units=(word,))
    blocks = [f"block {new}" for old, new in numbers.items() if share.names([f"block {old}"])]
    return blocks or [plain_unit(word) if word in ("embedding", "head") else "block 0"]
