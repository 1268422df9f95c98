"""Which blocks are recomputed under a budget: the choice beside all choices, and what a stage then really holds."""

from __future__ import annotations

import shlex
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from megazero.config.derive import NONE, RECOMPUTE
from megazero.config.layers.kinds import layers
from megazero.config.parse import parse_run
from megazero.config.schema import Run
from megazero.config.source import ConfigError
from megazero.mpu.axes import Axes, axes_of
from megazero.mpu.grid import build_grid
from megazero.pipeline.stage_specs import chunks_of, stage_specs
from megazero.plan.activations import chunk_bytes, peak_bytes
from megazero.plan.flops import attention_core_flops, block_flops, recomputed_flops
from megazero.plan.recompute import (
    activation_peaks,
    activation_plan,
    chunk_groups,
    instructions_of,
    recompute_choice,
    recompute_table,
)
from megazero.plan.step_lists import StageLists
from megazero.plan.step_memory import stage_memories
from megazero.program.memory import MemoryColumn
from tests.plan.meter import metered
from tests.plan.test_activations import LLAMA, batch_of, built, gradients_taken, parsed, without_scratch

HELD = (MemoryColumn.ACTIVATIONS, MemoryColumn.WORKING, MemoryColumn.HIDDEN)
SHAPE = (
    "--device cpu --vocab-size 300 --data-path x --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--micro-batch-size 2 --train-iters 1 --attention softmax"
)
HIDDEN_STATES = 64 * 2 * 32 * 2
"""Bytes of a message between stages."""


def asked(words: str, ranks: int) -> Run:
    return parse_run(shlex.split(f"{SHAPE} {words}"), ranks)


STAGES = {
    "one stage": ("--num-layers 5 --global-batch-size 4", 1),
    "1f1b": ("--num-layers 6 --pp 2 --global-batch-size 8", 2),
    "an embedding alone": ("--num-layers 4 --partition 0 4 --pp 2 --global-batch-size 8", 2),
    "interleaved": ("--num-layers 8 --pp 2 --virtual-stages 2 --global-batch-size 8", 2),
    "zb-h1": ("--num-layers 6 --pp 2 --pipeline-schedule zb-h1 --global-batch-size 8", 2),
    "zb-v": ("--num-layers 6 --pp 2 --pipeline-schedule zb-v --virtual-stages 2 --global-batch-size 8", 2),
    "unequal layers": ("--num-layers 6 --global-batch-size 4 --layer-pattern 'ffn:96, window:8, full'", 1),
    "unequal, vertical": (
        "--num-layers 5 --global-batch-size 4 --micro-batch-order vertical --layer-pattern 'full, ffn:256 x2'",
        1,
    ),
    "unequal, interleaved": (
        "--num-layers 8 --pp 2 --virtual-stages 2 --global-batch-size 8 --layer-pattern 'ffn:96, full, window:8'",
        2,
    ),
    "unequal, zb-h1": (
        "--num-layers 8 --pp 2 --pipeline-schedule zb-h1 --global-batch-size 8 --layer-pattern 'window:8, ffn:192'",
        2,
    ),
    "gpipe in chunks": ("--num-layers 6 --pp 2 --pipeline-schedule gpipe --virtual-stages 2 --global-batch-size 8", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_no_other_choice_fits_with_less_work(name: str) -> None:
    """Every word for every block of a stage is tried, at budgets from the least to the most that it can use."""
    words, ranks = STAGES[name]
    run, axes = asked(words, ranks), Axes(pp=ranks)
    plan, specs, works = activation_plan(run, "cpu"), stage_specs(run), _works(run)
    for stage in range(ranks):
        own = [specs[number] for number in chunks_of(run).of(stage)]
        numbers = [number for spec in own for number in spec.blocks]
        instructions, groups, found = instructions_of(run, axes, stage), chunk_groups(run, axes, stage), []
        for kinds in product(RECOMPUTE, repeat=len(numbers)):
            table = ["none"] * run.model.num_layers
            for number, kind in zip(numbers, kinds, strict=True):
                table[number] = kind
            chunks = [chunk_bytes(plan, spec, tuple(table), group) for spec, group in zip(own, groups, strict=True)]
            peak = peak_bytes(instructions, chunks)
            found.append((peak, sum(works[number][kind] for number, kind in zip(numbers, kinds, strict=True))))
        peaks = sorted({peak for peak, _ in found})
        for budget in (peaks[0], peaks[len(peaks) // 3], peaks[2 * len(peaks) // 3], peaks[-1]):
            waiting = HIDDEN_STATES if ranks > 1 else 0
            most = max(budget, _least_of_others(run, axes, stage)) + waiting
            given = asked(f"{words} --activation-memory-budget {most}", ranks)
            chosen = recompute_table(given, axes, "cpu")
            work = sum(works[number][chosen[number]] for number in numbers)
            limit = given.parallel.activation_memory_budget
            assert limit is not None and activation_peaks(given, axes, "cpu")[stage] <= limit
            assert work == min(cost for peak, cost in found if peak + waiting <= limit), (stage, limit)


def _works(run: Run) -> list[dict[str, int]]:
    """By block the operations of what is computed again of it."""
    length = run.model.seq_length
    return [
        {"none": 0, "selective": attention_core_flops(layer, length), "full": block_flops(layer, length)}
        for layer in layers(run.model)
    ]


def _least_of_others(run: Run, axes: Axes, stage: int) -> int:
    """What the other stages need with everything recomputed."""
    plan, specs = activation_plan(run, "cpu"), stage_specs(run)
    full = ("full",) * run.model.num_layers
    needs = [0]
    for other in {*range(axes.pp)} - {stage}:
        chunks = [chunk_bytes(plan, specs[n], full) for n in chunks_of(run).of(other)]
        needs.append(peak_bytes(instructions_of(run, axes, other), chunks))
    return max(needs)


VERTICAL = "--micro-batch-order vertical"
STEPS = {
    "one stage": ("", 1),
    "ZeRO-3": ("--zero-stage 3", 2),
    "1f1b": ("--pp 2", 2),
    "zb-h1, ZeRO-3": ("--pp 2 --pipeline-schedule zb-h1 --zero-stage 3", 4),
    "interleaved, ZeRO-2": ("--pp 2 --virtual-stages 2 --zero-stage 2", 4),
    "zb-v": ("--pp 2 --pipeline-schedule zb-v --virtual-stages 2", 2),
    "shared inputs": ("--tp 2 --shard-recompute-inputs --zero-stage 1", 4),
    "shared inputs, ZeRO-3 in a pipeline": ("--tp 2 --pp 2 --shard-recompute-inputs --zero-stage 3", 8),
    "vertical": (VERTICAL, 1),
    "vertical, ZeRO-3, groups of 2": (f"{VERTICAL} --vertical-group-size 2 --zero-stage 3", 2),
    "vertical, chunks of one stage": (f"{VERTICAL} --virtual-stages 2 --zero-stage 3", 2),
    "vertical, 1f1b": (f"{VERTICAL} --pp 2 --zero-stage 3", 4),
    "vertical, 1f1b of groups": (f"{VERTICAL} --vertical-group-size 2 --pp 2", 2),
    "vertical, gpipe of groups": (f"{VERTICAL} --vertical-group-size 2 --pp 2 --pipeline-schedule gpipe", 2),
    "vertical, zb-h1": (f"{VERTICAL} --pp 2 --vertical-group-size 2 --pipeline-schedule zb-h1 --zero-stage 3", 4),
    "vertical, zb-v": (f"{VERTICAL} --pp 2 --vertical-group-size 2 --pipeline-schedule zb-v --virtual-stages 2", 2),
    "vertical, interleaved": (f"{VERTICAL} --pp 2 --vertical-group-size 2 --virtual-stages 2 --zero-stage 2", 4),
    "vertical, shared inputs": (f"{VERTICAL} --tp 2 --shard-recompute-inputs --zero-stage 1", 4),
    "vertical, shared inputs in a pipeline": (f"{VERTICAL} --tp 2 --pp 2 --shard-recompute-inputs --zero-stage 3", 8),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_account_of_the_whole_step_agrees(name: str) -> None:
    """The list that a rank executes, cut by unit, with gathers and reductions, as --memory-trace has it, stays within
    the budget. On some stages no message waits beside the largest computation.
    """
    words, ranks = STEPS[name]
    words = f"{words} --num-layers 6 --global-batch-size 16"
    free = asked(words.replace("--shard-recompute-inputs", ""), ranks)
    axes = axes_of(free, ranks)
    budget = max(activation_peaks(free, axes, "cpu")) * 8 // 10
    run = asked(f"{words} --activation-memory-budget {budget}", ranks)
    assert set(recompute_table(run, axes, "cpu")) != {"none"}
    planned, steps = activation_peaks(run, axes, "cpu"), StageLists(run, axes, nccl=False)
    for stage, memory in enumerate(stage_memories(steps, "cpu")):
        held = [sum(sample.columns.get(column, 0) for column in HELD) for sample in memory.trace.samples]
        waiting = HIDDEN_STATES if axes.pp > 1 else 0
        assert planned[stage] - waiting - 200 <= max(held) <= planned[stage] + 200 <= budget + 200


LARGE = {
    "one stage": ("--num-layers 126 --global-batch-size 8", 1),
    "windows": ("--num-layers 126 --global-batch-size 8 --layer-pattern 'window:8 x5, full'", 1),
    "80 layers": ("--num-layers 80 --pp 4 --virtual-stages 4 --global-batch-size 32", 4),
    "128 layers": ("--num-layers 128 --pp 16 --virtual-stages 4 --global-batch-size 64", 16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_large_model_gets_the_least_work(name: str) -> None:
    """More choices than can be tried: the bound of the search proves that none of them is better."""
    words, ranks = LARGE[name]
    axes = Axes(pp=ranks)
    most = max(activation_peaks(asked(words, ranks), axes, "cpu"))
    works = []
    for part in (4, 8):
        run = asked(f"{words} --activation-memory-budget {most * part // 10}", ranks)
        choice = recompute_choice(run, axes, "cpu")
        assert choice.missed == 0.0
        assert max(activation_peaks(run, axes, "cpu")) <= most * part // 10
        works.append(recomputed_flops(run.model, 1, choice.table))
    assert works[0] > works[1] > 0


def test_a_budget_that_nothing_fits_is_an_error_with_the_numbers() -> None:
    words = "--num-layers 4 --partition 3 1 --pp 2 --global-batch-size 8 --activation-memory-budget 100KB"
    run, stage_0 = asked(words, 2), r"budget 100,000: stage 0 needs [\d,]+ bytes .* 3 recomputed blocks;"
    with pytest.raises(ConfigError, match=stage_0) as said:
        recompute_table(run, Axes(pp=2), "cpu")
    assert "stage 1 needs" in str(said.value) and "with 1 recomputed block;" in str(said.value)
    assert "--micro-batch-size than 2" in str(said.value)


def test_without_a_budget_the_flags_fill_the_table() -> None:
    run = asked("--num-layers 5 --recompute-granularity full --recompute-num-layers 2", 1)
    assert recompute_table(run, Axes(), "cpu") == ("full", "none", "full", "none", "full")


@pytest.mark.slow
@pytest.mark.parametrize("table", [("none",) * 4, ("full", "selective", "none", "none"), ("full",) * 4])
def test_a_chunk_takes_what_is_planned(table: tuple[str, ...]) -> None:
    """A whole model as one graph, measured: what lives between forward and backward, and the most within each."""
    run = parsed("--precision fp16 --num-layers 4 --attention softmax")
    (spec,) = stage_specs(run)
    planned = chunk_bytes(activation_plan(run, "cpu"), spec, table)
    (stage,) = built(run, build_grid(Axes()), table)
    batch = batch_of(run)
    with without_scratch(), gradients_taken(stage, None):
        for _ in range(2):
            loss, forward = metered(partial(stage, None, batch))
            edge, one = get_gradient_edge(loss), torch.tensor(1.0)
            size = loss.untyped_storage().nbytes()
            del loss
            _, backward = metered(partial(torch.autograd.backward, [edge], [one]))
    kept = forward.left - size
    assert kept == planned.kept
    assert forward.peak == pytest.approx(max(planned.forward), rel=0.02)
    assert kept + backward.peak == pytest.approx(max(planned.backward), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", f"{LLAMA} --norm-placement after --query-key-norm all"])
def test_a_chunk_leaves_what_is_planned_for_its_weights(words: str) -> None:
    """A whole model after the input's half of a split backward. What two units share is there once: with norms behind
    its parts a block needs its whole input for its weights, which is the output of the block before.
    """
    run = parsed(f"--precision fp16 --num-layers 3 {words}")
    (spec,), batch = stage_specs(run), batch_of(run)
    (stage,) = built(run, build_grid(Axes()))
    late: list[Any] = []

    def both() -> None:
        torch.autograd.backward([stage(None, batch)], [torch.tensor(1.0)])

    with without_scratch():
        with gradients_taken(stage, None):
            both()
        with gradients_taken(stage, late):
            _, taken = metered(both)
    planned = chunk_bytes(activation_plan(run, "cpu"), spec, (NONE,) * 3)
    assert taken.left == planned.deferred > 0


def test_a_recomputed_block_keeps_its_input_alone() -> None:
    run = parsed("--precision fp16 --num-layers 4")
    plan, (spec,) = activation_plan(run, "cpu"), stage_specs(run)
    some, none = (chunk_bytes(plan, spec, ("none", kind, "none", "none")) for kind in ("full", "none"))
    block = plan.block(1)
    assert none.kept - some.kept == block.kept + block.input - plan.hidden_bytes > 0
    assert none.kept == sum(unit.kept + unit.input for unit in none.units)


def test_the_work_is_that_of_the_flops() -> None:
    run = asked("--num-layers 5 --activation-memory-budget 1MB --global-batch-size 2", 1)
    table = recompute_table(run, Axes(), "cpu")
    of_block = _works(run)[0]
    assert recomputed_flops(run.model, 1, table) == sum(map(of_block.__getitem__, table)) > 0
