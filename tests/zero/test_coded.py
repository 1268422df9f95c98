"""Buckets of codes: what each rank stores, what is decoded and freed, and what the plan says of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_ops.blocks import block_elements
from fused_ops.coded import CodedBox, decode, encode, pack
from megazero.config.parse import parse_run
from megazero.config.schema import Run
from megazero.config.source import ConfigSource
from megazero.mpu.axes import axes_of
from megazero.mpu.parameter import ParameterSpec
from megazero.pipeline.build import build_stages, schedules, step_options
from megazero.plan.rank_state import RankState, stage_bytes
from megazero.program.passes.gathers import one_unit, two_units
from megazero.program.step import gathered_budget, training_step
from megazero.zero.coded import CodedParameters, coding_of
from megazero.zero.state import ModelState
from tests.plan.meter import metered
from tests.zero.test_construction import grid_of

SHAPE = (
    "--num-layers 3 --hidden-size 48 --num-attention-heads 6 --num-query-groups 3 --seq-length 16 --vocab-size 300 "
    "--device cpu --global-batch-size 8 --init-from x --lora-rank 2 --data-path y --vocab-size 300"
)


def run_of(words: str, ranks: int = 1) -> Run:
    return parse_run([*SHAPE.split(), *words.split()], ranks, lambda path: ConfigSource(path, unread=True))


def read(spec: ParameterSpec) -> Tensor:
    """The global values of a parameter, by its name."""
    generator = torch.Generator().manual_seed(sum(map(ord, spec.name)))
    return torch.randn(spec.shape, generator=generator)


def state_of(run: Run, rank: int = 0, size: int = 1) -> ModelState:
    grid = grid_of(rank, size, axes_of(run, size))
    coding = coding_of(run.lora, run.model)
    state = ModelState(build_stages(run, grid, allocate=False), grid, run.optimizer, run.parallel, coding)
    state.frozen.fill(read)
    return state


def rounded(values: Tensor, bits: int) -> Tensor:
    box = CodedBox.of(tuple(values.shape), tuple((0, n) for n in values.shape), bits)
    packed = torch.empty(box.nbytes, dtype=torch.uint8)
    pack(encode(values, bits), box, packed)
    return decode(packed, box, torch.empty(box.runs, box.length)).view(values.shape)


def by_heads(whole: Tensor, run: Run) -> dict[str, list[int]]:
    """The rows of query, key and value in a matrix of groups: each has its queries, a key and a value."""
    size, groups = 8, 3
    rows = dict[str, list[int]](query=[], key=[], value=[])
    for row in range(whole.shape[0]):
        within = row % (4 * size) // size  # two queries, a key and a value a group
        rows["query" if within < 2 else "key" if within == 2 else "value"].append(row)
    assert len(rows["key"]) == groups * size
    return rows


@pytest.mark.parametrize("qkv", ["one", "three"])
@pytest.mark.parametrize("bits", [4, 8])
def test_parameters_are_the_decoded_ones_while_they_are_read(bits: int, qkv: str) -> None:
    run = run_of(f"--precision fp32 --lora-base-bits {bits} --lora-base-qkv {qkv}")
    state = state_of(run)
    coded = [at for at in state.gatherer.parameters if isinstance(at, CodedParameters)]
    assert len(coded) == 3 and all(at.whole.untyped_storage().nbytes() == 0 for at in coded)
    matrices = 0
    with state.reading():
        for name, parameter in state.frozen.by_name.items():
            spec = parameter.spec
            expected = read(spec)
            if name.startswith("blocks.") and name.endswith("weight") and "norm" not in name:
                matrices += 1
                if qkv == "three" and "qkv" in name:
                    for rows in by_heads(expected, run).values():
                        expected[rows] = rounded(expected[rows], bits)
                else:
                    expected = rounded(expected, bits)
                assert not torch.equal(expected, read(spec))
            assert torch.equal(parameter.detach()[: spec.shape[0]], expected), name
    assert matrices == 3 * 4 and all(at.whole.untyped_storage().nbytes() == 0 for at in coded)


@pytest.mark.parametrize("words", ["--lora-base-bits 4 --lora-base-qkv three", "--lora-base-bits 8"])
def test_ranks_share_out_the_bytes_of_one(words: str) -> None:
    whole = state_of(run_of(words)).frozen.codes
    parts = [state_of(run_of(f"{words} --zero-stage 3", 4), rank, 4).frozen.codes for rank in range(4)]
    for index in range(3):
        together = torch.cat([part.held(index) for part in parts])
        assert len(together) % 64 == 0 and len(together) - len(whole.held(index)) < 64
        assert torch.equal(together[: len(whole.held(index))], whole.held(index))


@pytest.mark.parametrize(
    "words", ["--lora-base-bits 4", "--lora-base-bits 8", "--lora-base-bits 4 --lora-base-qkv three"]
)
@pytest.mark.parametrize(("zero", "size"), [(0, 1), (2, 4), (3, 4)])
def test_bytes_and_shape_are_those_of_the_plan(zero: int, size: int, words: str) -> None:
    run = run_of(f"{words} --zero-stage {zero} --precision bf16", size)
    state, axes = state_of(run, 1 % size, size), axes_of(run, size)
    (told,) = stage_bytes(run, axes)
    assert sum(state.bytes().values()) == told.total
    assert state.shape == RankState(run, axes, state.grid.at, nccl=False).shape
    resting = sum(bucket.stored_bytes for bucket in state.shape.buckets)
    assert resting == told.weights
    shares = {bucket.shards for bucket in state.shape.buckets if bucket.code_bytes is not None}
    assert shares == {size if zero == 3 else 1}
    # Of 48 x 96, 48 x 48 and twice 48 x 192 elements a block.
    matrices = 3 * (48 * 96 + 48 * 48 + 2 * 48 * 192)
    held = state.frozen.codes.nbytes * (size if zero == 3 else 1)
    each = 1 + 4 / 256 if "8" in words.split()[1] else 0.5 + 1 / 64
    assert matrices * each <= held <= matrices * each + 3 * (4 * 64 + 6 * 2 * 32)


def test_without_messages_the_budget_is_one_unit() -> None:
    for size, zero, budget in ((1, 3, one_unit), (4, 1, one_unit), (4, 3, two_units)):
        run = run_of(f"--lora-base-bits 4 --zero-stage {zero}", size)
        shape = RankState(run, axes_of(run, size), state_of(run, 0, size).grid.at, nccl=False).shape
        options = step_options(run)
        listed = training_step(schedules(run, 0)(2), shape, options)
        assert gathered_budget(listed, shape, options) == budget(listed, shape)
    assert one_unit(listed, shape) < two_units(listed, shape)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_filling_takes_the_codes_and_a_few_copies_of_a_matrix(zero: int) -> None:
    large = "--hidden-size 256 --num-attention-heads 4 --num-query-groups 4 --num-layers 24"
    run = run_of(f"--lora-base-bits 4 --precision bf16 --zero-stage {zero} {large}", 4)
    state, taken = metered(lambda: state_of(run, 1, 4))
    held = sum(state.bytes().values())
    constant, matrix = 40 * block_elements(torch.device("cpu")), 4 * 256 * 1024
    row = max(bucket.layout.numel for bucket in state.frozen.codes._buckets)
    assert held <= taken.left <= held + constant
    assert taken.peak <= held + row + 2.5 * matrix + constant
    assert sum(bucket.parameter_bytes for bucket in state.shape.buckets) > 3 * (row + 2.5 * matrix + constant)
