"""The small form of a run keeps its structure."""

from __future__ import annotations

import pytest

from megazero.config.checks_layout import least_buffer
from megazero.config.inventory import parameters_per_layer
from megazero.config.layers.kinds import kinds, pattern_items
from megazero.config.parse import parse_run
from megazero.config.schema import Run
from megazero.config.tiers import Tier
from megazero.config.validate import problems_of
from megazero.mpu.axes import axes_of
from megazero.pipeline.stage_specs import chunk_layers
from megazero.plan.traffic import largest_unit
from megazero.verify.shrink import shrunk
from megazero.zero.parts import parts_of
from megazero.zero.sharding import Column, run_columns

BLOOM = "--preset bloom-176b --tp 4 --pp 12 --zero-stage 1"


def words_of(flags: str) -> list[str]:
    """The words of a command line; _ stands for a blank in one."""
    return [word.replace("_", " ") for word in flags.split()]


def small_of(flags: str, world: int) -> Run:
    """The small run, which is a legal one."""
    made = shrunk(parse_run(words_of(flags), world), world)
    assert not problems_of(made.run, made.axes.world_size, own_data=True), flags
    assert made.axes.tp == made.real.tp and made.axes.pp == made.real.pp
    return made.run


def test_bloom() -> None:
    run = small_of(BLOOM, 384)
    heads, model = run.model.num_attention_heads, run.model
    assert heads % 4 == 0 and heads & (heads - 1), "no power of two, as 112: its slopes come from two sequences"
    assert chunk_layers(run) == (1, *[2] * 10, 1), "70 layers on 12 stages leave less for the first and the last"
    assert not model.untie_embeddings_and_output_weights and model.embedding_layernorm
    assert shrunk(parse_run(BLOOM.split(), 384), 384).axes.dp == 2
    assert run.schedule.global_batch_size // (2 * 2) > 12, "more micro-batches than stages"


@pytest.mark.parametrize(
    ("vocabulary", "multiple", "padded"), [(50_257, 128, True), (50_432, 128, False), (1000, 1, False), (1001, 1, True)]
)
def test_padding_of_the_vocabulary(vocabulary: int, multiple: int, padded: bool) -> None:
    flags = f"--vocab-size {vocabulary} --make-vocab-size-divisible-by {multiple} --tp 2"
    model = small_of(flags, 2).model
    assert model.vocab_size is not None and model.vocab_size < 500
    assert (model.vocab_size % (2 * model.make_vocab_size_divisible_by) > 0) is padded


@pytest.mark.parametrize(("vocabulary", "larger"), [(1000, False), (50_000, True)])
def test_an_embedding_that_is_larger_than_a_block_stays_so(vocabulary: int, larger: bool) -> None:
    """Its gather starts earlier than those of blocks."""
    flags = f"--vocab-size {vocabulary} --tp 2"
    for run in (parse_run(flags.split(), 2), small_of(flags, 2)):
        sizes = parameters_per_layer(run.model)
        assert (sizes.embedding > max(sizes.blocks)) is larger


@pytest.mark.parametrize(
    ("flags", "few"),
    [("--offload-optimizer nvme --offload-params nvme", True), ("--offload-activations nvme", False)],
)
def test_parts_take_turns_in_few_slots(flags: str, few: bool) -> None:
    run = small_of(f"{flags} --nvme-path disk --vocab-size 1000 --zero-stage 1", 2)
    assert (run.offload.nvme_buffer_bytes == least_buffer(run)) is few


@pytest.mark.parametrize(("data", "packed"), [("--data-path words", False), ("--instruction-data talks.jsonl", True)])
def test_conversations_are_packed(data: str, packed: bool) -> None:
    words = [*data.split(), "--vocab-size", "1000", *["--tokenizer", "byte"] * packed]
    made = shrunk(parse_run(words, 2), 2)
    assert made.packed is packed is made.run.model.document_mask


@pytest.mark.parametrize(
    ("flags", "world", "replicas", "shard"),
    [
        ("", 1, 1, None),
        ("", 2, 2, None),
        ("--zero-stage 1", 96, 3, None),
        ("--zero-stage 1 --tp 8 --num-attention-heads 8 --hidden-size 64 --pp 4", 1024, 2, None),
        ("--zero-stage 2 --zero-shard-size 8", 64, 4, 2),
        ("--zero-stage 2 --zero-shard-size 1", 64, 2, 1),
        ("--zero-stage 2 --zero-shard-size 64", 64, 3, 3),
    ],
)
def test_replicas_and_shards(flags: str, world: int, replicas: int, shard: int | None) -> None:
    made = shrunk(parse_run([*flags.split(), "--vocab-size", "1000", "--global-batch-size", "3072"], world), world)
    assert (made.axes.dp, made.axes.shard_size) == (replicas, shard)


def test_every_kind_of_layer_stays_on_its_stage() -> None:
    pattern = "window:1024 local x5, full, chunk:8192 none ffn:512"
    words = ["--layer-pattern", pattern, "--rotary-sets", "local base=50", "--position-embedding", "rotary"]
    words += "--num-layers 28 --pp 2 --seq-length 4096 --vocab-size 1000 --hidden-size 96 --ffn-hidden-size 256".split()
    real, small = parse_run(words, 2), shrunk(parse_run(words, 2), 2).run
    assert len(kinds(small.model)) == len(kinds(real.model)) == 3
    half = chunk_layers(small)[0]
    items = pattern_items(small.model)
    assert len({*items[:half]}) == len({*items[half:]}) == 3
    windows = {item.window for item in items if item.window}
    chunks = {item.chunk for item in items if item.chunk}
    length = small.model.seq_length
    assert all(window < length for window in windows) and all(chunk > length for chunk in chunks)


@pytest.mark.parametrize(
    "flags",
    [
        "--pp 4 --virtual-stages 2 --num-layers 30 --global-batch-size 96 --micro-batch-size 1",
        "--pp 3 --pipeline-schedule zb-v --virtual-stages 2 --num-layers 20 --micro-batch-order vertical",
        "--tp 4 --sequence-parallel --recompute-granularity full --recompute-num-layers 3 --hidden-dropout 0.1",
        "--kv-channels 64 --hidden-size 256 --num-attention-heads 8 --num-query-groups 2 --position-embedding rotary",
        "--position-embedding rotary --rotary-share 0.25 --hidden-size 512 --num-attention-heads 8",
        "--position-embedding learned --max-position-embeddings 500 --position-offset 2",
        "--offload-optimizer cpu:0.4 --offload-params cpu --offload-gradients cpu --zero-stage 2",
        "--offload-optimizer cpu:embedding,blocks_3-7 --late-update",
        "--optimizer sgd --ema-decay 0.9 --save runs/x --async-save",
        "--lr-decay-style wsd --lr-warmup-samples 100 --lr-wsd-decay-samples 200 --train-samples 2400",
        "--activation-memory-budget 4GB --fp8 --bf16",
    ],
)
def test_small_forms_are_legal(flags: str) -> None:
    run = parse_run([*words_of(flags), "--vocab-size", "1000"], 24)
    small = small_of(f"{flags} --vocab-size 1000", 24)
    for name in ("pipeline_schedule", "virtual_stages", "zero_stage", "micro_batch_order", "late_update", "overlap"):
        assert getattr(small.parallel, name) == getattr(run.parallel, name), name
    assert small.model.hidden_size <= 128 and small.model.num_layers <= 24


@pytest.mark.parametrize(
    ("flags", "apart"), [("--bf16", True), ("--precision fp32", False), ("--bf16 --offload-params cpu", True)]
)
def test_master_weights_are_apart_where_they_are_in_the_run(flags: str, apart: bool) -> None:
    run = small_of(f"{flags} --vocab-size 1000 --zero-stage 1", 2)
    assert (Column.MASTER in run_columns(run.optimizer, run.parallel, run.offload)) is apart
    ranges = [(0, 4096), (4096, 5000)]
    parts = parts_of(ranges, run.offload.offload_optimizer, 512, [frozenset(("embedding",))] * 2, [Tier.DEVICE] * 2)
    assert parts == [(), ()], "all of the optimizer state stays"


@pytest.mark.parametrize("units", [1, 3])
def test_as_many_units_are_gathered(units: int) -> None:
    flags = "--zero-stage 3 --vocab-size 1000 --bf16"
    real = parse_run(flags.split(), 4)
    budget = units * largest_unit(real, axes_of(real, 4))[0]
    made = shrunk(parse_run([*flags.split(), "--zero3-gathered-bytes", str(budget)], 4), 4)
    assert made.run.parallel.zero3_gathered_bytes == units * largest_unit(made.run, made.axes)[0]


def test_what_has_no_small_form_is_said() -> None:
    words = "--fp8 --bf16 --compile --zero-quantized-weights --zero-stage 1 --vocab-size 1000".split()
    notes = shrunk(parse_run(words, 2), 2).notes
    assert [note.partition(":")[0] for note in notes] == [
        "--precision bf16",
        "--fp8",
        "--zero-quantized-weights",
        "--compile",
        "--exit-duration-in-mins",
    ]
