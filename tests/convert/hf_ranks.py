"""The work of a rank with a Hugging Face folder: fill its stages, compute logits, generate."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.convert.loading import open_model
from megazero.inference.generate import generate
from megazero.inference.pipeline import Pipeline
from megazero.inference.sampling import Sampling
from megazero.mpu.axes import Axes
from megazero.mpu.grid import build_grid

Answer = tuple[Tensor | None, list[list[int]]]


def answers(rank: int, layouts: list[tuple[int, int, list[str]]], ids: Tensor, new: int) -> list[list[Answer]]:
    """For every (tp, pp, folders): logits [b, s, v] in float64 on ranks with the head, and the tokens that greedy
    generation adds.
    """
    found = []
    for tp, pp, folders in layouts:
        grid = build_grid(Axes(tp=tp, pp=pp))
        found.append([answer(folder, grid, ids, new) for folder in folders])
    return found


def answer(folder: str, grid: object, ids: Tensor, new: int) -> Answer:
    opened = open_model(folder, grid, precision="fp64")  # type: ignore[arg-type]
    pipeline = Pipeline.of(opened.stages, grid, opened.chunk_map)  # type: ignore[arg-type]
    b, s = ids.shape
    with pipeline.evaluating():
        rows = pipeline.logits(ids.repeat_interleave(s, dim=0), torch.arange(s).repeat(b))
    logits = None if rows is None else rows.view(b, s, -1)
    return logits, generate(pipeline, ids.tolist(), new, Sampling(temperature=0))
