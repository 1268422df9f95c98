"""Generation: greedy equals the argmax of full logits, cached or not; all layouts draw the same text; a row's draws are
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megazero.config.derive import max_positions
from megazero.config.dtypes import compute_dtype
from megazero.config.layers.pattern import LayerPattern
from megazero.config.schema import ModelConfig
from megazero.inference.cache import KeyValueCache
from megazero.inference.generate import generate
from megazero.inference.pipeline import Pipeline
from megazero.inference.sampling import Sampling
from megazero.model.batch import MicroBatch
from megazero.model.layout import ModelLayout
from megazero.model.stage import Stage, StageSpec
from megazero.mpu.axes import Axes
from megazero.mpu.chunks import ChunkMap
from megazero.mpu.grid import build_grid
from tests.model.cases import BLOOM, GPT, LLAMA, MODELS, SWIGLU_BIASES, load, stage_of, weights_of
from tests.ranks import run_ranks

GREEDY = Sampling(temperature=0)
DRAWN = Sampling(temperature=1.2, top_k=50, top_p=0.95, repetition_penalty=1.1, seed=4)
PROMPTS = [[3, 141, 59, 26, 5], [35, 897], [93, 238, 462, 643, 383, 279, 502], [884], [35, 897]]


def loaded(model: ModelConfig, dtype: str = "fp64") -> Stage:
    stage = stage_of(model)
    load(stage, weights_of(model))
    if dtype == "fp64":
        return stage
    narrow = Stage(ModelLayout(model, stage.layout.tp, compute_dtype(dtype)), stage.spec)
    narrow.load_state_dict(stage.state_dict())
    return narrow


def whole(stage: Stage, ids: Sequence[int]) -> Tensor:
    """Logits [s, v] of the training forward, in evaluation mode."""
    tokens = torch.tensor([ids])
    with torch.no_grad():
        return stage.eval().logits(None, MicroBatch(tokens, tokens, None, torch.zeros(1, dtype=torch.int64)))[:, 0]


@pytest.mark.few(cases=3)
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("cached", [True, False])
def test_greedy_takes_the_largest_logit(name: str, cached: bool) -> None:
    """Prompts of different lengths in one batch; also beyond a table of positions, where the oldest tokens leave the
    context.
    """
    model = MODELS[name]
    stage = loaded(model)
    new = generate(Pipeline.of([stage]), PROMPTS, 10, GREEDY, cached=cached)
    assert stage.training, "dropout is off meanwhile and on again after"
    window = max_positions(model) if model.position_embedding == "learned" else 10_000
    for prompt, row in zip(PROMPTS, new, strict=True):
        assert len(row) == 10
        for count, token in enumerate(row):
            assert whole(stage, [*prompt, *row[:count]][-window:])[-1].argmax() == token


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", list(MODELS))
def test_cached_logits_are_the_training_forwards(name: str, dtype: str) -> None:
    """A prompt, a chunk of several tokens and single ones, in rows of different lengths and slots out of which one is
    left out.
    """
    model = replace(MODELS[name], document_mask=False)
    stage = loaded(model, dtype).eval()
    rows = [list(range(7, 7 + 12)), list(range(400, 400 + 9))]
    expected = [whole(stage, row) for row in rows]
    slots, starts = torch.tensor([0, 2]), torch.tensor([5, 2])
    cache, pipeline = KeyValueCache([stage], 3, 1), Pipeline.of([stage])
    tokens = torch.tensor([row[:start] + [0] * (5 - start) for row, start in zip(rows, starts.tolist(), strict=True)])
    tolerance = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 0.05, "fp16": 0.01}[dtype]
    with torch.no_grad():
        found = [pipeline.logits(tokens, starts - 1, cache.beginning(slots, 5))]
        for count in (3, 1, 1, 1):
            tokens = torch.tensor(
                [row[start : start + count] for row, start in zip(rows, starts.tolist(), strict=True)]
            )
            past = cache.continuing(slots, starts, count, int(starts.max()) + count)
            found.append(pipeline.logits(tokens, torch.full((2,), count - 1), past))
            starts = starts + count
    last = [(4, 1), (7, 4), (8, 5), (9, 6), (10, 7)]
    for logits, places in zip(found, last, strict=True):
        assert logits is not None
        for row, place in enumerate(places):
            reference = expected[row][place].double()
            assert ((logits[row].double() - reference).norm() / reference.norm()) < tolerance


def test_a_layer_has_no_more_room_than_its_queries_reach() -> None:
    """Block 0 reaches everything, block 1 has a window of 300, and the other blocks chunks of 40."""
    pattern = LayerPattern.parsed("full, window:300, chunk:40")
    stage = loaded(replace(BLOOM, num_layers=3, layer_pattern=pattern))
    cache, slots = KeyValueCache([stage], 2, 1), torch.tensor([0, 1])
    assert [keys.shape[2] for keys, _ in cache.layers.values()] == [256, 256, 40]
    before = {number: [tensor.uniform_(1, 2).clone() for tensor in pair] for number, pair in cache.layers.items()}
    cache.continuing(slots, torch.tensor([250, 256]), 1, 257)
    cache.beginning(slots, 700, torch.tensor([700, 650]))
    assert [values.shape[2] for _, values in cache.layers.values()] == [768, 300, 40]
    for number, pair in cache.layers.items():
        for tensor, kept in zip(pair, before[number], strict=True):
            assert torch.equal(tensor[:, :, : kept.shape[2]], kept) and not tensor[:, :, kept.shape[2] :].any()
    bytes_of_a_place = 2 * stage.layout.model.hidden_size * stage.layout.dtype.itemsize
    assert cache.nbytes == 2 * (768 + 300 + 40) * bytes_of_a_place


@pytest.mark.slow
def test_room_grows() -> None:
    stage = loaded(LLAMA)
    new = generate(Pipeline.of([stage]), [[5, 6, 7]], 300, GREEDY)[0]
    ids = [5, 6, 7, *new]
    assert whole(stage, ids[:-1])[2:].argmax(-1).tolist() == new


def test_sampling_follows_its_seed() -> None:
    pipeline = Pipeline.of([loaded(BLOOM)])
    first, again, other = (generate(pipeline, PROMPTS, 8, replace(DRAWN, seed=seed)) for seed in (1, 1, 2))
    assert first == again and first != other
    assert first[1] != first[4], "rows with the same prompt have draws of their own"
    assert generate(pipeline, PROMPTS, 8, Sampling(top_k=1, seed=3)) == generate(pipeline, PROMPTS, 8, GREEDY)


def test_draws_do_not_depend_on_other_rows() -> None:
    pipeline = Pipeline.of([loaded(GPT)])
    together = generate(pipeline, PROMPTS, 12, DRAWN)
    for number, prompt in enumerate(PROMPTS):
        assert generate(pipeline, [prompt], 12, DRAWN, numbers=[number]) == [together[number]]


def test_rows_end_by_themselves() -> None:
    pipeline = Pipeline.of([loaded(BLOOM)])
    free = generate(pipeline, PROMPTS, 9, GREEDY)
    separator = free[0][3]
    told: list[tuple[int, int]] = []

    def ends(row: int, token: int) -> bool:
        told.append((row, token))
        return token == separator

    ended = generate(pipeline, PROMPTS, 9, GREEDY, ends=ends)
    assert len(ended[0]) == free[0].index(separator) + 1
    for row, complete in zip(ended, free, strict=True):
        assert row == (complete[: complete.index(separator) + 1] if separator in complete else complete)
    assert [[token for row, token in told if row == number] for number in range(len(PROMPTS))] == ended
    assert generate(pipeline, PROMPTS, 0, GREEDY) == [[]] * len(PROMPTS)


def test_only_the_tokenizers_ids_are_taken() -> None:
    new = generate(Pipeline.of([loaded(BLOOM)]), PROMPTS, 9, Sampling(temperature=3.0), vocabulary=40)
    assert max(max(row) for row in new) < 40


@pytest.mark.parametrize(
    ("prompts", "count", "message"),
    [
        ([[1], []], 3, "prompt 1 is empty"),
        ([[1003]], 3, r"id 1003.*1003"),
        ([[-1]], 3, "id -1"),
        ([[1]], -1, "max_new_tokens"),
    ],
)
def test_refuses(prompts: list[list[int]], count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(Pipeline.of([loaded(BLOOM)]), prompts, count, GREEDY)


def on_grid(
    rank: int, axes: Axes, models: list[ModelConfig], sequence_parallel: bool, chunks: int, and_back: bool
) -> list[list[list[int]]]:
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
                Stage(
                    ModelLayout(model, grid.tp, torch.float64, sequence_parallel=sequence_parallel),
                    spec,
                    tied_across_stages=tied and not together,
                    shared_embedding=None if first is None else first.word,
                )
            )
        load(mine, weights_of(model))
        results.append(generate(Pipeline.of(mine, grid, chunk_map), PROMPTS, 9, DRAWN))
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "sequence_parallel", "chunks", "and_back"),
    [
        (Axes(pp=2, tp=2), False, 1, False),
        (Axes(pp=2, tp=2), True, 1, False),
        (Axes(pp=3), False, 1, False),
        (Axes(pp=2), False, 2, False),
        (Axes(pp=2), False, 2, True),
        (Axes(pp=2, dp=2), False, 1, False),
        (Axes(tp=3), True, 1, False),
    ],
)
def test_every_rank_of_every_layout_draws_the_same(
    axes: Axes, sequence_parallel: bool, chunks: int, and_back: bool
) -> None:
    models = [BLOOM, GPT, LLAMA, SWIGLU_BIASES] if axes.pp > 1 else [LLAMA]
    ranks = run_ranks(axes.world_size, on_grid, axes, models, sequence_parallel, chunks, and_back)
    for index, model in enumerate(models):
        expected = generate(Pipeline.of([loaded(model)]), PROMPTS, 9, DRAWN)
        assert all(rank[index] == expected for rank in ranks)
