"""Recipes for models of the Hub: each trains a tiny model on what it names, and fits the machines of its page."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from docs.extension.recipes import RUNS, TOO_LARGE, RecipeRun, shape_of
from megazero.cli.pretrain import train as run_program
from megazero.config.inventory import parameters
from megazero.config.parse import parse_run
from megazero.config.source import ConfigError
from megazero.data.dataset import PackedSample
from megazero.mpu.meeting import Environment
from megazero.plan.flops import trained_parameters
from tests.convert.hf_models import CASES, saved
from tests.docs.pages import ROOT, commands, text_of
from tests.docs.place import furnish
from tests.parity.training import job_on_rank
from tests.ranks import run_ranks

HUB = ROOT / "examples" / "hub"
PAGE = "docs/reference/recipes.md"
SHRUNK = "--device cpu --seq-length 32 --global-batch-size 4 --eval-iters 0 --lr-warmup-iters 0 --train-iters 4"
# Rows of 64 and 128 columns are whole blocks of the codes of 4 bits; 300 and 0 are of the tokenizer.
WIDER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Family of a name on the Hub -> the case of a tiny model, and what its config.json says else. That of a tuned Llama 3
# names several tokens that end a text, and the first is not the tokenizer's.
TINY: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Qwen3": ("qwen 3", {"eos_token_id": 0, "head_dim": 16}),
    "Llama": ("llama 3, scaled", {"eos_token_id": 0, "head_dim": 16}),
    "Llama, tuned": ("llama 3, scaled", {"eos_token_id": [7, 0], "head_dim": 16}),
}

# Parameters in billions, as the cards of the models on the Hub say.
BILLIONS = {
    "Qwen3-0.6B": 0.596,
    "Qwen3-0.6B-Base": 0.596,
    "Qwen3-1.7B-Base": 1.72,
    "Qwen3-4B-Base": 4.02,
    "Qwen3-8B": 8.19,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "SmolLM3-3B": 3.08,
    "Llama-3.1-8B": 8.03,
    "Llama-3.1-8B-Instruct": 8.03,
    "Llama-3.3-70B-Instruct": 70.6,
}
# Of the two tables with the vocabulary, which QLoRA leaves in 16 bits.
TABLES = {"Qwen3-8B": 1.24, "Qwen3-14B": 1.56, "Qwen3-32B": 1.56}
TABLES |= {"Llama-3.1-8B-Instruct": 1.05, "Llama-3.3-70B-Instruct": 2.10}


def test_all_recipes_are_tested() -> None:
    assert {path.stem for path in HUB.glob("*.yaml")} == {run.recipe for run in RUNS}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model of each family and its tokenizer, chats.jsonl and my-text."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("hub")
    furnish(folder)
    for family, (name, more) in TINY.items():
        case = CASES[name]
        saved(replace(case, config={**case.config, **WIDER, "vocab_size": 300, **more}), folder / family)
        for path in [*folder.glob("models/llama/token*"), *folder.glob("models/llama/chat*")]:
            shutil.copy(path, folder / family)
    for kind in ("bin", "idx"):
        shutil.copy(folder / f"my-data.{kind}", folder / f"my-text.{kind}")
    return folder


@dataclass(frozen=True)
class Trained:
    """losses: of each step. parameters: that are trained. adapters: rank, and bits of the base, or None. first: the
    first sample.
    """

    losses: list[float | None]
    parameters: int
    adapters: tuple[int | None, int | None]
    first: Any


def trained_on_rank(rank: int, size: int, flags: list[str], folder: str) -> Trained:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        job, recorder = job_on_rank(rank, size, flags)
        job.fit()
        lora, first = job.run.lora, job.prepared.datasets.train[0]
        count = parameters(job.run.model) if lora.lora_rank is None else trained_parameters(job.run)
        return Trained(
            [record.loss for record in recorder.records], count, (lora.lora_rank, lora.lora_base_bits), first
        )


def shrunk(run: RecipeRun, ranks: int) -> list[str]:
    """Its flags with a tiny model of its family, on ranks that a test may start."""
    family = run.model.split("/")[1].split("-")[0] + ", tuned" * ("Llama" in run.model and "Instruct" in run.model)
    words = re.sub(r"--init-from \S+", "", run.words).replace("128009", "0")
    words = re.sub(r"--tp \d+", f"--tp {ranks}", words)
    config = ["--config", str(HUB / f"{run.recipe}.yaml"), "--init-from", family]
    return [*config, *words.split(), *SHRUNK.split(), "--lr", "0.01", "--save-interval", "4"]


# The files as they are, every layout of several ranks, and the optimizer in host memory.
KINDS = [run for run in RUNS if not run.words or run.place == "node" or (run.recipe, run.place) == ("continue", "card")]


def name_of(run: RecipeRun) -> str:
    return f"{run.recipe} on {run.place}, {run.model.split('/')[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("run", KINDS, ids=name_of)
def test_a_shrunk_recipe_trains(run: RecipeRun, place: Path, tmp_path: Path) -> None:
    """A tiny model stands in for the Hub's; a loss that falls shows that its weights learn."""
    ranks = min(2, run.machine.ranks)
    folder = tmp_path / "run"
    folder.mkdir()
    for path in place.iterdir():
        (folder / path.name).symlink_to(path)
    trained = run_ranks(ranks, trained_on_rank, ranks, shrunk(run, ranks), str(folder))[0]
    losses = trained.losses
    assert len(losses) == 4 and None not in losses and losses[-1] < losses[0] - 0.1, losses
    expected = {"continue": (None, None), "tune": (None, None), "lora": (16, None), "qlora": (16, 4)}
    assert trained.adapters == expected[run.recipe]
    checkpoint = folder / "runs" / run.recipe / "iter_0000004"
    assert json.loads((checkpoint / "manifest.json").read_text())
    stored = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert stored == pytest.approx(12 * trained.parameters, rel=0.1), "the page says what a checkpoint takes"
    assert (checkpoint / "peft").is_dir() == (run.recipe in ("lora", "qlora"))
    if run.recipe == "continue":
        assert len(trained.first) == 33
        return
    assert isinstance(trained.first, PackedSample)
    assert len({*trained.first.documents[trained.first.loss_mask].tolist()}) > 1, "a sample has several conversations"
    assert 0 < trained.first.loss_mask.sum() < 32, "questions are not learned"


def test_a_tuned_llama_needs_the_flag_that_its_recipes_have(place: Path) -> None:
    (run, *_) = (run for run in RUNS if "Llama" in run.model and run.recipe == "lora")
    flags = shrunk(run, 1)
    without = flags[: flags.index("--eod-id")] + flags[flags.index("--eod-id") + 2 :]
    with pytest.raises(ConfigError, match="say which with --eod-id 7 or --eod-id 0"):
        trained_on_rank(0, 1, without, str(place))


# --- memory ----------------------------------------------------------------------------------------------------------


def state_by_hand(run: RecipeRun) -> float:
    """GB of model state on a rank: 2 bytes of a weight, 4 of a gradient and 12 of Adam's in 32 bits, as shards of tp
    and ZeRO-1; of a frozen matrix of 4 bits, half a byte and a 64th of one for scales.
    """
    settings, name = run.run, run.model.split("/")[1]
    parallel, billions = settings.parallel, BILLIONS[name] / settings.parallel.tp
    if settings.lora.lora_base_bits == 4:
        tables = TABLES[name] / parallel.tp
        return (billions - tables) * 0.516 + tables * 2
    if settings.lora.lora_rank is not None:
        return billions * 2
    gradients = 0 if "--offload-gradients" in run.words else 4
    moments = 12 / (run.machine.ranks // parallel.tp if parallel.zero_stage else 1)
    return billions * (2 + gradients + (0 if "--offload-optimizer" in run.words else moments))


def stated() -> dict[tuple[str, str], float]:
    """(recipe, flags) -> GB of a rank, as the tables of the page say; a test of the pages holds that they are new."""
    cells = re.findall(r"^\| (.*) \|$", text_of(PAGE), re.M)
    rows = [row.split(" | ") for row in cells if " GB" in row.split(" | ")[0]]
    fitting, large = rows[: len(RUNS)], rows[len(RUNS) :]
    assert len(large) == len(TOO_LARGE)
    numbers = {}
    for run, row in zip(RUNS, fitting, strict=True):
        assert row[:2] == [run.machine.name, run.model.split("/")[1]]
        numbers[run.recipe, run.words] = float(row[2].split()[0])
    for (run, smaller, more), row in zip(TOO_LARGE, large, strict=True):
        assert row[1] == f"`{run.recipe}.yaml {run.words}`" and row[4] == f"`{more}`"
        numbers[run.recipe, run.words], numbers[smaller.recipe, smaller.words] = (
            float(row[column].split()[0]) for column in (2, 5)
        )
        assert float(row[3].split()[0]) == pytest.approx(float(row[2].split()[0]) - run.machine.gigabytes)
    return numbers


def test_the_stated_memory_is_that_by_hand_and_more() -> None:
    """What comes on top, adapters and activations, is a few GB, and more for gradients on their way to the host."""
    memory = stated()
    for run in [*RUNS, *(run for pair in TOO_LARGE for run in pair[:2])]:
        by_hand, predicted = state_by_hand(run), memory[run.recipe, run.words]
        assert by_hand < predicted < 1.25 * by_hand + 6, (run.command, by_hand, predicted)


def test_what_is_said_to_fit_fits_and_the_rest_does_not() -> None:
    """A laptop leaves a quarter to all else, and a card a GB to CUDA's context."""
    memory = stated()
    for run in [*RUNS, *(smaller for _, smaller, _ in TOO_LARGE)]:
        left = 4 if run.machine.kind == "cpu" else 1
        assert memory[run.recipe, run.words] <= run.machine.gigabytes - left, run.command
    for run, _, _ in TOO_LARGE:
        assert memory[run.recipe, run.words] > run.machine.gigabytes, run.command
    assert {(run.recipe, run.place) for run in RUNS} == {
        (recipe, place) for recipe in ("continue", "tune", "lora", "qlora") for place in ("laptop", "card", "node")
    }


def test_every_command_of_the_page_is_a_valid_run() -> None:
    lines = [command.line for command in commands(PAGE) if "examples/hub" in command.line]
    assert len(lines) == len(RUNS) + 1
    for line in lines:
        words = shlex.split(line)
        ranks = int(words[2]) if words[0] == "torchrun" else 1
        parse_run(words[words.index("--config") :], ranks, shape_of)


def test_the_planner_prints_what_the_page_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's command, where the name stands for a model's shape as config.json has it."""
    (line,) = (
        command.line for command in commands(PAGE) if "--validate-only" in command.line and "hub" in command.line
    )
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("megazero.train.init_from.model_source", shape_of)
    with redirect_stdout(StringIO()) as printed:
        run_program(shlex.split(line)[2:], Environment(0, 0, 1, 1))
    peak = re.search(r"Peaks of a step.*\n +0 +([\d,]+) ", printed.getvalue(), re.S)
    (row,) = re.findall(r"^\| a card of 24 GB \| Qwen3-14B \| ([\d.]+) GB \|", text_of(PAGE), re.M)
    assert peak and float(row) == pytest.approx(int(peak[1].replace(",", "")) / 1e9, abs=0.05)
