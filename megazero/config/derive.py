"""Values that follow from the configuration where a field is None."""

from __future__ import annotations

import math

from megazero.config.schema import LoraConfig, ModelConfig, OffloadConfig, ParallelConfig, Run
from megazero.config.tiers import FILE_TIERS, Tier, TierShare

GATED = ("swiglu", "geglu", "geglu-tanh")
"""Activations of a feed-forward layer with a gate."""


def ffn_width(model: ModelConfig) -> int:
    """Width of the feed-forward layer: the field, else 4h; with a gate 8h/3 rounded up to a multiple of 64."""
    if model.ffn_hidden_size is not None:
        return model.ffn_hidden_size
    if model.activation in GATED:
        # three matrices instead of two: 8h/3 keeps the number of parameters of 4h (Shazeer, arXiv 2002.05202)
        return -(-8 * model.hidden_size // (3 * 64)) * 64
    return 4 * model.hidden_size


def query_groups(model: ModelConfig) -> int:
    """Number of key-value heads: the field, else one for each query head."""
    return model.num_attention_heads if model.num_query_groups is None else model.num_query_groups


def head_dim(model: ModelConfig) -> int:
    """Width of one attention head: the field, else hidden size / heads."""
    if model.kv_channels is not None:
        return model.kv_channels
    assert model.hidden_size % model.num_attention_heads == 0, "validation checks this"
    return model.hidden_size // model.num_attention_heads


def attention_scale(model: ModelConfig) -> float:
    """Factor of the scores: the field, else one over the root of a head's width."""
    return 1 / math.sqrt(head_dim(model)) if model.attention_scale is None else model.attention_scale


def attention_bias(model: ModelConfig) -> bool:
    """Whether the linear layers of attention have biases."""
    return not model.disable_bias_linear if model.attention_bias is None else model.attention_bias


def qkv_bias(model: ModelConfig) -> bool:
    """Whether the projection to queries, keys and values has a bias."""
    return attention_bias(model) if model.qkv_bias is None else model.qkv_bias


def attention_output_bias(model: ModelConfig) -> bool:
    """Whether the projection behind attention has a bias."""
    return attention_bias(model) if model.attention_output_bias is None else model.attention_output_bias


def mlp_bias(model: ModelConfig) -> bool:
    """Whether the linear layers of the feed-forward part have biases."""
    return not model.disable_bias_linear if model.mlp_bias is None else model.mlp_bias


BUCKET, BUCKET_NCCL, BUCKET_NCCL_PER_REPLICA = 8_388_608, 40_000_000, 1_000_000


def bucket_size(parallel: ParallelConfig, replicas: int, *, nccl: bool) -> int:
    """Most elements of a bucket: the field, else by the backend. replicas: ranks that share a bucket's reduction."""
    if parallel.bucket_size is not None:
        return parallel.bucket_size
    # An all-reduce in a ring has 2 (replicas - 1) steps, each with its latency, and each rank sends a part of 1 /
    # replicas at a time. So buckets grow with the replicas, to keep these parts large. The rule is Megatron's
    # (`DistributedDataParallelConfig.bucket_size`).
    return max(BUCKET_NCCL, BUCKET_NCCL_PER_REPLICA * replicas) if nccl else BUCKET


def shard_size(run: Run, replicas: int) -> int | None:
    """Number of neighbours that share out model state, as `mpu.axes.Axes` takes it; None where that is all of them.

    replicas: number of ranks that hold the same layers. Where a size is given, the neighbours are ranks of one stage.
    """
    if run.parallel.zero_shard_size is not None:
        return run.parallel.zero_shard_size
    # of one stage with ZeRO-3, too: stages of a tied embedding gather it at different times, and would wait for ever
    return replicas if shards_parameters(run.parallel, run.offload) else None


def tiers(run: Run) -> dict[str, TierShare]:
    """What of each column of the model state leaves the device, by field."""
    return {
        "offload_optimizer": run.offload.offload_optimizer,
        "offload_params": run.offload.offload_params,
        "offload_gradients": run.offload.offload_gradients,
    }


def leaving(run: Run) -> dict[str, TierShare]:
    """The same of the model state and of the activations."""
    return {**tiers(run), "offload_activations": run.offload.offload_activations}


def names_units(offload: OffloadConfig) -> bool:
    """Whether some column of the model state leaves the device unit by unit."""
    columns = (offload.offload_optimizer, offload.offload_params, offload.offload_gradients)
    return any(column.units for column in columns)


def uses_files(run: Run) -> bool:
    """Whether some of the model state rests in files."""
    return any(offload.in_files for offload in tiers(run).values())


def writes_activations(run: Run) -> bool:
    """Whether activations go to files."""
    return run.offload.offload_activations.in_files


def keeps_account(run: Run) -> bool:
    """Whether the run, on a CPU, holds no more host memory than its tensors take by arithmetic."""
    return uses_files(run) or writes_activations(run)


def file_tiers(run: Run) -> list[Tier]:
    """The tiers in files where some of the model state rests, or to which activations go."""
    used = {offload.tier for offload in leaving(run).values()}
    return [tier for tier in FILE_TIERS if tier in used]


def folders_of(offload: OffloadConfig, tier: Tier) -> tuple[str, ...]:
    """The folders of a tier in files."""
    folders = getattr(offload, FILE_TIERS[tier].folders)
    return (folders,) if isinstance(folders, str) else tuple(folders or ())


def whole_steps(offload: OffloadConfig) -> bool:
    """Whether each optimizer step becomes whole on disks."""
    # a file may have the field where no optimizer state rests on disks
    return offload.nvme_checkpoint and offload.offload_optimizer.tier is Tier.DISK


def updates_early(parallel: ParallelConfig, offload: OffloadConfig) -> bool:
    """Whether optimizer state on disks is updated before the norm is known."""
    return parallel.early_update and offload.offload_optimizer.tier.goes_back


def micro_batch_order(run: Run) -> str:
    """The order of a step's computations. Budgets may choose otherwise before the run begins (`plan.budgets`)."""
    if run.parallel.micro_batch_order is not None:
        return run.parallel.micro_batch_order
    # vertical order reads each unit from disks once for all micro-batches of a pass
    return "vertical" if run.offload.offload_params.in_files else "horizontal"


def moves_in_parts(run: Run) -> bool:
    """Whether some of the model state moves in parts, which pass through slots in host memory."""
    offload = run.offload  # parameters in host memory are copied as they are
    return bool(offload.offload_optimizer or offload.offload_gradients) or offload.offload_params.in_files


def shards_parameters(parallel: ParallelConfig, offload: OffloadConfig) -> bool:
    """Whether parameters are sharded."""
    # parameters that do not rest on the device are brought for each use anyway: sharded wherever optimizer state is
    return parallel.zero_stage == 3 or (parallel.zero_stage > 0 and bool(offload.offload_params))


def brings_parameters(parallel: ParallelConfig, offload: OffloadConfig) -> bool:
    """Whether a unit's parameters are there for its computations alone: sharded, or not on the device."""
    return shards_parameters(parallel, offload) or bool(offload.offload_params)


def gathers_parameters(run: Run) -> bool:
    """Whether some parameters are there for each use only: brought for it, or frozen as codes."""
    return brings_parameters(run.parallel, run.offload) or run.lora.lora_base_bits is not None


def max_positions(model: ModelConfig) -> int:
    """Number of positions in a learned position table: the field, else the sequence length."""
    return model.seq_length if model.max_position_embeddings is None else model.max_position_embeddings


def position_rows(model: ModelConfig) -> int:
    """Rows of the learned position table: one for each position, and the offset before them."""
    return model.position_offset + max_positions(model)


def padded_vocab(model: ModelConfig, tp: int) -> int:
    """Rows of the embedding in memory over all tp ranks: a multiple of --make-vocab-size-divisible-by x tp."""
    assert model.vocab_size is not None, "the vocabulary is known once the tokenizer is"
    multiple = model.make_vocab_size_divisible_by * tp
    return -(-model.vocab_size // multiple) * multiple


def pipeline_schedule(parallel: ParallelConfig) -> str:
    """Name of the schedule: the field, else 1f1b, or with several model chunks per rank interleaved."""
    if parallel.pipeline_schedule is not None:
        return parallel.pipeline_schedule
    return "interleaved" if parallel.virtual_stages > 1 else "1f1b"


NONE, SELECTIVE, FULL = RECOMPUTE = ("none", "selective", "full")
"""What is computed again of one block: nothing, the attention core, or the whole block."""

RecomputeTable = tuple[str, ...]
"""A word of `RECOMPUTE` for every block of the model, by its global number."""


def recomputes_blocks(parallel: ParallelConfig) -> bool:
    """Whether blocks may be computed again as a whole."""
    return parallel.recompute_granularity == FULL or parallel.activation_memory_budget is not None


def recompute_by_flags(run: Run) -> RecomputeTable:
    """The table that the run's flags fill."""
    p = run.parallel
    return every_kth(run.model.num_layers, p.recompute_granularity, p.recompute_num_layers)


def every_kth(layers: int, kind: str, every: int = 1) -> RecomputeTable:
    """The table of `layers` blocks in which backward computes `kind` again.

    every: with "full", only blocks whose number is a multiple of it; the others keep their activations. Raises
    ValueError for an unknown kind, and for `every` below 1.
    """
    if kind not in RECOMPUTE:
        raise ValueError(f"--recompute-granularity {kind}: choose {', '.join(RECOMPUTE)}")
    if every < 1:
        raise ValueError(f"--recompute-num-layers {every} is less than 1")
    return tuple(kind if kind != FULL or number % every == 0 else NONE for number in range(layers))


BASE_BITS = (4, 8)
"""The bits of a code as which a frozen matrix can be stored."""


def lora_alpha(lora: LoraConfig) -> float:
    """--lora-alpha, else twice the rank."""
    assert lora.lora_rank is not None
    return 2.0 * lora.lora_rank if lora.lora_alpha is None else lora.lora_alpha


def lora_scale(lora: LoraConfig) -> float:
    """The factor of B A x: alpha / rank."""
    assert lora.lora_rank is not None
    return lora_alpha(lora) / lora.lora_rank


def validation_samples(run: Run) -> int:
    """Samples of one evaluation of a validation set; each evaluation uses the same ones."""
    return run.trainer.eval_iters * run.schedule.global_batch_size
