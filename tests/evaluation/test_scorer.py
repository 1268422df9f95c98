"""Scores of windows: those of whole logits in float64, on every layout and at every batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.config.layers.pattern import LayerPattern
from megazero.config.schema import ModelConfig, Run
from megazero.data.indexed import DataError
from megazero.evaluation import losses
from megazero.evaluation.scorer import Scorer
from megazero.evaluation.windows import Window
from megazero.model.batch import MicroBatch
from megazero.model.layout import ModelLayout
from megazero.model.stage import Stage, initialise, whole_model
from megazero.mpu.grid import single_process_grid, single_rank_group
from megazero.pipeline.engine import PipelineEngine
from tests.evaluation.models import VOCABULARY, model, ragged, run_of, scorer_on, scores_on_rank
from tests.ranks import run_ranks

SHAPES = {
    "tied alibi": model(),
    "untied learned": model(
        position_embedding="learned", embedding_layernorm=False, untie_embeddings_and_output_weights=True
    ),
    "rotary": model(
        position_embedding="rotary", norm="rmsnorm", activation="swiglu", num_query_groups=2, disable_bias_linear=True
    ),
    "capped": model(
        layer_pattern=LayerPattern.parsed("window:3, full"),
        attention_cap=0.5,
        logits_cap=0.7,
        logits_multiplier=2.0,
        embedding_multiplier=3.0,
    ),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "pp2-dp2": (4, {"pp": 2}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "pp3": (3, {"pp": 3}),
    "tp4-sp": (4, {"tp": 4, "sequence_parallel": True}),
    "dp3": (3, {}),
    "zb-v": (2, {"pp": 2, "pipeline_schedule": "zb-v", "virtual_stages": 2}),
    "interleaved": (2, {"pp": 2, "virtual_stages": 2}),
}


def reference(shape: ModelConfig, windows: list[Window]) -> list[tuple[float, bool]]:
    """One window after the other, without padding, from the whole logits."""
    stage = Stage(ModelLayout(shape, single_rank_group(), torch.float64), whole_model(shape))
    initialise(stage, 5)
    stage.eval()
    found = []
    for window in windows:
        ids = torch.from_numpy(np.array(window.ids, dtype=np.int64))
        batch = MicroBatch(ids[None, :-1], ids[None, 1:], None, torch.zeros(1, dtype=torch.int64))
        with torch.no_grad():
            logits = stage.logits(None, batch)[-window.scored :, 0]
        labels = ids[-window.scored :]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        found.append((float(loss), bool((logits.argmax(dim=1) == labels).all())))
    return found


def likely(shape: ModelConfig, count: int) -> list[Window]:
    """Windows whose scored tokens are the likeliest ones, as `reference` finds them: greedy must be told from nearly
    greedy.
    """
    stage = Stage(ModelLayout(shape, single_rank_group(), torch.float64), whole_model(shape))
    initialise(stage, 5)
    stage.eval()
    start = torch.arange(count, dtype=torch.int64)[:, None] + 3
    text = start
    for _ in range(6):
        with torch.no_grad():
            logits = stage.logits(None, MicroBatch(text, text, None, torch.arange(count)))
        text = torch.cat([text, logits[-1].argmax(dim=1)[:, None]], dim=1)
    ids = text.tolist()
    wrong = [[*row[:-1], (row[-1] + 1) % VOCABULARY] for row in ids[::2]]
    return [Window(row, 4) for row in [*ids, *wrong]]


@pytest.mark.few(cases=3)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("size", [1, 3, 64])
def test_one_process(name: str, size: int) -> None:
    shape = SHAPES[name]
    windows = ragged(20, 16) + likely(shape, 4)
    found = scorer_on(run_of(shape), single_process_grid(), size).score(windows, greedy=True)
    for score, (loss, greedy) in zip(found, reference(shape, windows), strict=True):
        assert score.loss == pytest.approx(loss, rel=1e-12) and score.greedy is greedy
    assert {score.greedy for score in found} == {True, False}


@cache
def drawn(name: str) -> tuple[list[Window], list[tuple[float, bool]]]:
    """Windows for a shape, and what is right."""
    windows = ragged(23, 16) + likely(SHAPES[name], 3)
    return windows, reference(SHAPES[name], windows)


def all_scores_on_rank(rank: int, size: int, jobs: list[tuple[Run, list[Window]]]) -> list[Any]:
    return [scores_on_rank(rank, size, run, 3, windows) for run, windows in jobs]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    """On layouts whose tp ranks hold padding of the vocabulary (101 of 104 or 128 rows), whose replicas get unequal
    shares, ...
    """
    size, parallel = LAYOUTS[layout]
    names = [name for name in SHAPES if name != "rotary" or parallel.get("tp") != 4]  # two key-value heads
    jobs = [(run_of(SHAPES[name], **parallel), drawn(name)[0]) for name in names]
    results = run_ranks(size, all_scores_on_rank, size, jobs)
    assert all(result == results[0] for result in results), "every rank knows all scores"
    for name, scores in zip(names, results[0], strict=True):
        for (loss, greedy), (right, is_greedy) in zip(scores, drawn(name)[1], strict=True):
            assert loss == pytest.approx(right, rel=1e-12) and greedy is is_greedy


def test_nothing_to_score() -> None:
    assert scorer_on(run_of(model()), single_process_grid(), 4).score([]) == []


def test_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same to the last rounding when the logits of few rows exist at a time; and no more than those do."""
    windows = ragged(12, 16)
    scorer = scorer_on(run_of(model()), single_process_grid(), 12)
    whole = scorer.score(windows)
    rows: list[int] = []

    def counting(x: Tensor, weight: Tensor, bias: None) -> Tensor:
        rows.append(x.shape[0])
        return F.linear(x, weight, bias)

    monkeypatch.setattr(losses, "linear", counting)
    monkeypatch.setattr(losses, "BLOCK_BYTES", {"cpu": 5 * 8 * 104})
    again = scorer.score(windows)
    assert max(rows) == 5 and sum(rows) == sum(window.scored for window in windows), (
        "the head works for what is scored only"
    )
    assert [score.loss for score in again] == pytest.approx([score.loss for score in whole], rel=1e-13)


def test_ties_go_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As argmax has it: with all logits equal token 0 is the greedy one, and no other."""
    scorer = scorer_on(run_of(model()), single_process_grid(), 4)
    with torch.no_grad():
        for parameter in scorer.stages[0].parameters():
            parameter.zero_()
    first, other = scorer.score([Window([3, 0], 1), Window([3, 5], 1)], greedy=True)
    assert first.greedy is True and other.greedy is False
    assert first.loss == other.loss == pytest.approx(math.log(VOCABULARY))


def test_tokens_of_another_vocabulary_are_refused() -> None:
    scorer = scorer_on(run_of(model()), single_process_grid(), 4)
    with pytest.raises(DataError, match="token 101 is not in the model's vocabulary of 101"):
        scorer.score([Window([1, 2], 1), Window([1, 101], 1)])
    with pytest.raises(DataError, match="token -1"):
        scorer.score([Window([-1, 2], 1)])
    learned = scorer_on(run_of(SHAPES["untied learned"]), single_process_grid(), 4)
    with pytest.raises(DataError, match="17 tokens is longer than the model's 16 learned positions"):
        learned.score([Window([1] * 18, 1)])


def test_scoring_changes_no_mode() -> None:
    grid = single_process_grid()
    scorer: Scorer = scorer_on(run_of(model(hidden_dropout=0.5)), grid, 4)
    windows = ragged(6, 16)
    once = scorer.score(windows)
    assert not any(module.training for module in scorer.stages[0].modules())
    assert scorer.score(windows) == once


def cold_scores_on_rank(rank: int, size: int, run: Run, windows: list[Window]) -> tuple[object, int]:
    """Scores with engines that warm up, as over NCCL; and how often one has."""
    warmed: list[int] = []
    original = PipelineEngine.warm_up_evaluation

    def counted(self: PipelineEngine, batches: Sequence[MicroBatch]) -> None:
        warmed.append(len(batches))
        original(self, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineEngine, "cool", lambda self: setattr(self, "is_warm", {True: False, False: False}))
        patch.setattr(PipelineEngine, "warm_up_evaluation", counted)
        return scores_on_rank(rank, size, run, 3, windows), len(warmed)


@pytest.mark.few(cases=1)
@pytest.mark.parametrize("layout", ["zb-v", "tp2-pp2"])
def test_a_warm_up_scores_nothing(layout: str) -> None:
    """Its hidden states are made up: scores are the same, and each shape of messages warms up once."""
    size, parallel = LAYOUTS[layout]
    run, windows = run_of(SHAPES["tied alibi"], **parallel), ragged(23, 16)
    plain = run_ranks(size, scores_on_rank, size, run, 3, windows)
    for scores, (cold, warmed) in zip(plain, run_ranks(size, cold_scores_on_rank, size, run, windows), strict=True):
        assert cold == scores and 0 < warmed <= 3
