"""A model of transformers as units of megazero.engine, beside the run of our own family from the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megazero
from tests.convert.hf_models import CASES, in_double, saved
from tests.parity.float64 import in_float64
from tests.ranks import run_ranks

STEPS, SAMPLES, LENGTH, RATE = 4, 4, 12, 5e-3
FAMILIES = ("gpt2, inner width", "llama, grouped", "qwen 3", "bloom, 12 heads")
OF_BOTH: Mapping[str, Any] = {"precision": "fp64", "clip_grad": 0.8, "adam_eps": 1e-8, "seed": 3}
DECAY = 0.2
LAYOUTS: Mapping[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one": (1, {}, {}),
    "zero-3, and stages": (2, {"zero_stage": 3}, {"pp": 2}),
    "stages, and zero-1": (2, {"pp": 2, "recompute_granularity": "full"}, {"zero_stage": 1}),
}
"""Ranks, the layout of the engine, and that of our family."""


class Sentences:
    """Token ids [LENGTH + 1] each, as our families take them."""

    def __len__(self) -> int:
        return STEPS * SAMPLES

    def __getitem__(self, at: int) -> Tensor:
        return torch.randint(0, 93, (LENGTH + 1,), generator=torch.Generator().manual_seed(at))


def by_engine(rank: int, name: str, layout: dict[str, Any], decay: float) -> list[tuple[float, float]]:
    """Loss and norm of each step of the model of transformers."""
    case, rows = CASES[name], Sentences()
    model = in_double(case)  # in evaluation mode: GPT-2 has dropout
    groups = {pattern: {"weight_decay": 0.0} for pattern in NORMS_OF[case.kind]}
    run = {**OF_BOTH, "weight_decay": decay, "adam_beta2": 0.95, **layout}
    made = list[tuple[float, float]]()
    with in_float64(), megazero.engine(megazero.from_transformers(model), "adamw", RATE, run, groups=groups) as engine:
        share = SAMPLES // engine.data_ranks
        for step in range(STEPS):
            numbers = (SAMPLES * step + share * engine.data_rank + each for each in range(share))
            batches = [{"input_ids": rows[at][None], "labels": rows[at][None]} for at in numbers]
            result = engine.step(batches)
            made.append((float(result.loss), float(result.grad_norm)))
    return made


def by_family(rank: int, folder: str, layout: dict[str, Any], decay: float) -> list[tuple[float, float]]:
    """The same of our own family, from the same files."""
    schedule = {"train_iters": STEPS, "global_batch_size": SAMPLES, "micro_batch_size": 1, "lr": RATE}
    of_run = {"lr_decay_style": "constant", "seq_length": LENGTH, "init_from": folder, "adam_beta2": 0.95}
    of_run |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "eval_iters": 0}
    run = {**OF_BOTH, **schedule, **of_run, "weight_decay": decay, **layout}
    with megazero.training(run, train_data=Sentences()) as training:
        return [(float(step.loss), float(step.grad_norm)) for step in training.steps()]


NORMS_OF: Mapping[str, tuple[str, ...]] = {
    "gpt2": ("*.ln_*", "*.bias"),
    "llama": ("*norm*",),
    "qwen3": ("*norm*",),
    "bloom": ("*ln_*", "*layernorm*", "*.bias"),
}
"""What has no weight decay in our families."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_engine_trains_what_our_own_family_trains(name: str, layout: str, tmp_path: Path) -> None:
    ranks, of_engine, of_family = LAYOUTS[layout]
    folder = str(saved(CASES[name], tmp_path / "model"))
    first = run_ranks(ranks, by_engine, name, of_engine, DECAY)[0]
    second = run_ranks(ranks, by_family, folder, of_family, DECAY)[0]
    close = 1e-6 if CASES[name].kind == "bloom" else 1e-9  # its constant inside GELU is rounded over there
    for step, (engine, family) in enumerate(zip(first, second, strict=True)):
        assert engine == pytest.approx(family, rel=close), f"step {step}: {engine} is not {family}"
    assert abs(first[-1][0] - first[0][0]) > 1e-2
