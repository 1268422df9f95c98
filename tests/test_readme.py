"""What the README and the documents say can be done, can be done."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("line", commands("torchrun "))
def test_torchrun_commands_are_valid(line: str) -> None:
    """Checked for their number of ranks with the code that the ranks run; the layouts themselves run in other tests."""
    words = shlex.split(line)
    ranks, script = int(words[words.index("--nproc-per-node") + 1]), words.index("pretrain_gpt.py")
    parse_run(words[script + 1 :], ranks, some_model)


def some_model(path: str) -> Level:
    """Of the models that the README starts from, which are not here."""
    return Level(path, shape_settings(ModelConfig(vocab_size=32_000)) | {"tokenizer": "byte"})


@pytest.mark.slow
@pytest.mark.parametrize("line", commands("python "))
def test_python_commands_run(line: str) -> None:
    words = shlex.split(line, comments=True)
    done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "docs/performance.md"])
def test_links_and_named_files_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [ROOT / page if link.startswith("#") else (ROOT / page).parent / link for link in re.findall(r"\]\(([^)]+)\)", text)]
    named = [ROOT / path.rstrip("/") for path in re.findall(r"`((?:megazero|tools|tests|examples|fused_ops|docs)/[\w./-]*)`", text)]
    assert not [str(path.relative_to(ROOT)) for path in links + named if not path.exists()]


def test_the_first_screen_says_it_all() -> None:
    screen = "\n".join(README.splitlines()[:24])
    for needed in ("make pretrain", "make test", "torchrun --nproc-per-node 48 pretrain_gpt.py --tp 4 --pp 12 --zero-stage 1"):
        assert needed in screen
