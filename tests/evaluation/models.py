"""Small models for scoring, with the same values on every layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megazero.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, Run, ScheduleConfig
from megazero.evaluation.scorer import Scorer
from megazero.evaluation.windows import Window
from megazero.model.stage import initialise
from megazero.mpu.axes import Axes
from megazero.mpu.grid import ProcessGrid, build_grid
from megazero.pipeline.build import build_stages

VOCABULARY = 101


def model(**changes: object) -> ModelConfig:
    base = ModelConfig(
        num_layers=5,
        hidden_size=24,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        seq_length=16,
        make_vocab_size_divisible_by=8,
    )
    shape = {"position_embedding": "alibi", "embedding_layernorm": True, "init_method_std": 0.3}
    return replace(base, **{**shape, **changes})  # type: ignore[arg-type]


def run_of(shape: ModelConfig, precision: str = "fp64", **parallel: object) -> Run:
    layout = ParallelConfig(**parallel)  # type: ignore[arg-type]
    return Run(
        model=shape,
        parallel=layout,
        optimizer=OptimizerConfig(precision=precision),
        schedule=ScheduleConfig(micro_batch_size=1),
    )


def scorer_on(run: Run, grid: ProcessGrid, micro_batch_size: int) -> Scorer:
    stages = build_stages(run, grid)
    for stage in stages:
        initialise(stage, 5)
        stage.eval()
    return Scorer(run, stages, grid, micro_batch_size)


def scores_on_rank(
    rank: int, size: int, run: Run, micro_batch_size: int, windows: list[Window]
) -> list[tuple[float, bool | None]]:
    """On a rank of a world."""
    parallel = run.parallel
    grid = build_grid(Axes(parallel.pp, size // (parallel.tp * parallel.pp), 1, parallel.tp))
    scorer = scorer_on(run, grid, micro_batch_size)
    return [(score.loss, score.greedy) for score in scorer.score(windows, greedy=True)]


def ragged(count: int, longest: int, seed: int = 7) -> list[Window]:
    """Windows of all lengths from one token on, of which some score everything, others their end."""
    random = np.random.default_rng(seed)
    lengths = [1, longest, *random.integers(1, longest + 1, count - 2)]
    return [
        Window(random.integers(0, VOCABULARY, length + 1), int(random.integers(1, length + 1))) for length in lengths
    ]
