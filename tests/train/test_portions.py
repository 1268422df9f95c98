"""A state that is in memory a portion at a time starts from other weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.format import COLUMNS
from megazero.config.schema import ModelConfig, ParallelConfig, Run
from megazero.convert.registry import open_source
from megazero.convert.source import ConversionError
from megazero.mpu.axes import Axes
from megazero.mpu.grid import single_process_grid
from megazero.plan.rank_state import specs_of
from megazero.train.init_from import load_weights
from megazero.zero.layout import FragmentSpec, Packing, owned_fragments
from tests.checkpoint.fakes import box_of
from tests.checkpoint.resting import Rest, RestingState, checkpoints_of

MODEL = ModelConfig(num_layers=2, hidden_size=24, num_attention_heads=6, vocab_size=50, seq_length=8)
AXES = Axes(2, 2, 1, 3)


def run_of(rows: int = 50) -> Run:
    parallel = ParallelConfig(tp=AXES.tp, pp=AXES.pp, device="cpu")
    return Run(model=replace(MODEL, vocab_size=rows, make_vocab_size_divisible_by=1), parallel=parallel)


def held_by(run: Run, rank: int) -> list[FragmentSpec]:
    at = AXES.coordinates(rank)
    return [one for _, one in owned_fragments(specs_of(run, at.pp, at.tp), AXES, at, Packing(900))]


def resting(held: list[FragmentSpec], most: int) -> RestingState:
    rest: Rest = {(one.spec.name, column): torch.full((one.numel,), -7.0) for one in held for column in COLUMNS}
    return RestingState(held, rest, most)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one process with random weights."""
    folder = tmp_path_factory.mktemp("saved")
    run = replace(run_of(), parallel=ParallelConfig(device="cpu"))
    grid = single_process_grid()
    held: list[FragmentSpec] = [one for _, one in owned_fragments(specs_of(run, 0, 0), Axes(), grid.at, Packing(10**6))]
    state = resting(held, 10**6)
    generator = torch.Generator().manual_seed(4)
    for values in state.rest.values():
        values.copy_(torch.randn(values.shape, generator=generator))
    checkpoints = checkpoints_of(folder, state, lambda: [held], run)
    checkpoints.claim()
    checkpoints.save(1, {"iteration": 1})
    return folder


@pytest.mark.parametrize("most", [53, 300])
@pytest.mark.parametrize("rows", [50, 58], ids=["as it is", "extended"])
def test_weights_come_portion_by_portion(saved: Path, most: int, rows: int) -> None:
    run = run_of(rows)
    with open_source(saved) as source:
        weights = {name: source.read(name) for name in source.entries}
    mean = weights["embedding.word.weight"].double().mean(0, keepdim=True).float()
    weights["embedding.word.weight"] = torch.cat([weights["embedding.word.weight"], mean.expand(rows - 50, -1)])
    for rank in range(AXES.world_size):
        state = resting(held_by(run, rank), most)
        load_weights(str(saved), state, single_process_grid())
        assert state.most_alive == 1 and state.closed == 1 and state.loaded == 1 and len(state.parts) > 2
        for one in state.held:
            wanted = box_of(weights[one.spec.name], one.spec).reshape(-1)[one.start : one.stop]
            assert torch.equal(state.rest[one.spec.name, "weight"], wanted), (rank, one.spec.name)
            assert all(bool((state.rest[one.spec.name, c] == -7.0).all()) for c in COLUMNS[1:])


def test_weights_that_do_not_fit_are_refused_before_any_portion(saved: Path) -> None:
    state = resting(held_by(run_of(40), 0), 700)
    with pytest.raises(ConversionError, match=r"embedding\.word\.weight is \[50, 24\], not \[40, 24\]"):
        load_weights(str(saved), state, single_process_grid())
    assert state.alive == [] and state.loaded == 0
