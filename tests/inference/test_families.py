"""Fifty prompts of every family that transformers has today, greedily: the tokens of transformers.generate, one after
the other, of texts shorter and several times longer than the windows of attention and than the first training.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch

from megazero.convert.loading import open_model
from megazero.inference.generate import generate
from megazero.inference.pipeline import Pipeline
from megazero.inference.sampling import Sampling
from megazero.mpu.grid import single_process_grid
from tests.convert.hf_models import CASES, VOCABULARY, Case, in_double, saved
from tests.parity.float64 import in_float64

NEW = 6
LENGTHS = (1, 2, 4, 7, 12, 23)
"""The cases' windows are 3 to 5 positions, and longrope's first training had 8: a text of 4 or 7 tokens crosses them
while it grows.
"""
_TURNED = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 500.0}
TODAY = {name: case for name, case in CASES.items() if case.kind not in ("bloom", "gpt2", "opt")} | {
    "llama, dynamic": Case(
        "llama",
        (1,),
        {**CASES["llama, grouped"].config, "max_position_embeddings": 8, "rope_parameters": _TURNED},
    ),
}


@cache
def prompts() -> list[list[int]]:
    draw = random.Random(5)
    lengths = [LENGTHS[place % len(LENGTHS)] for place in range(50)]
    draw.shuffle(lengths)
    return [[draw.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def their_tokens(case: Case) -> list[list[int]]:
    """Prompts of one length at a time: nothing is padded."""
    rows: list[list[int]] = [[] for _ in prompts()]
    for length in LENGTHS:
        model = in_double(case)  # anew, since "dynamic" frequencies there remember the longest text of a model so far
        model.generation_config.eos_token_id = None
        places = [place for place, prompt in enumerate(prompts()) if len(prompt) == length]
        ids = torch.tensor([prompts()[place] for place in places])
        with in_float64(), torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, pad_token_id=0
            )
        for place, row in zip(places, out[:, length:].tolist(), strict=True):
            rows[place] = row
    return rows


@pytest.mark.few(cases=4)
@pytest.mark.parametrize("name", TODAY)
def test_fifty_prompts_of_different_lengths(name: str, tmp_path: Path) -> None:
    folder, theirs = saved(TODAY[name], tmp_path / "model"), their_tokens(TODAY[name])
    assert len({tuple(row) for row in theirs}) > 30, "the prompts matter"
    grid = single_process_grid("cpu")
    opened = open_model(folder, grid, precision="fp64")
    pipeline = Pipeline.of(opened.stages, grid, opened.chunk_map)
    assert generate(pipeline, prompts(), NEW, Sampling(temperature=0)) == theirs
    if name == "phi 4 mini":  # its keys turn anew when a row becomes longer than the first training's texts
        assert generate(pipeline, prompts(), NEW, Sampling(temperature=0), cached=False) == theirs
