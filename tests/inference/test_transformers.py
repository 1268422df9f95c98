"""Fifty prompts of different lengths, in batches, greedily: the tokens of transformers.generate, one after the other,
on every layout.
"""

from __future__ import annotations

import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import megazero
from megazero.convert.convert import convert
from megazero.convert.formats import TargetOptions
from megazero.convert.loading import open_model
from megazero.convert.registry import format_table, open_source
from megazero.data.progress import silent
from megazero.inference.generate import generate
from megazero.inference.pipeline import Pipeline
from megazero.inference.sampling import Sampling
from megazero.mpu.axes import Axes
from megazero.mpu.grid import build_grid
from tests.ranks import run_ranks

VOCABULARY, NEW = 131, 12


def config_of(family: str) -> Any:
    """Small, with weights large enough that the next token depends on the context and two are never equally likely."""
    transformers = pytest.importorskip("transformers")
    wide = {
        "vocab_size": VOCABULARY,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    made = {
        "bloom": lambda: transformers.BloomConfig(**wide, hidden_size=48, n_layer=3, n_head=6),
        "gpt2": lambda: transformers.GPT2Config(**wide, n_positions=64, n_embd=48, n_layer=3, n_head=4),
        "llama": lambda: transformers.LlamaConfig(
            **wide,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=4,
        ),
        "opt": lambda: transformers.OPTConfig(
            **(wide | {"init_std": 0.3}),
            hidden_size=48,
            word_embed_proj_dim=48,
            num_hidden_layers=3,
            ffn_dim=96,
            num_attention_heads=4,
            max_position_embeddings=64,
        ),
    }
    return made[family]()


FAMILIES = ("bloom", "gpt2", "llama", "opt")


@cache
def prompts() -> list[list[int]]:
    random.seed(5)
    return [
        [random.randrange(VOCABULARY) for _ in range(length)]
        for length in random.choices((1, 2, 3, 7, 12, 18, 25, 39), k=50)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each family, as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    found = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config_of(family))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape)  # biases and norms that could not be left out
        model.save_pretrained(found / family)
    return found


def expected(path: Path) -> list[list[int]]:
    """transformers' own, prompts of one length at a time: nothing is padded."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    rows: list[list[int]] = [[] for _ in prompts()]
    for length in {len(prompt) for prompt in prompts()}:
        places = [place for place, prompt in enumerate(prompts()) if len(prompt) == length]
        ids = torch.tensor([prompts()[place] for place in places])
        count = {"max_new_tokens": NEW, "min_new_tokens": NEW}
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None, pad_token_id=0, **count
        )
        for place, row in zip(places, out[:, length:].tolist(), strict=True):
            rows[place] = row
    return rows


def ours(rank: int, axes: Axes, folder: Path) -> dict[str, list[list[int]]]:
    """25 rows at once."""
    grid = build_grid(axes)
    found = {}
    for family in FAMILIES:
        opened = open_model(folder / family, grid, precision="fp64")
        pipeline = Pipeline.of(opened.stages, grid, opened.chunk_map)
        halves = [generate(pipeline, half, NEW, Sampling(temperature=0)) for half in (prompts()[:25], prompts()[25:])]
        found[family] = halves[0] + halves[1]
    return found


@pytest.mark.slow
def test_the_tokens_of_transformers(folder: Path) -> None:
    theirs = {family: expected(folder / family) for family in FAMILIES}
    assert all(len({tuple(row) for row in rows}) > 40 for rows in theirs.values()), "the prompts matter"
    assert ours(0, Axes(), folder) == theirs
    assert run_ranks(4, ours, Axes(tp=2, pp=2), folder) == [theirs] * 4


def test_every_token_that_ends_a_text_does(folder: Path, tmp_path: Path) -> None:
    """Those of generation_config.json, which may be several, else those of config.json; kept by a checkpoint of our
    own.
    """
    transformers = pytest.importorskip("transformers")
    prompt = prompts()[0]
    (row,) = (own[len(prompt) :] for own in [megazero.load(folder / "gpt2", precision="fp64").generate(prompt, NEW)])
    second = next(token for token in row[2:] if token not in row[:2])
    place = row.index(second)
    for name, without in (("generation_config.json", False), ("config.json", True)):
        copied = shutil.copytree(folder / "gpt2", tmp_path / name)
        if without:
            (copied / "generation_config.json").unlink()
        path = copied / name
        unused = next(token for token in range(VOCABULARY) if token not in row)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [unused, second]}))
        model = transformers.AutoModelForCausalLM.from_pretrained(copied, dtype=torch.float64).eval()
        wanted = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW)[0].tolist()
        assert len(wanted) == len(prompt) + place + 1 < len(prompt) + NEW
        with open_source(copied) as source:
            convert(source, format_table()["megazero"], tmp_path / f"ours-{name}", TargetOptions(), silent)
        for where in (copied, tmp_path / f"ours-{name}"):
            assert megazero.load(where, precision="fp64").generate(prompt, NEW) == wanted, (name, where)
