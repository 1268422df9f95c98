"""Stages: two of them equal one, any rank's can be built without memory, and every parameter's name is its place's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megazero.config.derive import every_kth
from megazero.config.dtypes import compute_dtype
from megazero.config.schema import ModelConfig
from megazero.model.layout import ModelLayout
from megazero.model.stage import Stage, StageSpec, initialise
from megazero.mpu.axes import Axes
from megazero.mpu.grid import Group, build_grid
from megazero.mpu.parameter import StateGroup, spec_of
from tests.model.cases import BLOOM, GPT, LLAMA, MODELS, PLAIN, batch_of, load, stage_of, weights_of
from tests.parameters import Piece, assemble, gradients_of, values_of, worst_difference
from tests.ranks import run_ranks


def two_stages(model: ModelConfig, tp: Group, **arguments: Any) -> list[Stage]:
    across = not model.untie_embeddings_and_output_weights
    specs = (StageSpec(range(1), True, False), StageSpec(range(1, model.num_layers), False, True))
    layout = ModelLayout(model, tp, torch.float64, **arguments)
    return [Stage(layout, spec, tied_across_stages=across) for spec in specs]


def by_hand(
    rank: int, size: int, models: list[ModelConfig], sequence_parallel: bool
) -> list[tuple[torch.Tensor, list[Piece]]]:
    tp = build_grid(Axes(tp=size)).tp
    results = []
    for model in models:
        first, last = two_stages(
            model, tp, sequence_parallel=sequence_parallel, recompute=every_kth(model.num_layers, "full", 2)
        )
        load([first, last], weights_of(model))
        batch = batch_of(model)
        sent = first(None, batch)
        received = sent.detach().requires_grad_()
        loss = last(received, batch)
        loss.backward()
        sent.backward(received.grad)
        results.append((loss.detach(), gradients_of(first) + gradients_of(last)))
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("size", "sequence_parallel"), [(1, False), (2, True)])
def test_two_stages_equal_one(size: int, sequence_parallel: bool) -> None:
    models = list(MODELS.values())
    ranks = run_ranks(size, by_hand, size, models, sequence_parallel)
    for index, model in enumerate(models):
        stage = stage_of(model)
        load(stage, weights_of(model))
        loss = stage(None, batch_of(model))
        loss.backward()
        torch.testing.assert_close(ranks[0][index][0], loss.detach(), rtol=1e-13, atol=0)
        whole = assemble([rank[index][1] for rank in ranks], unreduced=True, tolerance=1e-13)
        apart, where = worst_difference(whole, assemble([gradients_of(stage)]))
        assert apart < 1e-11, where


@pytest.mark.parametrize("name", MODELS)
def test_names_are_places(name: str) -> None:
    stage = stage_of(MODELS[name])
    assert [n for n, _ in stage.named_parameters()] == [spec_of(p).name for p in stage.parameters()]
    units = stage.units()
    assert [type(unit).__name__ for unit in units] == ["Embedding", "Block", "Block", "Block", "Head"]
    assert {id(p) for unit in units for p in unit.parameters()} == {id(p) for p in stage.parameters()}


def test_tied_places() -> None:
    """One parameter on one rank; on two stages each copy says so; untied none does."""
    whole = stage_of(BLOOM)
    assert whole.head is not None and whole.embedding is not None
    assert (
        whole.head.weight is whole.embedding.word.weight and whole.head.weight.spec.state_group is StateGroup.REPLICAS
    )
    first, last = two_stages(BLOOM, Group((0,), 0, None))
    assert first.embedding is not None and last.head is not None
    assert first.embedding.word.weight.spec == last.head.weight.spec
    assert (
        last.head.weight.spec.state_group is StateGroup.TIED and last.head.weight.spec.name == "embedding.word.weight"
    )
    assert all(
        spec_of(p).state_group is StateGroup.REPLICAS
        for stage in two_stages(LLAMA, Group((0,), 0, None))
        for p in stage.parameters()
    )


def test_tied_head_in_another_chunk_of_the_rank() -> None:
    tied, untied = (ModelLayout(model, Group((0,), 0, None), torch.float64) for model in (BLOOM, PLAIN))
    first = Stage(tied, StageSpec(range(2), True, False))
    assert first.embedding is not None
    last = Stage(tied, StageSpec(range(2, 3), False, True), shared_embedding=first.embedding.word)
    assert last.head is not None and last.head.weight is first.embedding.word.weight
    with pytest.raises(ValueError, match="tied head needs the embedding"):
        Stage(tied, StageSpec(range(2, 3), False, True))
    with pytest.raises(ValueError, match="untied"):
        Stage(untied, StageSpec(range(2, 3), False, True), tied_across_stages=True)


def start(rank: int, size: int, models: list[ModelConfig], seed: int) -> list[list[Piece]]:
    tp = build_grid(Axes(tp=size)).tp
    results = []
    for model in models:
        stages = two_stages(model, tp)
        for stage in stages:
            initialise(stage, seed)
        results.append(values_of(stages))
    return results


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("size", [2, 3])
def test_fault_24_initial_values_do_not_depend_on_the_layout(size: int) -> None:
    """Bitwise: the same on tp ranks and stages as in one process; tp ranks hold no equal shards; tied
    copies are equal.
    """
    models = list(MODELS.values())
    ranks = run_ranks(size, start, size, models, 11)
    for index, model in enumerate(models):
        stage = stage_of(model)
        initialise(stage, 11)
        alone = assemble([values_of(stage)])
        spread = assemble([rank[index] for rank in ranks])
        assert alone.keys() == spread.keys()
        assert all(torch.equal(alone[name], spread[name]) for name in alone)
        qkv = alone["blocks.0.attention.qkv.weight"].chunk(size)
        assert not torch.equal(qkv[0], qkv[1])
        assert abs(alone["blocks.1.attention.qkv.weight"].std() / model.init_method_std - 1) < 0.05
        assert abs(alone["blocks.1.mlp.down.weight"].std() * 6**0.5 / model.init_method_std - 1) < 0.05


def test_fault_28_padding_rows_have_no_gradient_and_start_at_zero() -> None:
    stage = stage_of(BLOOM)
    initialise(stage, 1)
    stage(None, batch_of(BLOOM)).backward()
    assert stage.embedding is not None
    weight = stage.embedding.word.weight
    assert weight.shape[0] == 1008
    assert weight[1003:].count_nonzero() == 0
    assert weight.grad is not None and weight.grad[1003:].count_nonzero() == 0 and weight.grad[1002].count_nonzero() > 0


@pytest.mark.parametrize("name", MODELS)
def test_any_ranks_stage_is_built_without_memory(name: str) -> None:
    """On "meta", for ranks of groups that do not exist: the boxes of all ranks cover each tensor once."""
    model = MODELS[name]
    size = 4
    elements = 0
    for index in range(size):
        tp = Group(tuple(range(100, 100 + size)), index, None)
        for stage in two_stages(model, tp, device="meta", sequence_parallel=True):
            for parameter in stage.parameters():
                spec = spec_of(parameter)
                assert parameter.is_meta and tuple(parameter.shape) == spec.local_shape
                mine = spec.stored_numel if spec.tp_sharded or index == 0 else 0
                copy = spec.state_group is StateGroup.TIED and stage.spec.has_head
                elements += 0 if copy else mine
                assert spec.tp_sharded or spec.tp_partial, f"{spec.name}: replicas see their own positions only"
    assert elements == sum(spec_of(p).stored_numel for p in stage_of(model, device="meta").parameters())


def test_loss_counts_unmasked_predictions_only() -> None:
    model = replace(GPT, hidden_dropout=0.0, attention_dropout=0.0)
    stage, batch = stage_of(model), batch_of(model)
    load(stage, weights_of(model))
    logits = stage.logits(None, batch).transpose(0, 1)
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    assert batch.loss_mask is not None
    torch.testing.assert_close(stage(None, batch), each[batch.loss_mask.flatten()].sum(), rtol=1e-13, atol=0)
    nothing = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    assert stage(None, nothing) == 0.0
    everything = replace(batch, loss_mask=None)
    torch.testing.assert_close(stage(None, everything), each.sum(), rtol=1e-13, atol=0)


def test_evaluation_is_plain_cross_entropy() -> None:
    """Label smoothing and z-loss belong to training; a validation loss stays comparable."""
    stage, plain, batch = stage_of(BLOOM, label_smoothing=0.1, z_loss=1e-2), stage_of(BLOOM), batch_of(BLOOM)
    load([stage, plain], weights_of(BLOOM))
    assert stage(None, batch) != plain(None, batch)
    assert torch.equal(stage.eval()(None, batch), plain.eval()(None, batch))


def test_documents_are_blind_to_each_other() -> None:
    """Logits of a document equal those of the document alone (no positions enter but ALiBi's, which shift all keys
    alike).
    """
    model = MODELS["documents"]
    stage, batch = stage_of(model).eval(), batch_of(model)
    load(stage, weights_of(model))
    documents = torch.tensor([[0] * 5 + [1] * 7, [3] * 2 + [4] * 10])
    whole = stage.logits(None, replace(batch, documents=documents))
    for sample, cut in ((0, 5), (1, 2)):
        for part in (slice(0, cut), slice(cut, None)):
            tokens = batch.tokens[sample : sample + 1, part]
            alone = stage.logits(
                None, replace(batch, tokens=tokens, labels=tokens, samples=batch.samples[:1], documents=None)
            )
            torch.testing.assert_close(whole[part, sample], alone[:, 0], rtol=1e-11, atol=1e-12)


def test_too_long_for_learned_positions() -> None:
    stage = stage_of(GPT)
    load(stage, weights_of(GPT))
    with pytest.raises(ValueError, match="max-position-embeddings"):
        stage(None, batch_of(GPT, length=13))


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.float32), ("fp16", torch.float32), ("fp64", torch.float64)],
)
def test_dtype_of_the_loss(precision: str, dtype: torch.dtype) -> None:
    """fp32 for 16-bit models; close to float64 at the precision's own accuracy; gradients have the
    parameters' dtype.
    """
    for model in (BLOOM, SWIGLU):
        stage = Stage(
            ModelLayout(model, Group((0,), 0, None), compute_dtype(precision)), StageSpec(range(3), True, True)
        )
        load(stage, weights_of(model))
        loss = stage(None, batch_of(model))
        loss.backward()
        exact = stage_of(model)
        load(exact, weights_of(model))
        assert loss.dtype == dtype
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in stage.parameters())
        assert abs(loss.item() / exact(None, batch_of(model)).item() - 1) < {"fp64": 1e-14, "fp32": 1e-5}.get(
            precision, 3e-2
        )


SWIGLU = MODELS["swiglu"]
