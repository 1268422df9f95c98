"""Packing, as arithmetic."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from megazero.config.schema import ModelConfig, OffloadConfig, ParallelConfig
from megazero.model.layout import ModelLayout
from megazero.model.stage import Stage, whole_model
from megazero.mpu.axes import Axes
from megazero.mpu.grid import Group, build_grid, single_rank_group
from megazero.mpu.parameter import ParameterKind, ParameterSpec, StateGroup, shard, spec_of
from megazero.zero.layout import UNSHARED, Packing, owned_fragments, pack
from megazero.zero.sharding import shardings
from tests.parameters import held_fragments
from tests.ranks import run_ranks
from tests.stages import STAGES
from tests.zero.toy import Case, build, build_chunks


def matrix(name: str, rows: int, columns: int) -> ParameterSpec:
    return shard(name, (rows, columns), ParameterKind.MATRIX)


def bias(name: str, n: int) -> ParameterSpec:
    return shard(name, (n,), ParameterKind.BIAS)


def shared_by(replicas: int) -> dict[StateGroup, int]:
    """Sizes of the groups with two stages."""
    return {StateGroup.REPLICAS: replicas, StateGroup.TIED: 2 * replicas}


def specs_of(case: Case, pp_index: int, tp_index: int) -> list[list[list[ParameterSpec]]]:
    tp = Group(tuple(range(case.axes.tp)), tp_index, None)
    chunks = build_chunks(case, pp_index, tp)
    return [[[spec_of(p) for p in unit.parameters()] for unit in chunk.units()] for chunk in chunks]


def test_decayed_parameters_come_first_and_nothing_lies_between() -> None:
    (bucket,) = pack(
        [[[bias("n", 3), matrix("a", 2, 5), bias("a.b", 2), matrix("b", 1, 7)]]], shared_by(4), Packing(1000)
    )
    assert [(e.spec.name, e.offset) for e in bucket.entries] == [("a", 0), ("b", 10), ("n", 17), ("a.b", 20)]
    assert (bucket.decayed, bucket.used, bucket.numel) == (17, 22, 24)
    assert [bucket.shard(i, 4) for i in range(4)] == [(0, 6), (6, 12), (12, 18), (18, 24)]
    assert [bucket.owned((i, 2), (a, 2)) for i in range(2) for a in range(2)] == [bucket.shard(i, 4) for i in range(4)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 24])
def test_shards_of_all_but_small_buckets_begin_at_multiples_of_eight(size: int) -> None:
    for rows in (1, 500, 513, 20_011):
        (bucket,) = pack([[[matrix("a", rows, 3)]]], shared_by(size), Packing(1_000_000))
        starts = {bucket.shard(i, size)[0] % 8 for i in range(size)}
        padding = bucket.numel - bucket.used
        assert padding < (8 * size if bucket.used >= 512 * size else size) and 64 * padding <= bucket.used + 64 * size
        assert starts == {0} or bucket.used < 512 * size


def test_a_bucket_closes_before_it_overflows_and_at_the_end_of_a_chunk() -> None:
    units = [[matrix("a", 4, 4)], [matrix("b", 4, 4)], [matrix("c", 4, 3)]]
    buckets = pack([units, [[matrix("d", 2, 2)]]], UNSHARED, Packing(32))
    assert [[e.spec.name for e in b.entries] for b in buckets] == [["a", "b"], ["c"], ["d"]]
    assert [b.chunk for b in buckets] == [0, 0, 1]
    assert [[e.spec.name for e in b.entries] for b in pack([units], UNSHARED, Packing(1))] == [["a"], ["b"], ["c"]]


def test_gate_and_up_stay_side_by_side_even_with_biases() -> None:
    unit = [matrix("gate", 8, 4), bias("gate.b", 8), matrix("up", 8, 4), bias("up.b", 8), matrix("down", 4, 8)]
    first, second = pack([[unit]], UNSHARED, Packing(40))
    assert [e.spec.name for e in first.entries] == ["gate", "up", "gate.b", "up.b"]
    assert first.entries[1].offset == 32
    assert [e.spec.name for e in second.entries] == ["down"]


def test_a_name_that_comes_again_is_one_parameter() -> None:
    buckets = pack(
        [[[matrix("word", 3, 3)]], [[matrix("block", 2, 2)], [matrix("word", 3, 3)]]], shared_by(2), Packing(1000)
    )
    assert [[e.spec.name for e in b.entries] for b in buckets] == [["word"], ["block"]]


def test_the_tied_embedding_has_a_bucket_of_its_own() -> None:
    case = Case(Axes(pp=2, dp=3), bucket_size=10_000)
    for pp_index in range(2):
        buckets = pack(specs_of(case, pp_index, 0), shared_by(3), Packing(10_000))
        (tied,) = [b for b in buckets if b.group is StateGroup.TIED]
        assert [e.spec.name for e in tied.entries] == ["embedding.word.weight"]
        assert tied.numel % 6 == 0


def test_a_bucket_holds_parameters_of_one_group() -> None:
    """Neighbours of one group share a bucket, of their group's size; a group in between parts those around it."""
    tied = [
        replace(spec, state_group=StateGroup.TIED) for spec in (matrix("b", 5, 3), bias("b.b", 3), matrix("c", 2, 3))
    ]
    (before, between, after) = pack([[[matrix("a", 3, 3)], tied, [bias("d", 3)]]], shared_by(5), Packing(1000))
    assert [[e.spec.name for e in b.entries] for b in (before, between, after)] == [["a"], ["b", "c", "b.b"], ["d"]]
    assert [b.group for b in (before, between, after)] == [*StateGroup, StateGroup.REPLICAS]
    assert (before.numel, between.numel, after.numel) == (10, 30, 5)  # 9 shared by 5, 24 shared by 10, 3 shared by 5


def test_small_parameters_stay_whole_in_however_many_buckets() -> None:
    tied = shard("tied", (4, 1), ParameterKind.EMBEDDING, state_group=StateGroup.TIED)
    units = [[tied], *([matrix(name, 9, 3), bias(f"{name}.n", 9), bias(f"{name}.m", 9)] for name in "abc")]
    buckets = pack([units], shared_by(2), Packing(40, by_unit=True, keep_below=27))
    whole = [[entry.spec.name for entry in bucket.entries] for bucket in buckets if bucket.kept_whole]
    assert whole == [["tied"], ["a.n", "a.m", "b.n", "b.m"], ["c.n", "c.m"]]
    sharded = [entry.spec.name for bucket in buckets if not bucket.kept_whole for entry in bucket.entries]
    assert sharded == ["a", "b", "c"]


def test_padding_is_in_no_piece() -> None:
    word = shard("word", (11, 3), ParameterKind.EMBEDDING, dim=0, rank=1, size=2, padded=16)
    (bucket,) = pack([[[word, bias("b", 2)]]], UNSHARED, Packing(1000))
    assert [(p.spec.name, p.start, p.stop, p.offset) for p in bucket.fragments(0, bucket.numel)] == [
        ("word", 0, 9, 0),
        ("b", 0, 2, 24),
    ]
    assert [(p.start, p.stop, p.offset) for p in bucket.fragments(5, 12)] == [(5, 9, 5)]


@pytest.mark.parametrize(
    "axes",
    [
        *(Axes(), Axes(dp=4), Axes(pp=2, dp=2, tp=2), Axes(pp=3, dp=3), Axes(pp=2, tp=3)),
        Axes(pp=2, dp=2, tp=2, shard_size=1),
        *(Axes(dp=4, shard_size=size) for size in (1, 2)),
        *(Axes(pp=3, dp=3, cp=2, shard_size=size) for size in (1, 2, 3, 6)),
    ],
    ids=str,
)
def test_every_element_is_owned_once(axes: Axes) -> None:
    """Over all ranks; replicas over tp once per tp rank, the tied embedding once although two stages hold it."""
    case = Case(axes, virtual_stages=2)
    owned: dict[tuple[str, object, int], list[tuple[int, int]]] = {}
    for rank in range(axes.world_size):
        at = axes.coordinates(rank)
        for _, piece in owned_fragments(specs_of(case, at.pp, at.tp), axes, at, Packing(50)):
            replica = -1 if piece.spec.tp_sharded else at.tp
            owned.setdefault((piece.spec.name, piece.spec.box, replica), []).append((piece.start, piece.stop))
    names = {spec.name for unit in specs_of(Case(), 0, 0)[0] for spec in unit}
    assert {name for name, _, _ in owned} == names
    for (name, box, _), ranges in owned.items():
        ranges.sort()
        numel = 1
        for start, stop in box:  # type: ignore[attr-defined]
            numel *= stop - start
        assert ranges[0][0] == 0 and ranges[-1][1] == numel and all(a[1] == b[0] for a, b in pairwise(ranges)), name


def _fragments(rank: int, cases: list[Case]) -> list[list[tuple[str, int, int]]]:
    grid = build_grid(cases[0].axes)
    return [[(f.spec.name, f.start, f.stop) for f in held_fragments(build(case, grid).optimizer)] for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("axes", [Axes(pp=2, dp=2, tp=2), Axes(pp=2, dp=4, shard_size=2)], ids=str)
def test_owned_fragments_are_the_fragments_of_the_rank(axes: Axes) -> None:
    """What rank 0 writes into a manifest about others is what they hold, at every ZeRO stage."""
    for rank, stages in enumerate(run_ranks(8, _fragments, [Case(axes, stage, bucket_size=50) for stage in STAGES])):
        at = axes.coordinates(rank)
        specs = specs_of(Case(axes), at.pp, at.tp)
        for stage, found in zip(STAGES, stages, strict=True):
            pieces = owned_fragments(specs, axes, at, Packing(50, by_unit=stage == 3))
            assert found == [(piece.spec.name, piece.start, piece.stop) for _, piece in pieces], stage


def test_fault_21_norms_and_biases_are_not_decayed() -> None:
    """BLOOM: the embedding's LayerNorm decayed. Ranges of decay cover the matrices and embeddings, nothing else."""
    here = build(Case(bucket_size=50))
    decayed, others = set[str](), set[str]()
    for i, bucket in enumerate(here.state.buckets):
        for start, stop, decay, _ in here.optimizer._decay_ranges(i, None):
            names = {piece.spec.name for piece in bucket.layout.fragments(start, stop)}
            (decayed if decay else others).update(names)
    assert not decayed & others
    assert decayed == {"embedding.word.weight", "embedding.position.weight"} | {
        f"blocks.{i}.{m}.weight" for i in range(4) for m in ("up", "down")
    }
    assert others == {f"blocks.{i}.{p}" for i in range(4) for p in ("norm.weight", "up.bias", "down.bias")}


def test_fault_21_decayed_parameters_of_gpt_and_bloom() -> None:
    """The asserted list, of the real model: GPT-2 with learned positions and BLOOM with its embedding's LayerNorm."""
    common = {f"blocks.0.{m}.weight" for m in ("attention.qkv", "attention.output", "mlp.up", "mlp.down")} | {
        "embedding.word.weight"
    }
    plain = {f"blocks.0.{m}.bias" for m in ("attention.qkv", "attention.output", "mlp.up", "mlp.down")}
    plain |= {
        f"{n}.{p}" for n in ("blocks.0.attention_norm", "blocks.0.mlp_norm", "head.norm") for p in ("weight", "bias")
    }
    small = ModelConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=11, seq_length=5, make_vocab_size_divisible_by=4
    )
    gpt = replace(small, position_embedding="learned")
    bloom = replace(small, position_embedding="alibi", embedding_layernorm=True)
    for model, more, fewer in (
        (gpt, {"embedding.position.weight"}, set()),
        (bloom, set(), {"embedding.norm.weight", "embedding.norm.bias"}),
    ):
        stage = Stage(
            ModelLayout(model, single_rank_group(), torch.float32, device=torch.device("meta")), whole_model(model)
        )
        specs = [[[spec_of(p) for p in unit.parameters()] for unit in stage.units()]]
        found: tuple[set[str], set[str]] = set(), set()
        for bucket in pack(specs, UNSHARED, Packing(100)):
            for entry in bucket.entries:
                found[entry.offset >= bucket.decayed].add(entry.spec.name)
        assert found == (common | more, plain | fewer)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_tp_ranks_pack_the_real_model_alike(tp: int) -> None:
    """Their shards then hold the same elements of replicated parameters, so that partial sums meet their like."""
    shape: dict[str, Any] = {"hidden_size": 24, "ffn_hidden_size": 48, "num_attention_heads": 12, "vocab_size": 1003}
    model = ModelConfig(num_layers=2, seq_length=12, activation="swiglu", norm="rmsnorm", **shape)
    layouts = []
    for index in range(tp):
        group = Group(tuple(range(tp)), index, None)
        stage = Stage(
            ModelLayout(model, group, torch.float32, device=torch.device("meta"), sequence_parallel=True),
            whole_model(model),
        )
        specs = [[[spec_of(p) for p in unit.parameters()] for unit in stage.units()]]
        packed = pack(specs, shared_by(4), Packing(2000))
        layouts.append([[(e.spec.name, e.offset, e.spec.tp_partial) for e in bucket.entries] for bucket in packed])
    assert all(layout == layouts[0] for layout in layouts)
    assert any(partial for bucket in layouts[0] for _, _, partial in bucket)
    beside = [[name for name, _, _ in bucket] for bucket in layouts[0]]
    for i in range(2):
        (bucket,) = [names for names in beside if f"blocks.{i}.mlp.gate.weight" in names]
        assert abs(bucket.index(f"blocks.{i}.mlp.gate.weight") - bucket.index(f"blocks.{i}.mlp.up.weight")) == 1


def test_an_unknown_stage_is_named() -> None:
    with pytest.raises(ValueError, match="--zero-stage 7 is not one of 0, 1, 2"):
        shardings(ParallelConfig(zero_stage=7), OffloadConfig())
