"""Generation: greedy equals the argmax of full logits; sampling follows its seed; all layouts draw the same text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megazero.config.schema import ModelConfig
from megazero.model.generate import choose, generate, generate_on_grid
from megazero.model.stage import Stage, StageSpec, build_stage
from megazero.mpu.chunks import ChunkMap
from megazero.mpu.grid import Axes, build_grid
from tests.model.cases import BLOOM, GPT, LLAMA, batch_of, load, stage_of, weights_of
from tests.ranks import run_ranks

PROMPT = torch.tensor([[3, 141, 59, 26, 5], [35, 897, 93, 238, 462]])


def loaded(model: ModelConfig) -> Stage:
    stage = stage_of(model)
    load(stage, weights_of(model))
    return stage


@pytest.mark.parametrize("model", [BLOOM, GPT, LLAMA])
def test_greedy_takes_the_largest_logit(model: ModelConfig) -> None:
    """Also beyond the sequence length, where the oldest tokens leave the context; dropout is off meanwhile and on again after."""
    stage = loaded(model)
    ids = generate(stage, PROMPT, 10, temperature=0)
    assert ids.shape == (2, 15) and torch.equal(ids[:, :5], PROMPT) and stage.training
    stage.eval()
    for length in range(5, 15):
        context = ids[:, max(0, length - model.seq_length) : length]
        batch = replace(batch_of(model), tokens=context, labels=context)
        assert torch.equal(stage.logits(None, batch)[-1].argmax(-1), ids[:, length])


def test_sampling_follows_its_seed() -> None:
    stage = loaded(BLOOM)
    first, again, other = (generate(stage, PROMPT, 8, temperature=1.5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(generate(stage, PROMPT, 8, top_k=1, seed=3), generate(stage, PROMPT, 8, temperature=0))


def test_choice_follows_the_distribution() -> None:
    """Frequencies of 40,000 draws are within 5 standard deviations of softmax(logits / temperature) over the top k."""
    logits = torch.tensor([2.0, 0.5, 1.0, -1.0, 1.5])
    count = 40_000
    for temperature, top_k in ((1.0, 0), (2.0, 0), (0.7, 3)):
        drawn = choose(logits.expand(count, -1), temperature, top_k, torch.Generator().manual_seed(0))
        allowed = logits.topk(top_k or 5).indices
        expected = torch.zeros(5)
        expected[allowed] = (logits[allowed] / temperature).softmax(0)
        seen = drawn.bincount(minlength=5) / count
        assert ((seen - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_ends_with_the_separator() -> None:
    stage = loaded(BLOOM)
    free = generate(stage, PROMPT, 9, temperature=0)
    eod = int(free[0, 7])
    ended = generate(stage, PROMPT, 9, temperature=0, eod_id=eod)
    for row, whole in zip(ended, free, strict=True):
        new = whole[5:].tolist()
        stop = new.index(eod) + 1 if eod in new else 9
        assert row[5 : 5 + stop].tolist() == new[:stop][: len(row) - 5]
        assert (row[5 + stop :] == eod).all()
    alone = generate(stage, PROMPT[:1], 9, temperature=0, eod_id=eod)
    assert alone.shape[1] == 5 + free[0, 5:].tolist().index(eod) + 1, "stops once every row has ended"


@pytest.mark.parametrize(
    "arguments",
    [{"temperature": -1.0}, {"top_k": -1}, {"ids": torch.zeros(1, 0, dtype=torch.int64)}, {"ids": torch.zeros(3, dtype=torch.int64)}],
)
def test_refuses(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"negative|shape"):
        generate(loaded(BLOOM), **{"ids": PROMPT, "max_new_tokens": 2, **arguments})  # type: ignore[arg-type]


def on_grid(rank: int, axes: Axes, models: list[ModelConfig], sequence_parallel: bool, chunks: int, and_back: bool) -> list[Tensor]:
    """Three blocks over pp stages of `chunks` virtual stages each."""
    grid, chunk_map = build_grid(axes), ChunkMap(axes.pp, chunks, and_back)
    parts = axes.pp * chunks
    bounds = [round(i * 3 / parts) for i in range(parts + 1)]
    results = []
    for model in models:
        mine: list[Stage] = []
        for number in chunk_map.of(grid.at.pp):
            spec = StageSpec(range(bounds[number], bounds[number + 1]), number == 0, number == parts - 1)
            tied, together = not model.untie_embeddings_and_output_weights, chunk_map.last_stage == 0
            first = mine[0].embedding if tied and together and spec.has_head and mine else None
            mine.append(
                build_stage(
                    model,
                    "fp64",
                    spec,
                    tp=grid.tp,
                    sequence_parallel=sequence_parallel,
                    tied_across_stages=tied and not together,
                    shared_embedding=None if first is None else first.word,
                )
            )
        load(mine, weights_of(model))
        results.append(generate_on_grid(mine, grid, PROMPT, 9, temperature=1.2, top_k=50, seed=4, chunk_map=chunk_map))
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "sequence_parallel", "chunks", "and_back"),
    [
        (Axes(pp=2, tp=2), True, 1, False),
        (Axes(pp=3), False, 1, False),
        (Axes(pp=2), False, 2, False),
        (Axes(pp=2), False, 2, True),
        (Axes(pp=2, dp=2), False, 1, False),
        (Axes(tp=3), True, 1, False),
    ],
)
def test_every_rank_of_every_layout_draws_the_same(axes: Axes, sequence_parallel: bool, chunks: int, and_back: bool) -> None:
    models = [BLOOM, GPT, LLAMA]
    if axes.pp == 1:
        models = [LLAMA]
    ranks = run_ranks(axes.world_size, on_grid, axes, models, sequence_parallel, chunks, and_back)
    for index, model in enumerate(models):
        expected = generate(loaded(model), PROMPT, 9, temperature=1.2, top_k=50, seed=4)
        assert all(torch.equal(rank[index], expected) for rank in ranks)
