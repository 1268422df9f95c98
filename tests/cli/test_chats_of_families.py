"""`megazero generate MODEL --chat --interactive` on small models of today's families, each with its own template: the
tokens that the model is given, and its greedy answers, are those of `transformers`, turn after turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.chat_process import LENGTH
from tests.convert.hf_models import CASES, Case, random_model
from tests.inference.test_family_templates import FAMILIES, write_family_tokenizer
from tests.parity.float64 import in_float64

ROOT = Path(__file__).resolve().parents[2]
LINES = ["two and two?", "Grüße, 你好", "and the fox?"]
MODELS = {
    "llama 3, scaled": "Llama 3",
    "qwen 2.5": "Qwen",
    "qwen 3": "Qwen 3",
    "mistral": "Mistral",
    "gemma 2": "Gemma",
    "gemma 3": "Gemma",
    "olmo 2": "OLMo",
    "phi 3": "Phi",
    "smollm 3": "SmolLM 3",
    "granite": "Granite",
}
"""A case of `hf_models` -> its template."""


@dataclass
class Turn:
    """What a model is given, and its answer."""

    question: list[int]
    answer: list[int]
    text: str


class Theirs:
    """A folder in `transformers`, in float64."""

    def __init__(self, folder: Path, ends: Sequence[int]) -> None:
        transformers = pytest.importorskip("transformers")
        self.tokenizer, self.ends = transformers.AutoTokenizer.from_pretrained(folder), list(ends)
        with in_float64():
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float64, attn_implementation="eager"
            ).eval()

    def turn(self, messages: list[dict[str, str]]) -> Turn:
        given = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        with in_float64(), torch.no_grad():
            ids = self.model.generate(
                **given, max_new_tokens=LENGTH, do_sample=False, eos_token_id=self.ends, pad_token_id=0
            )[0].tolist()
        question, answer = ids[: given["input_ids"].shape[1]], ids[given["input_ids"].shape[1] :]
        return Turn(question, answer, self.tokenizer.decode(answer, skip_special_tokens=True))

    def conversation(self) -> list[Turn]:
        messages: list[dict[str, str]] = []
        turns = []
        for line in LINES:
            messages.append({"role": "user", "content": line})
            turns.append(self.turn(messages))
            messages.append({"role": "assistant", "content": turns[-1].text})
        return turns


def saved_with_template(name: str, folder: Path) -> int:
    """Save a model with a tokenizer. Returns the token that ends a turn, which comes where another token came,
    not before the third of the first answer.
    """
    transformers = pytest.importorskip("transformers")
    template = MODELS[name]
    write_family_tokenizer(template, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids(FAMILIES[template].end)
    sizes = {"vocab_size": len(tokenizer), "tie_word_embeddings": False, "max_position_embeddings": 512}
    case: Case = replace(CASES[name], config={**CASES[name].config, **sizes})
    model = random_model(case)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.lm_head.weight.data[end] = 0
    model.save_pretrained(folder)
    answer = Theirs(folder, [end]).turn([{"role": "user", "content": LINES[0]}]).answer
    token = next(token for token in answer[2:] if token not in answer[:2])
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][end] = 1.001 * tensors["lm_head.weight"][token]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return end


@pytest.mark.slow
def test_questions_and_answers_are_those_of_transformers(tmp_path: Path) -> None:
    ends = {}
    for number, name in enumerate(MODELS):
        folder = tmp_path / str(number)
        ends[name] = folder, saved_with_template(name, folder)
        (folder / "stdin").write_text("".join(f"{line}\n" for line in LINES))
    words = [sys.executable, "-m", "tests.cli.chat_process", *(str(folder) for folder, _ in ends.values())]
    subprocess.run(words, cwd=ROOT, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    texts = 0
    for name, (folder, end) in ends.items():
        records, questions = (
            [json.loads(line) for line in (folder / file).read_text().splitlines()] for file in ("stdout", "questions")
        )
        wanted = Theirs(folder, [0, end]).conversation()
        assert wanted[0].answer[-1] == end and len(wanted[0].answer) > 2, name
        texts += len({turn.text for turn in wanted})
        assert questions == [turn.question for turn in wanted], name
        answers = [(record["ids"], record["text"]) for record in records]
        assert answers == [(turn.answer, turn.text) for turn in wanted], name
        assert [record["ended"] for record in records] == [
            "stop token" if turn.answer[-1] in (0, end) else "length" for turn in wanted
        ], name
    assert texts > 2 * len(MODELS), "the questions matter"
