"""Tensor parallelism, sequence parallelism and recompute change nothing: loss and every gradient equal one process's,
in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import pytest
import torch
from torch import Tensor

from megazero.config.derive import every_kth
from megazero.config.schema import ModelConfig
from megazero.model.block import Block
from megazero.mpu.axes import Axes
from megazero.mpu.grid import build_grid
from tests.model.cases import MODELS, batch_of, load, stage_of, weights_of
from tests.parameters import Piece, assemble, gradients_of, worst_difference
from tests.ranks import run_ranks


@dataclass(frozen=True)
class Layout:
    model: ModelConfig
    sequence_parallel: bool
    recompute: str
    recompute_num_layers: int = 1
    samples: int = 2
    length: int = 12
    shared: bool = False


def loss_and_gradients(layout: Layout, weights: dict[str, Tensor], tp: object) -> tuple[Tensor, list[Piece]]:
    stage = stage_of(
        layout.model,
        tp,  # type: ignore[arg-type]
        sequence_parallel=layout.sequence_parallel,
        recompute=every_kth(layout.model.num_layers, layout.recompute, layout.recompute_num_layers),
        shard_recompute_inputs=layout.shared,
        label_smoothing=0.1,
        z_loss=1e-3,
    )
    load(stage, weights)
    loss = stage(None, batch_of(layout.model, layout.samples, layout.length))
    loss.backward()
    return loss.detach(), gradients_of(stage)


def on_ranks(rank: int, size: int, layouts: list[Layout]) -> list[tuple[Tensor, list[Piece]]]:
    tp = build_grid(Axes(tp=size)).tp
    return [loss_and_gradients(layout, weights_of(layout.model), tp) for layout in layouts]


@cache
def alone(model: ModelConfig, samples: int, length: int) -> tuple[Tensor, dict[str, Tensor]]:
    layout = Layout(model, False, "none", samples=samples, length=length)
    loss, pieces = loss_and_gradients(layout, weights_of(model), None)
    return loss, assemble([pieces])


RECOMPUTE = (("none", 1), ("selective", 1), ("full", 1), ("full", 2))
LAYOUTS = {
    f"{name}, sp {(one + other) % 2}, recompute {kind} {every}": Layout(model, (one + other) % 2 == 1, kind, every)
    for (one, (name, model)), (other, (kind, every)) in product(enumerate(MODELS.items()), enumerate(RECOMPUTE))
} | {
    "one sample": Layout(MODELS["bloom"], True, "none", samples=1),
    "one token": Layout(MODELS["gpt"], False, "full", samples=1, length=1),
    "shared inputs": Layout(MODELS["llama"], False, "full", shared=True),
    "shared inputs that do not divide": Layout(MODELS["bloom"], False, "full", samples=1, length=11, shared=True),
}


@pytest.mark.slow
@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_faults_08_and_28_layout_equals_one_process(size: int) -> None:
    """Vocabulary 1003 is no multiple of any size; padded rows get no part of anything. Every two of model, sequence
    parallelism and recompute meet.
    """
    ranks = run_ranks(size, on_ranks, size, list(LAYOUTS.values()))
    for index, (name, layout) in enumerate(LAYOUTS.items()):
        loss, gradients = alone(layout.model, layout.samples, layout.length)
        for rank in ranks:
            torch.testing.assert_close(rank[index][0], loss, rtol=1e-12, atol=0)
        whole = assemble([rank[index][1] for rank in ranks], unreduced=True, tolerance=1e-13)
        apart, where = worst_difference(whole, gradients)
        assert apart < 1e-10, (name, where, apart)


@pytest.mark.few(cases=2)
@pytest.mark.parametrize("name", MODELS)
def test_fault_25_recompute_is_bitwise_the_same(name: str) -> None:
    """Dropout draws the same masks in the recomputation without any saved random state."""
    model = MODELS[name]
    weights = weights_of(model)
    loss, pieces = loss_and_gradients(Layout(model, False, "none"), weights, None)
    for kind, every in RECOMPUTE[1:]:
        again, others = loss_and_gradients(Layout(model, False, kind, every), weights, None)
        assert torch.equal(loss, again)
        assert all(torch.equal(a.values, b.values) for a, b in zip(pieces, others, strict=True))


def test_every_block_has_its_own_word() -> None:
    """Blocks of one stage that drop everything, the core, and nothing: the same bits, and each as its word says."""
    model = MODELS["bloom"]
    table = ("full", "selective", "none")
    stages = [stage_of(model), stage_of(model, recompute=table)]
    found = []
    for stage in stages:
        load(stage, weights_of(model))
        runs = [0] * 6
        for number, block in enumerate(stage.blocks.values()):
            assert isinstance(block, Block) and block.attention_norm is not None
            for place, module in ((number, block.attention_norm), (3 + number, block.attention.dropout)):
                module.register_forward_hook(partial(count, runs, place))
        loss = stage(None, batch_of(model))
        loss.backward()
        found.append((loss.detach(), gradients_of(stage), runs))
    (loss, pieces, once), (again, others, runs) = found
    assert torch.equal(loss, again)
    assert all(torch.equal(a.values, b.values) for a, b in zip(pieces, others, strict=True))
    assert once == [1, 1, 1, 1, 1, 1] and runs == [2, 1, 1, 2, 2, 1]


def count(runs: list[int], place: int, *_: object) -> None:
    runs[place] += 1


def test_a_table_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="2 words for 3 blocks"):
        stage_of(MODELS["bloom"], recompute=("full", "none"))
    with pytest.raises(ValueError, match="'some', not one of none, selective, full"):
        stage_of(MODELS["bloom"], recompute=("full", "none", "some"))


def test_dropout_is_on_in_training_only() -> None:
    model = MODELS["bloom"]
    stage, batch = stage_of(model), batch_of(model)
    load(stage, weights_of(model))
    still = stage_of(replace(model, hidden_dropout=0.0, attention_dropout=0.0))
    load(still, weights_of(model))
    with torch.no_grad():
        expected = still(None, batch)
        assert not torch.isclose(stage(None, batch), expected, rtol=1e-6)
        assert torch.equal(stage.eval()(None, batch), expected)
        other = replace(batch, samples=batch.samples + 1)
        assert torch.equal(stage(None, other), expected)
        assert not torch.equal(stage.train()(None, other), stage(None, batch)), (
            "the mask is keyed by the sample's number"
        )


def test_each_dropout_site_draws_its_own_mask() -> None:
    stage = stage_of(MODELS["bloom"])
    keys = [module.key for module in stage.modules() if hasattr(module, "key")]
    assert len(keys) == 1 + 3 * 3 and len(set(keys)) == len(keys)
