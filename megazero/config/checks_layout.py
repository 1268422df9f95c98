"""Relations that shape and layout must satisfy.

They refuse what is mathematically impossible, and features that are not built yet, by name. They refuse no combination
of existing features.
"""

from __future__ import annotations

import math

from megazero.config.checks import CheckContext, Problems, divisors, nearest, nearest_multiples, reads
from megazero.config.derive import ffn_width, head_dim, pipeline_schedule, query_groups
from megazero.config.schema import Run

ZERO_STAGES = (0, 1, 2, 3)


@reads("hidden_size num_attention_heads num_query_groups kv_channels position_embedding")
def _heads(context: CheckContext) -> Problems:
    m = context.run.model
    if m.kv_channels is not None:
        if m.position_embedding == "rotary" and m.kv_channels % 2:
            yield (
                f"--position-embedding rotary turns pairs: --kv-channels {m.kv_channels} must be even; "
                f"nearest: {nearest_multiples(m.kv_channels, 2)}"
            )
    elif m.hidden_size % m.num_attention_heads:
        yield (
            f"--num-attention-heads {m.num_attention_heads} does not divide --hidden-size {m.hidden_size}; nearest: "
            f"--hidden-size {nearest_multiples(m.hidden_size, m.num_attention_heads)}, or --num-attention-heads "
            f"{nearest(m.num_attention_heads, divisors(m.hidden_size))}, or --kv-channels, the width of a head"
        )
    elif m.position_embedding == "rotary" and m.hidden_size // m.num_attention_heads % 2:
        width = m.hidden_size // m.num_attention_heads
        yield (
            f"--position-embedding rotary turns pairs: --hidden-size {m.hidden_size} / --num-attention-heads "
            f"{m.num_attention_heads} = {width} "
            f"must be even; nearest: --hidden-size {nearest_multiples(m.hidden_size, 2 * m.num_attention_heads)}"
        )
    if m.num_attention_heads % query_groups(m):
        yield (
            f"--num-query-groups {m.num_query_groups} does not divide --num-attention-heads {m.num_attention_heads}; "
            f"nearest: {nearest(query_groups(m), divisors(m.num_attention_heads))}"
        )


@reads("max_position_embeddings seq_length position_offset position_embedding")
def _positions(context: CheckContext) -> Problems:
    m = context.run.model
    rows = m.max_position_embeddings
    if m.position_embedding == "learned" and rows is not None and rows < m.seq_length:
        yield (
            f"--max-position-embeddings {rows} is less than --seq-length {m.seq_length}: learned positions need "
            f"{m.seq_length} or more"
        )
    if m.position_offset and m.position_embedding != "learned":
        yield (
            f"--position-offset {m.position_offset} are rows of a learned position table, which --position-embedding "
            f"{m.position_embedding} has not; nearest: --position-offset 0, or --position-embedding learned"
        )


@reads("disable_bias_linear attention_bias mlp_bias")
def _biases(context: CheckContext) -> Problems:
    m = context.run.model
    if m.disable_bias_linear and m.attention_bias is not None and m.mlp_bias is not None:
        shown = " ".join(
            f"--{'' if on else 'no-'}{name}-bias" for name, on in (("attention", m.attention_bias), ("mlp", m.mlp_bias))
        )
        yield f"--disable-bias-linear has no effect with {shown}, which set all linear layers of a block: drop it"


@reads("tp num_attention_heads num_query_groups ffn_hidden_size hidden_size activation")
def _tp_divides(context: CheckContext) -> Problems:
    m, tp = context.run.model, context.run.parallel.tp
    sizes = {
        "--num-attention-heads": m.num_attention_heads,
        "--num-query-groups": query_groups(m),
        "--ffn-hidden-size": ffn_width(m),
    }
    if m.num_query_groups is None:
        del sizes["--num-query-groups"]
    wrong = [f"{flag} {size}" for flag, size in sizes.items() if size % tp]
    if wrong:
        valid = divisors(math.gcd(*sizes.values()))
        yield (
            f"--tp {tp} does not divide {', '.join(wrong)}; tp can be {', '.join(map(str, valid))}; nearest: "
            f"{nearest(tp, valid)}"
        )


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
    chunks, flag = p.pp * p.virtual_stages, f"--partition {' '.join(map(str, p.partition))}"
    if len(p.partition) != chunks:
        yield (
            f"{flag} has {len(p.partition)} numbers, but --pp {p.pp} x --virtual-stages "
            f"{p.virtual_stages} = {chunks} chunks"
        )
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


@reads("pipeline_schedule virtual_stages")
def _schedule(context: CheckContext) -> Problems:
    p = context.run.parallel
    name = pipeline_schedule(p)
    if name == "interleaved" and p.virtual_stages < 2:
        yield (
            "--pipeline-schedule interleaved needs --virtual-stages 2 or more, not "
            f"{p.virtual_stages}; with one, it is 1f1b"
        )
    if name == "zb-v" and p.virtual_stages != 2:
        yield (
            f"--pipeline-schedule zb-v has two model chunks per rank, not --virtual-stages {p.virtual_stages}; "
            "nearest: --virtual-stages 2, or zb-h1 with one"
        )
    if name == "zb-h1" and p.virtual_stages > 1:
        yield (
            f"--pipeline-schedule zb-h1 has one model chunk per rank, not --virtual-stages {p.virtual_stages}; with "
            "2 there is zb-v"
        )
    if name == "1f1b" and p.virtual_stages > 1:
        yield (
            f"--pipeline-schedule 1f1b has one model chunk per rank, not --virtual-stages {p.virtual_stages}; "
            "with several, 1f1b is interleaved, and gpipe takes any number"
        )


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
    wrong = None if context.world_size is None else world_problem(context.run, context.world_size)
    yield from () if wrong is None else (wrong,)


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


_WITHOUT_DROPOUT = ("flash", "flash-attn", "flex")
_HEADS = {"flash-attn": (1, 256), "flex": (16, 256)}
"""Sizes of heads that a body of --attention takes, which computes on CUDA only."""
_NOT_IN = {"flash-attn": ("fp64", "fp32"), "flex": ("fp64",)}


@reads(
    "attention position_embedding document_mask attention_dropout precision hidden_size num_attention_heads kv_channels"
)
def _attention(context: CheckContext) -> Problems:
    """What the chosen --attention cannot compute on any machine. Limits of this machine are checked on its ranks."""
    m, asked, precision = context.run.model, context.run.parallel.attention, context.run.optimizer.precision
    alibi, documents = m.position_embedding == "alibi", m.document_mask
    cannot = (
        {f"--attention-dropout {m.attention_dropout:g}": m.attention_dropout > 0} if asked in _WITHOUT_DROPOUT else {}
    )
    if asked == "flash":
        cannot |= {"--position-embedding alibi": alibi, "--document-mask": documents}
    cannot |= {f"--precision {precision}": precision in _NOT_IN.get(asked, ())}
    if asked in _HEADS:
        given = m.kv_channels is not None
        size = head_dim(m) if given or m.hidden_size % m.num_attention_heads == 0 else 16
        ratio = f"--hidden-size {m.hidden_size} / --num-attention-heads {m.num_attention_heads} = {size}"
        least, most = _HEADS[asked]
        heads = f"{f'--kv-channels {size}' if given else ratio} ({least} to {most} it does)"
        cannot |= {heads: not least <= size <= most}
    if asked == "flash-attn":
        cannot |= {"--document-mask": documents}
    refused = [flag for flag, wrong in cannot.items() if wrong]
    if refused:
        first = " needs CUDA, and" * (asked in _HEADS)  # a user without a GPU need not mend the rest
        yield (
            f"--attention {asked}{first} does not compute {', '.join(refused)}; nearest: --attention auto, or "
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
    elif pipeline_schedule(p) != "1f1b":
        yield (
            "--cuda-graphs runs micro-batches one after the other, not by --pipeline-schedule "
            f"{p.pipeline_schedule}; nearest: 1f1b"
        )
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


LAYOUT_CHECKS = (
    *(_heads, _positions, _biases, _tp_divides, _sequence_parallel, _chunks, _partition, _schedule),
    *(_zero, _world, _shard_size, _backend, _cuda_graphs, _reduce_dtype, _attention),
)
