"""Recipes for models of the Hub: each trains a tiny model of its family, and takes the memory that its page states."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megazero.config.model_shape import shape_settings
from megazero.config.parse import parse_run
from megazero.config.source import ConfigSource
from megazero.mpu.axes import axes_of
from megazero.plan.step_memory import run_peaks
from tests.convert.hf_models import CASES, saved
from tests.docs.pages import ROOT, text_of
from tests.docs.place import furnish
from tests.parity.training import job_on_rank
from tests.ranks import run_ranks

HUB = ROOT / "examples" / "hub"
PAGE = "docs/reference/recipes.md"
# preset with the shape of the recipe's model, ranks
RECIPES = {
    "continue": ("qwen3-0.6b", 1),
    "tune": ("qwen3-0.6b", 1),
    "lora": ("qwen3-8b", 1),
    "qlora": ("qwen3-8b", 1),
    "tune-32b": ("qwen3-32b", 8),
}
SHRUNK = "--device cpu --seq-length 32 --global-batch-size 4 --eval-iters 0 --lr-warmup-iters 0 --train-iters 4"
# Rows of 64 and 128 columns are whole blocks of the codes of 4 bits; 300 and 0 are of the tokenizer.
WIDER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
OF_TOKENIZER = {"vocab_size": 300, "eos_token_id": 0}


def test_all_recipes_are_tested() -> None:
    assert {path.stem for path in HUB.glob("*.yaml")} == set(RECIPES)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Qwen 3, its tokenizer, chats.jsonl and my-text."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("hub")
    furnish(folder)
    case = CASES["qwen 3"]
    saved(replace(case, config={**case.config, **WIDER, **OF_TOKENIZER}), folder / "qwen")
    for path in [*folder.glob("models/llama/token*"), *folder.glob("models/llama/chat*")]:
        shutil.copy(path, folder / "qwen")
    for kind in ("bin", "idx"):
        shutil.copy(folder / f"my-data.{kind}", folder / f"my-text.{kind}")
    return folder


def losses_on_rank(rank: int, size: int, flags: list[str], folder: str) -> list[float | None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        job, recorder = job_on_rank(rank, size, flags)
        job.fit()
        return [record.loss for record in recorder.records]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_shrunk_recipe_trains(recipe: str, place: Path) -> None:
    """The tiny model stands in for the Hub's; a loss that falls shows that its weights learn."""
    ranks = min(2, RECIPES[recipe][1])
    flags = ["--config", str(HUB / f"{recipe}.yaml"), "--init-from", "qwen", "--tp", str(ranks), *SHRUNK.split()]
    losses = run_ranks(ranks, losses_on_rank, ranks, [*flags, "--lr", "0.01"], str(place))[0]
    assert len(losses) == 4 and losses[-1] < losses[0], losses
    assert json.loads((place / "runs" / recipe / "iter_0000004" / "manifest.json").read_text())


def model_of(preset: str) -> Callable[[str], ConfigSource]:
    """What --init-from reads from the config.json of the preset's model."""
    fields = shape_settings(parse_run(["--preset", preset, "--data-path", "my-text"], None).model)
    fields |= {"tokenizer": "hf", "tokenizer_path": "Qwen", "eod_id": 151645}
    return lambda path: ConfigSource(f"--init-from {path}", fields)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_page_states_the_predicted_memory(recipe: str) -> None:
    preset, ranks = RECIPES[recipe]
    run = parse_run(["--config", str(HUB / f"{recipe}.yaml")], ranks, model_of(preset))
    assert (run.checkpoint.init_from or "").lower().removesuffix("-base") == f"qwen/{preset}"
    predicted = max(peak.device_bytes for peak in run_peaks(run, axes_of(run, ranks), "cpu")) / 1e9
    row = re.search(rf"^\| `{recipe}[.]yaml` .*\| ([\d.]+) GB \|$", text_of(PAGE), re.M)
    assert row is not None and float(row[1]) == pytest.approx(predicted, abs=0.06)
