"""Relations that shape, layout and memory must satisfy: sizes that divide, what computes where, what leaves the device.

They refuse what is mathematically impossible, and features that are not built yet, by name. They refuse no combination
of existing features.
"""

from __future__ import annotations

import math
import os

from megazero.config.checks import CheckContext, Problems, divisors, nearest, nearest_multiples, reads
from megazero.config.derive import (
    ffn_width,
    folders_of,
    head_dim,
    leaving,
    moves_in_parts,
    pipeline_schedule,
    tiers,
)
from megazero.config.layers.kinds import ALIBI, ffn_widths, pattern_items, uses_positions
from megazero.config.options import run_options
from megazero.config.schema import Run
from megazero.config.tiers import ALIGNMENT, FILE_TIERS, SLOTS, TierShare, all_units, unknown_units

ZERO_STAGES = (0, 1, 2, 3)


@reads("tp num_attention_heads num_query_groups ffn_hidden_size hidden_size activation layer_pattern num_layers")
def _tp_divides(context: CheckContext) -> Problems:
    m, tp = context.run.model, context.run.parallel.tp
    named = {
        "--num-attention-heads": m.num_attention_heads,
        "--num-query-groups": m.num_query_groups,
        **{
            "--ffn-hidden-size" if width == ffn_width(m) else f"ffn:{width} of --layer-pattern": width
            for width in ffn_widths(m)
        },
    }
    sizes = {flag: size for flag, size in named.items() if size is not None}
    wrong = [f"{flag} {size}" for flag, size in sizes.items() if size % tp]
    if wrong:
        valid = divisors(math.gcd(*sizes.values()))
        listed = ", ".join(map(str, valid))
        yield f"--tp {tp} does not divide {', '.join(wrong)}; tp can be {listed}; nearest: {nearest(tp, valid)}"


@reads("tp seq_length sequence_parallel")
def _sequence_parallel(context: CheckContext) -> Problems:
    length, tp = context.run.model.seq_length, context.run.parallel.tp
    if context.run.parallel.sequence_parallel and length % tp:
        yield (
            f"--tp {tp} does not divide --seq-length {length}, which --sequence-parallel cuts in tp parts; "
            f"nearest: --seq-length {nearest_multiples(length, tp)}, or --tp {nearest(tp, divisors(length))}"
        )


@reads("num_layers pp virtual_stages")
def _chunks(context: CheckContext) -> Problems:
    layers, p = context.run.model.num_layers, context.run.parallel
    chunks = p.pp * p.virtual_stages
    if layers + 2 < chunks:
        yield (
            f"--pp {p.pp} x --virtual-stages {p.virtual_stages} = {chunks} model chunks, but --num-layers {layers}, "
            f"the embedding and the head fill {layers + 2} at most; nearest: --num-layers {chunks - 2}, or --pp "
            f"{max(1, (layers + 2) // p.virtual_stages)}"
        )


@reads("num_layers pp virtual_stages partition partition_by")
def _partition(context: CheckContext) -> Problems:
    layers, p = context.run.model.num_layers, context.run.parallel
    if p.partition is None:
        return
    stages, chunks, flag = p.pp, p.virtual_stages, f"--partition {' '.join(map(str, p.partition))}"
    if len(p.partition) != stages * chunks:
        product = f"--pp {stages} x --virtual-stages {chunks} = {stages * chunks}"
        yield f"{flag} has {len(p.partition)} numbers, but {product} chunks"
    if sum(p.partition) != layers:
        yield f"{flag} adds up to {sum(p.partition)}, but --num-layers is {layers}"
    empty = [i for i, n in enumerate(p.partition[1:-1], 1) if n == 0]
    if empty:
        yield (
            f"{flag} leaves chunk {empty[0]} empty: only the first, with the embedding, and the last, "
            "with the head, may be"
        )
    if p.partition_by != "parameters":
        yield f"--partition-by {p.partition_by} has no effect with --partition: drop one of them"


_CHUNKS = {
    "zb-v": (2, "two model chunks", "nearest: --virtual-stages 2, or zb-h1 with one"),
    "zb-h1": (1, "one model chunk", "with 2 there is zb-v"),
    "1f1b": (1, "one model chunk", "with several, 1f1b is interleaved, and gpipe takes any number"),
}
"""Schedules of one number of model chunks on a rank: the number, the number in words, and what to do with another."""


@reads("pipeline_schedule virtual_stages")
def _schedule(context: CheckContext) -> Problems:
    name, chunks = pipeline_schedule(context.run.parallel), context.run.parallel.virtual_stages
    if name == "interleaved" and chunks < 2:
        yield f"--pipeline-schedule interleaved needs --virtual-stages 2 or more, not {chunks}; with one, it is 1f1b"
    valid, in_words, hint = _CHUNKS.get(name, (chunks, "", ""))
    if chunks != valid:
        yield f"--pipeline-schedule {name} has {in_words} per rank, not --virtual-stages {chunks}; {hint}"


@reads("zero_stage")
def _zero(context: CheckContext) -> Problems:
    stage = context.run.parallel.zero_stage
    if stage not in ZERO_STAGES:
        valid = ", ".join(map(str, ZERO_STAGES))
        yield f"--zero-stage {stage} does not exist; valid: {valid}; nearest: {nearest(stage, ZERO_STAGES)}"


@reads("zero_shard_size tp pp")
def _shard_size(context: CheckContext) -> Problems:
    p, size, dp = context.run.parallel, context.run.parallel.zero_shard_size, context.dp
    if size is not None and dp is not None and dp % size:
        yield (
            f"--zero-shard-size {size} does not divide the {dp} data-parallel ranks (world size {context.world_size} / "
            f"(--tp {p.tp} x --pp {p.pp})), so that sets of {size} neighbours would not all hold the same shards; "
            f"nearest: {nearest(size, divisors(dp))}"
        )


def world_problem(run: Run, world: int) -> str | None:
    """A sentence if --tp x --pp do not divide the world size; else None."""
    p = run.parallel
    ranks = p.tp * p.pp
    if world % ranks == 0:
        return None
    stages = nearest(p.pp, divisors(world // p.tp) if world % p.tp == 0 else ())
    return (
        f"--tp {p.tp} x --pp {p.pp} = {ranks} does not divide the world size {world}; nearest world size: "
        f"{nearest_multiples(world, ranks)}"
        + (f"; with --tp {p.tp} on {world} ranks, nearest: --pp {stages}" if stages else "")
    )


@reads("tp pp")
def _world(context: CheckContext) -> Problems:
    problem = None if context.world_size is None else world_problem(context.run, context.world_size)
    if problem is not None:
        yield problem


@reads("precision grad_reduce_dtype")
def _reduce_dtype(context: CheckContext) -> Problems:
    precision, wanted = context.run.optimizer.precision, context.run.parallel.grad_reduce_dtype
    if precision == "fp64" and wanted != "auto":
        yield f"--grad-reduce-dtype {wanted} is narrower than --precision fp64; nearest: auto"


@reads("backend device")
def _backend(context: CheckContext) -> Problems:
    p = context.run.parallel
    if p.backend == "nccl" and p.device == "cpu":
        yield "--backend nccl cannot send tensors of --device cpu; nearest: --backend gloo"


_HEADS = {"flash-attn": (1, 256), "flex": (16, 256)}
"""Bodies of --attention that compute on CUDA only, and the sizes of heads that each takes."""
_NOT_IN = {"flash-attn": ("fp64", "fp32"), "flex": ("fp64",)}


@reads(
    "attention position_embedding document_mask attention_dropout attention_cap precision hidden_size "
    "num_attention_heads kv_channels seq_length num_layers layer_pattern rotary_sets ffn_hidden_size activation"
)
def _attention(context: CheckContext) -> Problems:
    """What the chosen --attention cannot compute on any machine. Limits of this machine are checked on its ranks."""
    m, body, precision = context.run.model, context.run.parallel.attention, context.run.optimizer.precision
    if m.kv_channels is not None:
        size, sized = m.kv_channels, f"--kv-channels {m.kv_channels}"
    else:
        # heads that do not divide the hidden size have a problem of their own: 16 is a size that every body takes
        size = head_dim(m) if m.hidden_size % m.num_attention_heads == 0 else 16
        sized = f"--hidden-size {m.hidden_size} / --num-attention-heads {m.num_attention_heads} = {size}"
    least, most = _HEADS.get(body, (size, size))
    # a reach of the whole sequence hides no key
    short = [item for item in pattern_items(m) if (item.window or item.chunk or m.seq_length) < m.seq_length]
    alibi = f"--position-embedding {ALIBI}" if m.position_embedding == ALIBI else f"{ALIBI} of --layer-pattern"
    wrong = {
        f"--attention-dropout {m.attention_dropout:g}": m.attention_dropout > 0 and body in ("flash", *_HEADS),
        alibi: uses_positions(m, ALIBI) and body == "flash",
        "windows of --layer-pattern": any(item.window for item in short) and body == "flash",
        "chunks of --layer-pattern": any(item.chunk for item in short) and body in ("flash", "flash-attn"),
        f"--attention-cap {m.attention_cap or 0:g}": m.attention_cap is not None and body == "flash",
        f"--precision {precision}": precision in _NOT_IN.get(body, ()),
        f"{sized} ({least} to {most} it does)": not least <= size <= most,
        "--document-mask": m.document_mask and body in ("flash", "flash-attn"),
    }
    refused = [setting for setting, is_wrong in wrong.items() if is_wrong]
    if refused:
        first = " needs CUDA, and" * (body in _HEADS)  # a user without a GPU need not mend the rest
        yield (
            f"--attention {body}{first} does not compute {', '.join(refused)}; nearest: --attention auto, or "
            "softmax, which computes everything"
        )


@reads("cuda_graphs pp tp virtual_stages pipeline_schedule micro_batch_order zero_stage device backend")
def _cuda_graphs(context: CheckContext) -> Problems:
    p = context.run.parallel
    if not p.cuda_graphs:
        return
    if p.pp > 1 or p.virtual_stages > 1:
        yield (
            "--cuda-graphs captures a micro-batch on a rank that holds the whole model in one chunk, not with --pp "
            f"{p.pp} and --virtual-stages {p.virtual_stages}; nearest: --pp 1 --virtual-stages 1"
        )
    elif (name := pipeline_schedule(p)) != "1f1b":
        yield f"--cuda-graphs runs micro-batches one after the other, not by --pipeline-schedule {name}; nearest: 1f1b"
    if p.micro_batch_order == "vertical":
        yield (
            "--cuda-graphs replays all layers of a micro-batch at once, and --micro-batch-order vertical computes a "
            "layer of every micro-batch before the next layer; nearest: --micro-batch-order horizontal"
        )
    if p.zero_stage >= 2:
        yield (
            f"--cuda-graphs needs gradients at fixed addresses, which --zero-stage {p.zero_stage} does not have; "
            "nearest: --zero-stage 1"
        )
    if p.device == "cpu":
        yield "--cuda-graphs captures CUDA kernels, and --device cpu has none"
    if p.tp > 1 and p.backend not in ("auto", "nccl"):
        yield (
            f"--cuda-graphs with --tp {p.tp} captures its collectives, which --backend {p.backend} does on the host; "
            "nearest: --backend nccl"
        )


_BYTES = {"fp64": (8, 8), "fp32": (4, 4), "bf16": (4, 2), "fp16": (4, 2)}
"""Of an element of a gradient or of a column of the optimizer's, and of a parameter, by --precision."""


def least_buffer(run: Run) -> int:
    """The bytes of --nvme-buffer-bytes that hold the smallest parts: their gradients and parameters, the optimizer
    state and sums of gradients of those that rest on disks, and the parameters that are read from there.
    """
    state, parameter = _BYTES[run.optimizer.precision]
    if run.optimizer.has_several_dtypes:
        parameter = state  # the widest
    columns = len(("weight", *run.optimizer.columns))
    on_disk = columns * state * run.offload.offload_optimizer.in_files
    read = parameter * run.offload.offload_params.in_files
    sums = state * run.offload.offload_gradients.in_files
    return SLOTS * ALIGNMENT * (state + parameter + on_disk + read + sums)


def _leaving(run: Run) -> dict[str, TierShare]:
    """Flag -> what of the column of model state, or of the activations, leaves the device."""
    return {run_options()[field].flag: offload for field, offload in leaving(run).items()}


@reads("recompute_num_layers recompute_granularity num_layers activation_memory_budget")
def _recompute(context: CheckContext) -> Problems:
    p, layers = context.run.parallel, context.run.model.num_layers
    kind, every = p.recompute_granularity, p.recompute_num_layers
    if p.activation_memory_budget is not None:
        return  # the budget chooses what is computed again: `_activation_budget` refuses these flags
    if every != 1 and kind != "full":
        yield f"--recompute-num-layers {every} needs --recompute-granularity full, not {kind}"
    elif every > layers:
        yield f"--recompute-num-layers {every}: --num-layers is {layers}, so nothing would be recomputed"


@reads("activation_memory_budget recompute_granularity recompute_num_layers")
def _activation_budget(context: CheckContext) -> Problems:
    p = context.run.parallel
    budget = p.activation_memory_budget
    if budget is None:
        return
    chooses = f"--activation-memory-budget {budget} chooses what is computed again, and"
    if p.recompute_granularity != "none" or "recompute_granularity" in context.given:
        yield f"{chooses} --recompute-granularity {p.recompute_granularity} says it: drop one of them"
    if p.recompute_num_layers != 1:
        yield f"{chooses} --recompute-num-layers {p.recompute_num_layers} says how often: drop --recompute-num-layers"


@reads("activation_memory_budget device_memory_budget")
def _device_budget(context: CheckContext) -> Problems:
    whole, part = context.run.offload.device_memory_budget, context.run.parallel.activation_memory_budget
    if whole is not None and part is not None and part > whole:
        yield (
            f"--activation-memory-budget {part} is a part of --device-memory-budget {whole}: nearest: "
            f"--activation-memory-budget {whole}"
        )


@reads("shard_recompute_inputs sequence_parallel tp")
def _shard_recompute_inputs(context: CheckContext) -> Problems:
    p = context.run.parallel
    if p.shard_recompute_inputs and p.sequence_parallel and p.tp > 1:
        yield (
            "--shard-recompute-inputs shares out what all tp ranks keep alike, and with --sequence-parallel each rank "
            f"keeps only its own 1/{p.tp} of it: drop --shard-recompute-inputs"
        )


_FOLDERS = " ".join(row.folders for row in FILE_TIERS.values())


@reads(f"offload_optimizer offload_params offload_gradients offload_activations {_FOLDERS}")
def _disks(context: CheckContext) -> Problems:
    for flag, offload in _leaving(context.run).items():
        if offload.in_files and not folders_of(context.run.offload, offload.tier):
            folders = FILE_TIERS[offload.tier]
            yield f"{flag} {offload} needs {run_options()[folders.folders].flag} DIR, {folders.asks}"


@reads("nvme_path")
def _folders(context: CheckContext) -> Problems:
    folders = context.run.offload.nvme_path
    paths = [os.path.realpath(folder) for folder in folders]
    twice = [folder for number, folder in enumerate(folders) if paths[number] in paths[:number]]
    if twice:
        yield f"--nvme-path {' '.join(folders)}: {twice[0]} is there twice; name each folder once"


@reads("offload_optimizer offload_params offload_gradients nvme_buffer_bytes precision optimizer")
def _buffer(context: CheckContext) -> Problems:
    run, least = context.run, least_buffer(context.run)
    if moves_in_parts(run) and run.offload.nvme_buffer_bytes < least:
        flags = " ".join(f"{run_options()[field].flag} {offload}" for field, offload in tiers(run).items() if offload)
        yield (
            f"--nvme-buffer-bytes {run.offload.nvme_buffer_bytes} does not hold {SLOTS} parts of {ALIGNMENT} elements, "
            f"which with {flags} are on their way at a time; nearest: --nvme-buffer-bytes {least}"
        )


@reads("offload_optimizer offload_params offload_gradients offload_activations num_layers")
def _units(context: CheckContext) -> Problems:
    layers = context.run.model.num_layers
    for flag, offload in _leaving(context.run).items():
        unknown = unknown_units(offload.units, layers)
        if unknown:
            yield (
                f"{flag} {offload}: there is no {', no '.join(unknown)}; the units of this model are "
                f"{all_units(layers)}, and a share is a number, such as {offload.tier.value}:0.5"
            )


@reads("offload_params offload_gradients offload_activations cuda_graphs")
def _graphs(context: CheckContext) -> Problems:
    off = context.run.offload
    if not context.run.parallel.cuda_graphs:
        return
    for column, flag, offload in (
        ("parameters", "--offload-params", off.offload_params),
        ("gradients", "--offload-gradients", off.offload_gradients),
    ):
        if offload:
            setting = f"{flag} {offload}"
            yield f"--cuda-graphs needs {column} at fixed addresses, which {setting} does not have: drop one of them"
    if off.offload_activations:
        yield (
            f"--offload-activations {off.offload_activations} copies between the units of a micro-batch, which "
            "--cuda-graphs launches as one graph: drop one of them"
        )


@reads("optimizer_impl offload_optimizer")
def _apex(context: CheckContext) -> Problems:
    offload = context.run.offload.offload_optimizer
    if context.run.optimizer.optimizer_impl == "apex" and offload:
        yield (
            f"--optimizer-impl apex has kernels for CUDA only, and --offload-optimizer {offload} updates in host "
            "memory; nearest: --optimizer-impl megazero"
        )


@reads("nvme_checkpoint no_save_optim offload_optimizer")
def _whole_steps(context: CheckContext) -> Problems:
    off = context.run.offload
    if off.nvme_checkpoint and off.offload_optimizer.in_files and context.run.checkpoint.no_save_optim:
        yield (
            "--nvme-checkpoint removes its files once the last step is in a checkpoint of --save, which with "
            "--no-save-optim has no optimizer state to go on from: drop one of them"
        )


@reads("late_update early_update")
def _one_time_of_updates(context: CheckContext) -> Problems:
    if context.run.parallel.late_update and context.run.parallel.early_update:
        yield (
            "--early-update updates a unit before the step's norm is known, and --late-update behind the end of the "
            "step: drop one of them"
        )


LAYOUT_CHECKS = (
    *(_tp_divides, _sequence_parallel, _chunks, _partition, _schedule),
    *(_zero, _world, _shard_size, _backend, _cuda_graphs, _reduce_dtype, _attention),
    *(_recompute, _activation_budget, _device_budget, _shard_recompute_inputs),
    *(_disks, _folders, _buffer, _units, _graphs, _apex, _whole_steps, _one_time_of_updates),
)
