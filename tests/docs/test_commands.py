"""Every command and program of every page can be run: see tests/docs/kinds.py for how."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.cli.main import SUBCOMMANDS, main
from megazero.cli.pretrain import train
from megazero.config.parse import parse_run
from megazero.mpu.meeting import Environment
from tests.docs import newcomer
from tests.docs.kinds import ELSEWHERE, SHRUNK, elsewhere, program, shrunk_numbers, training
from tests.docs.pages import ROOT, Command, all_commands, commands, fences, pages
from tests.docs.place import furnish
from tests.parity.training import job_on_rank
from tests.ranks import run_ranks

OWN_TEXT = "docs/start/own-text.md"
CONVERT = "docs/how-to/convert.md"
BEFORE = dict.fromkeys(("docs/how-to/use-a-model.md", "docs/how-to/serve.md"), CONVERT)
"""Pages that use what another's commands make."""


def run_here(page: str) -> list[Command]:
    return [command for command in commands(page) if not elsewhere(command.line)]


RUN_HERE = [page for page in pages() if page != OWN_TEXT and run_here(page)]


def test_pages_have_commands_of_every_kind() -> None:
    assert len(all_commands()) > 40 and len(RUN_HERE) > 10
    lines = [command.line for command in all_commands()]
    assert "make pretrain # train a 10M-parameter" in "\n".join(lines)
    used = [*SHRUNK, *(pattern for pattern in ELSEWHERE if "pytest" not in pattern)]
    assert not [pattern for pattern in used if not any(re.match(pattern, line) for line in lines)]


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_tests_that_run_the_others_exist(test: str) -> None:
    path, name = test.split("::")
    assert f"def {name}(" in (ROOT / path).read_text()


def goals() -> list[str]:
    lines = (command.line for command in all_commands() if command.line.startswith("make "))
    return sorted({shlex.split(line, comments=True)[1] for line in lines})


@pytest.mark.parametrize("goal", goals())
def test_make_knows_the_goals(goal: str) -> None:
    subprocess.run(["make", "--dry-run", goal], cwd=ROOT, check=True, capture_output=True)


def test_pytest_knows_the_tests() -> None:
    lines = (command.line for command in all_commands() if command.line.startswith("python -m pytest "))
    named = [word.split("::")[0] for line in lines for word in shlex.split(line)[3:] if word.startswith("tests/")]
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_cluster_command_is_a_valid_run_of_48_ranks() -> None:
    lines = [command.line for command in all_commands() if command.line.startswith("torchrun --nproc-per-node 48 ")]
    assert "torchrun --nproc-per-node 48 pretrain_gpt.py --tp 4 --pp 12 --zero-stage 1" in lines
    for line in lines:
        parse_run(shlex.split(line)[shlex.split(line).index("--tp") :], 48)


def test_every_command_of_megazero_is_in_a_page() -> None:
    words = {line.split()[1] for line in (command.line for command in all_commands()) if line.startswith("megazero ")}
    assert words == set(SUBCOMMANDS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("place")
    furnish(folder)
    return folder


@pytest.fixture(scope="module")
def said(place: Path) -> Pages:
    return Pages(place)


class Pages:
    """Runs the commands of a page, in order and once, and keeps what each said."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.done: dict[str, list[str]] = {}

    def of(self, page: str) -> list[str]:
        if page not in self.done:
            if page in BEFORE:
                self.of(BEFORE[page])
            self.done[page] = [run(command, self.place) for command in run_here(page)]
        return self.done[page]


def train_on_rank(rank: int, size: int, flags: list[str], folder: str) -> str:
    """A training as the program runs it; what rank 0 says."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as told:
        patch.chdir(folder)
        job, _ = job_on_rank(rank, size, flags, keep_log=True)
        job.fit()
        job.report()
    return told.getvalue()


def run(command: Command, folder: Path) -> str:
    """What the command says; it ends with status 0."""
    line = shrunk_numbers(command.line)
    trained = training(line)
    if trained is not None:
        ranks, flags = trained
        return run_ranks(ranks, train_on_rank, ranks, flags, str(folder))[0]
    words = program(line)
    if words is None:
        return run_as_process(shlex.split(line), folder)
    status: int | str | None = 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as told:
        patch.chdir(folder)
        patch.setattr(sys, "stdin", io.StringIO("Say 7.\n"))
        patch.setattr("megazero.launch.exit_now", sys.exit)  # a rank would end this process
        try:
            status = main(words) if words[0] != "pretrain" else look(words[1:])
        except SystemExit as end:
            status = end.code
    assert not status, f"{command}: status {status}\n{told.getvalue()}"
    return told.getvalue()


def look(words: list[str]) -> int:
    """A run that is only looked at: `megazero pretrain` would end this process with its status."""
    train(words, Environment.read())
    return 0


def run_as_process(words: list[str], folder: Path) -> str:
    """What torchrun starts, beside trainings."""
    assert words[0] == "torchrun", words
    started = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(started, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_HERE)
def test_the_commands_of_a_page_run(page: str, said: Pages) -> None:
    assert all(text.strip() for text in said.of(page))


@pytest.mark.slow
def test_from_a_folder_of_text_to_a_model_that_talks(tmp_path: Path) -> None:
    """As a newcomer does it: processes in a folder that is no clone, without a home, in the C locale."""
    pytest.importorskip("jinja2")
    environment = newcomer.surroundings(tmp_path, Path(sys.executable).parent)
    newcomer.furnish(tmp_path)
    told = []
    for command in commands(OWN_TEXT):
        done = newcomer.run(command.line, tmp_path, environment)
        assert done.returncode == 0, f"{command}: status {done.returncode}\n{done.stdout}{done.stderr}"
        told.append(done.stdout)
    assert len(told) == 7
    assert "20 documents" in told[1] and "20 documents in 20 sequences" in told[2]
    assert "made with: hf of 300 tokens" in told[2]
    assert "; 2 epochs" in told[3] and "3 epochs" in told[4] and "40 conversations" in told[4]
    assert told[5].strip()


@pytest.mark.slow
def test_the_second_training_of_a_page_goes_on_from_the_first(said: Pages) -> None:
    first, second, _ = said.of("docs/how-to/resume.md")
    assert "saved" in first and "iter_0000002" in first
    assert "iter_0000002" in second and "iter_0000004" in second


@pytest.mark.slow
def test_programs_run_and_continue_alike(said: Pages) -> None:
    """`transformers` and megazero, with the model of the commands above them."""
    theirs, ours = ("docs/how-to/convert.md", "docs/how-to/use-a-model.md")
    told = [execute(fences(page, "python")[0], said, page) for page in (theirs, ours)]
    assert told[0].startswith("def main(") and told[0].strip() == told[1].strip()


@pytest.mark.slow
def test_peft_opens_the_adapter(said: Pages) -> None:
    pytest.importorskip("peft")
    assert "LoraModel" in execute(fences("docs/how-to/lora.md", "python")[0], said, "docs/how-to/lora.md")


def execute(text: str, said: Pages, page: str) -> str:
    """What a page's program prints, after the page's commands."""
    said.of(page)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as told:
        patch.chdir(said.place)
        exec(compile(shrunk_numbers(text), page, "exec"), {})
    return told.getvalue()
