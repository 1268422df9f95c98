"""Gradients that wait for the second part of a split backward: the same bits later, and nothing held
that need not be.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from megazero.config.parse import parse_run
from megazero.config.schema import Run
from megazero.model.batch import MicroBatch
from megazero.model.stage import Stage
from megazero.mpu.grid import single_process_grid
from megazero.mpu.parameter import ParameterKind
from megazero.pipeline.build import build_stages
from megazero.train.resume import probe_batches
from megazero.zero.portions import initialise_state
from megazero.zero.sharding import Column
from megazero.zero.state import ModelState
from tests.stages import STAGES

FLAGS = (
    "--num-layers 2 --hidden-size 24 --num-attention-heads 4 --seq-length 12 --vocab-size 101 "
    "--make-vocab-size-divisible-by 1"
)
TIED = "--position-embedding alibi --embedding-layernorm --hidden-dropout 0.1"
UNTIED = (
    "--untie-embeddings-and-output-weights --position-embedding rotary --norm rmsnorm --activation swiglu "
    "--num-query-groups 2"
)


def build(precision: str, zero_stage: int, tied: bool) -> tuple[Run, Stage, ModelState]:
    words = [*FLAGS.split(), "--precision", precision, "--zero-stage", str(zero_stage), "--bucket-size", "4000"]
    run = parse_run([*words, *(TIED if tied else UNTIED).split()], 1)
    grid = single_process_grid()
    stages = build_stages(run, grid)
    state = ModelState(stages, grid, run.optimizer, run.parallel)
    initialise_state(state, 1)
    return run, stages[0], state


def backward(stage: Stage, state: ModelState, batch: MicroBatch, defer: int | None) -> None:
    loss = stage(None, batch)
    state.reducer.before_backward(None if defer is None else (defer, 0, 0))
    loss.backward()
    state.reducer.after_backward()


def gradients(state: ModelState) -> list[torch.Tensor]:
    for index in reversed(range(len(state.buckets))):
        state.reducer.reduce(index)
    state.reducer.complete()
    column = state.columns[Column.GRADIENT]
    return [column.view(i, 0, bucket.layout.used).clone() for i, bucket in enumerate(state.buckets)]


@pytest.mark.few(cases=4)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("zero_stage", STAGES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_same_bits_whenever_they_are_made(precision: str, zero_stage: int, tied: bool) -> None:
    """Three micro-batches at once, and with the second part one or two behind; twice, as the sums start anew."""
    found = []
    for behind in (None, 1, 3):
        run, stage, state = build(precision, zero_stage, tied)
        batches = [replace(probe_batches(run, torch.device("cpu"))[n % 2], samples=torch.tensor([n])) for n in range(3)]
        for _ in range(2):
            for n, batch in enumerate(batches):
                backward(stage, state, batch, None if behind is None else n)
                if behind is not None and n >= behind:
                    state.reducer.run_deferred((n - behind, 0, 0))
            for n in range(max(0, 3 - behind) if behind else 3, 3):
                state.reducer.run_deferred((n, 0, 0))
            found.append(gradients(state))
            state.reducer.reset()
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert all(gradient.abs().sum() > 0 for gradient in found[0])


def test_only_tables_are_made_at_once_and_what_waits_is_freed_as_it_is_used() -> None:
    run, stage, state = build("bf16", 2, tied=False)
    reducer = state.reducer
    backward(stage, state, probe_batches(run, torch.device("cpu"))[0], 0)
    kinds_of = [{entry.spec.kind for entry in bucket.layout.entries} for bucket in state.buckets]
    tables = {number for number, kinds in enumerate(kinds_of) if ParameterKind.EMBEDDING in kinds}
    assert {*reducer._borrowed} == tables != {*range(len(kinds_of))}, "no buffer of a bucket without a table is held"
    held = reducer._deferred[0, 0, 0]
    kinds = [reducer.buckets[index].layout.entries[entry].spec.kind for index, entry, _ in held]
    assert {*kinds} == {ParameterKind.MATRIX, ParameterKind.BIAS, ParameterKind.NORM}
    assert kinds.count(ParameterKind.MATRIX) == 2 * 5
    watched = [weakref.ref(write) for _, _, write in held]
    del held
    state.reducer.run_deferred((0, 0, 0))
    assert not any(ref() for ref in watched) and not reducer._deferred
    with pytest.raises(KeyError):
        state.reducer.run_deferred((0, 0, 0))
