"""What the README and the documents say can be done, can be done."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megazero.config.level import Level
from megazero.config.parse import parse_run
from megazero.config.schema import ModelConfig
from megazero.config.shape import shape_settings

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = [line.strip() for line in README.splitlines() if line.startswith("    ")]


def commands(start: str) -> list[str]:
    return [line for line in COMMANDS if line.startswith(start)]


def test_every_command_is_of_a_kind_that_is_tried_here() -> None:
    assert set(COMMANDS) == set(commands("make ") + commands("torchrun ") + commands("python "))
    assert "torchrun --nproc-per-node 48 pretrain_gpt.py --tp 4 --pp 12 --zero-stage 1" in COMMANDS


@pytest.mark.parametrize("line", commands("make "))
def test_make_knows_the_targets(line: str) -> None:
    target = line.split()[1]
    subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


TRAINING = [line for line in commands("torchrun ") if "pretrain_gpt.py" in line]
TOOLS = [
    line for line in COMMANDS if line.startswith("python ") or (line.startswith("torchrun ") and line not in TRAINING)
]
IN_PLACE = re.compile(r"models/|runs/|notes[.]txt")


@pytest.mark.parametrize("line", TRAINING)
def test_torchrun_commands_are_valid(line: str) -> None:
    """Checked for their number of ranks with the code that the ranks run; the layouts themselves run in other tests."""
    words = shlex.split(line)
    ranks, script = int(words[words.index("--nproc-per-node") + 1]), words.index("pretrain_gpt.py")
    parse_run(words[script + 1 :], ranks, some_model)


def some_model(path: str) -> Level:
    """Of the models that the README starts from, which are not here."""
    return Level(path, shape_settings(ModelConfig(vocab_size=32_000)) | {"tokenizer": "byte"})


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the files that the README's commands name."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("readme")
    torch.manual_seed(0)
    model = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4))
    model.save_pretrained(folder / "models" / "bloom")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [README], tokenizers.trainers.BpeTrainer(vocab_size=299, initial_alphabet=alphabet, special_tokens=["</s>"])
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(
        folder / "models" / "bloom"
    )
    shutil.copytree(folder / "models" / "bloom", folder / "models" / "tuned")
    (folder / "models" / "tuned" / "chat_template.jinja").write_text(
        "{% for turn in messages %}{{ turn['content'] }}{{ eos_token }}{% endfor %}"
    )
    (folder / "notes.txt").write_text(README)
    return folder


def run_in(place: Path, *words: str) -> str:
    """A command of the README where its files are; the tools are named as from the project's folder."""
    named = [str(ROOT / word) if word.startswith("tools/") or word == "pretrain_gpt.py" else word for word in words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *named], cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in TOOLS if not IN_PLACE.search(line)])
def test_commands_of_tools_run(line: str, tmp_path: Path) -> None:
    assert run_in(tmp_path, *shlex.split(line, comments=True)[1:]).strip()


@pytest.mark.slow
def test_commands_and_programs_run_on_what_those_before_them_made(place: Path) -> None:
    for line in (line for line in TOOLS if IN_PLACE.search(line)):
        program, *words = shlex.split(line, comments=True)
        assert run_in(place, *(words if program == "python" else ["-m", "torch.distributed.run", *words])).strip(), line
    programs = re.findall(r"```python\n(.*?)```", README, re.S)
    said = [run_in(place, "-c", program) for program in programs]
    assert len(said) == 2 and all(text.startswith("def main(") for text in said)
    assert said[0].strip() == said[1].strip(), "transformers and megazero continue alike"


PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [
        ROOT / page if link.startswith("#") else (ROOT / page).parent / link
        for link in re.findall(r"\]\(([^)]+)\)", text)
    ]
    named = [
        ROOT / path.rstrip("/")
        for path in re.findall(r"`((?:megazero|tools|tests|examples|fused_ops|docs)/[\w./-]*)`", text)
    ]
    assert not [str(path.relative_to(ROOT)) for path in links + named if not path.exists()]


def test_the_first_screen_says_it_all() -> None:
    screen = "\n".join(README.splitlines()[:24])
    for needed in (
        "make pretrain",
        "make test",
        "torchrun --nproc-per-node 48 pretrain_gpt.py --tp 4 --pp 12 --zero-stage 1",
    ):
        assert needed in screen
