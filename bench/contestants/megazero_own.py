"""A user's model in `megazero.engine`: transformers' BLOOM, which other contestants have too, cut into units."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import megazero
from bench.contestants.common import Step, compile_blocks, rank
from bench.contestants.transformers_ import model_of
from bench.workload import Batches, Workload

PRECISIONS = ("bf16", "fp32")
IGNORED = -100
"""A label that does not count."""


def shifted(labels: Tensor) -> Tensor:
    """Labels by the rule of transformers, of which each belongs to the token before it. labels: [b, s] of each token"""
    return torch.cat([torch.full_like(labels[:, :1], IGNORED), labels[:, :-1]], 1)


def engine_of(model: megazero.Model, work: Workload, run: dict[str, Any]) -> megazero.Engine:
    """The engine of a workload. run: the layout, as fields of a run."""
    settings = {
        "precision": work.precision,
        "device": work.device,
        "clip_grad": work.clip,
        "weight_decay": work.weight_decay,
        "adam_beta1": work.betas[0],
        "adam_beta2": work.betas[1],
        "adam_eps": work.eps,
        **run,
    }
    return megazero.engine(model, "adamw", work.lr, settings)


def build(work: Workload, run: dict[str, Any], compile: bool = False) -> Step:
    """run: the layout, as fields of a run."""
    model, batches = model_of(work, "bloom", "eager"), Batches(work, rank())
    if compile:
        compile_blocks(model)
    engine = engine_of(megazero.from_transformers(model), work, run)

    def step() -> Tensor:
        pairs = [batches() for _ in range(work.micro_batches)]
        return engine.step([{"input_ids": tokens, "labels": shifted(labels)} for tokens, labels in pairs]).loss

    return step
